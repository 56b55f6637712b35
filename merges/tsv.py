"""TSV-M: keep the top singular triplets of every task vector and decorrelate them before adding."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from merges.block import Block
from merges.matrices import add_matrix_delta, matrix_delta
from merges.parameters import Tsv
from merges.spectra import leading_triplets

SMALLEST_GAP = 1e-4
"""Principal vectors closer than this leave no accurate difference; the polar factor then needs a full SVD."""


def tsv(zero: Tensor | None, models: Sequence[Tensor], parameters: Tsv, block: Block) -> Tensor:
    """Return the zero point plus lambda times the decorrelated sum of truncated task matrices.

    For every matrix m x n with T vectors and r = min(m, n):

        U_i S_i V_i^T = the int(r / T) leading singular triplets of w_i tau_i,    tau_i = model_i - zero
        U = [U_1 ... U_T],  S = diag(S_1 ... S_T),  V = [V_1 ... V_T]
        merged = zero + lambda * polar(U) S polar(V)^T

    polar(X) is the nearest matrix with orthonormal columns. Other tensors, and which ones these are:
    ``merges.matrices``. The matrix part is float64, since which triplets are kept and how they are turned depends
    on small differences.

    When the column spaces of task vectors overlap completely, polar(U) is not unique: the missing directions
    are then those of the SVD routine, are made up, and carry energy. Two equal task vectors give sqrt(2)
    times the norm of their truncated part, and half of the energy is arbitrary. Look at cos(tau_1, tau_2)
    before you trust TSV-M.

    Args:
        zero: The zero point.
        models: Two or more, in the order of ``block.models``; any float dtype, equal shapes.
        parameters: Weights by role, lambda, scope and rest.
        block: A whole tensor; its kind decides whether it is taken apart.

    Returns:
        Float32, the same shape, a new tensor; entries whose merged delta is 0 keep the bits of the zero
        point. Memory: for two vectors about 13 float64 matrices of the tensor's size (of one slice, for
        stacks), for the mean 4 tensors.

    Raises:
        ValueError: As ``check_inputs``; there is one model, where TSV-M is task arithmetic; a model has no
            weight; the block starts inside its tensor.

    Source: Gargiulo et al. 2025, Task singular vectors, CVPR, arXiv 2412.00081, Algorithm 1.
    Deviations: embeddings and heads get the mean by default, where the authors' code takes every matrix; so do
        matrices with r < T, of which it keeps nothing. Singular values below ``RESOLUTION`` give no triplet: the
        authors let their arbitrary vectors take part in the polar factor, where they turn the others.
    """
    if len(block.models) == 1:
        raise ValueError("tsv: with 1 task vector it is task arithmetic; use task_arithmetic")
    delta = tsv_delta(zero, models, parameters, block) if parameters.lambda_ else None
    return add_matrix_delta(zero, models, parameters, block, delta)


def tsv_delta(zero: Tensor | None, models: Sequence[Tensor], parameters: Tsv, block: Block) -> Tensor | None:
    """Return the decorrelated sum of the task matrices, float32; None for tensors that are not taken apart."""
    return matrix_delta(zero, models, parameters, block, merge_matrices, smallest=len(models))


def merge_matrices(vectors: Sequence[Tensor]) -> Tensor:
    """Return polar(U) S polar(V)^T of task matrices, all (m, n) float64, with their weights in them."""
    rank = min(vectors[0].shape) // len(vectors)
    parts = [part for vector in vectors if (part := leading_triplets(vector, rank)).values.numel()]
    if not parts:
        return torch.zeros_like(vectors[0])
    left = polar_factor([part.left for part in parts])
    right = polar_factor([part.right for part in parts])
    return (left * torch.cat([part.values for part in parts])) @ right.T


def polar_factor(blocks: Sequence[Tensor]) -> Tensor:
    """Return the nearest matrix with orthonormal columns to the blocks side by side.

    Each block has orthonormal columns, float64, shapes (m, k_i) with sum k_i <= m. For two blocks of equal
    width with C = U_1^T U_2 = P diag(c) Q^T, the columns of U_1 P and U_2 Q meet in pairs of cosine c, and
    the polar factor makes each pair orthogonal where it stands: with s and d the normalised sum and
        difference of a pair,

        polar([U_1 U_2]) = [(s + d) P^T, (s - d) Q^T] / sqrt(2)

    which is X (X^T X)^(-1/2) for X = [U_1 U_2] through one k x k SVD. Where a pair nearly coincides, and for
    other numbers of blocks, it is A B of the SVD X = A diag(x) B.
    """
    if len(blocks) == 1:
        return blocks[0]
    if len(blocks) == 2 and blocks[0].shape == blocks[1].shape:
        first, second = blocks
        turn_first, _, turn_second = torch.linalg.svd(first.T @ second)
        one, two = first @ turn_first, second @ turn_second.T
        sums, differences = one + two, one - two
        gaps = torch.linalg.vector_norm(differences, dim=0)
        if gaps.min() > SMALLEST_GAP:
            sums /= torch.linalg.vector_norm(sums, dim=0) * math.sqrt(2)
            differences /= gaps * math.sqrt(2)
            return torch.cat(((sums + differences) @ turn_first.T, (sums - differences) @ turn_second), dim=1)
    left, _, right = torch.linalg.svd(torch.cat(tuple(blocks), dim=1), full_matrices=False)
    return left @ right
