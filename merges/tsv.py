"""TSV-M: keep the top singular triplets of every task vector and decorrelate them before adding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from merges.block import Block
from merges.matrices import add_matrix_delta, matrix_delta
from merges.parameters import Tsv
from merges.spectra import leading_triplets

SMALLEST_EIGENVALUE = 1e-7
"""Gram matrices of singular vectors with an eigenvalue below this have no accurate inverse root: float64 leaves it an
error of 1e-9 of itself at this size. The polar factor then needs a full SVD."""


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
        point. Memory: for two vectors about 14 float64 matrices of the tensor's size (of one slice, for
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
    """Return polar(U) S polar(V)^T of task matrices, all (m, n) float64, with their weights in them.

    With the inverse roots N_U and N_V of the Gram matrices of U and V it is U (N_U S N_V) V^T, whose inner matrix has
    at most min(m, n) rows and columns: the polar factors themselves are never formed.
    """
    rank = min(vectors[0].shape) // len(vectors)
    parts = [part for vector in vectors if (part := leading_triplets(vector, rank)).values.numel()]
    if not parts:
        return torch.zeros_like(vectors[0])
    lefts, rights = [part.left for part in parts], [part.right for part in parts]
    values = torch.cat([part.values for part in parts])
    left_root, right_root = inverse_root(lefts), inverse_root(rights)
    if left_root is None or right_root is None:
        return (polar_factor(lefts) * values) @ polar_factor(rights).T
    inner = (left_root * values) @ right_root
    left, right = torch.cat(lefts, dim=1), torch.cat(rights, dim=1)
    # The inner matrix goes to the shorter side.
    return (left @ inner) @ right.T if len(left) <= len(right) else left @ (right @ inner.T).T


def inverse_root(blocks: Sequence[Tensor]) -> Tensor | None:
    """Return (X^T X)^(-1/2) of the blocks side by side, X = [U_1 ... U_T]; None where it is not accurate.

    Each block has orthonormal columns, float64, shapes (m, k_i). For two blocks of equal width the Gram matrix is
    [[I, C], [C^T, I]] with C = U_1^T U_2 = P diag(c) Q^T, and with a = (1 + c)^(-1/2), b = (1 - c)^(-1/2) its inverse
    root is

        [[P diag(a + b) P^T, P diag(a - b) Q^T], [Q diag(a - b) P^T, Q diag(a + b) Q^T]] / 2

    from one k x k SVD. Other numbers of blocks take an eigendecomposition of the Gram matrix. Columns that nearly
    coincide give an eigenvalue below ``SMALLEST_EIGENVALUE``, and None.

    Returns:
        Shape (sum k_i, sum k_i), symmetric.
    """
    if len(blocks) == 1:
        return torch.eye(blocks[0].shape[1], dtype=blocks[0].dtype, device=blocks[0].device)
    if len(blocks) == 2 and blocks[0].shape == blocks[1].shape:
        turn_first, cosines, turn_second = torch.linalg.svd(blocks[0].T @ blocks[1])
        if cosines[0] > 1 - SMALLEST_EIGENVALUE:
            return None
        sums, differences = (1 + cosines).rsqrt(), (1 - cosines).rsqrt()
        same, other = (sums + differences) / 2, (sums - differences) / 2
        corner = (turn_first * other) @ turn_second
        rows = (turn_first * same) @ turn_first.T, corner, corner.T, (turn_second.T * same) @ turn_second
        return torch.cat((torch.cat(rows[:2], dim=1), torch.cat(rows[2:], dim=1)))
    joined = torch.cat(tuple(blocks), dim=1)
    values, vectors = torch.linalg.eigh(joined.T @ joined)
    return (vectors * values.rsqrt()) @ vectors.T if values[0] > SMALLEST_EIGENVALUE else None


def polar_factor(blocks: Sequence[Tensor]) -> Tensor:
    """Return the nearest matrix with orthonormal columns to the blocks side by side.

    Each block has orthonormal columns, float64, shapes (m, k_i) with sum k_i <= m. It is X (X^T X)^(-1/2), and where
    columns nearly coincide A B of the SVD X = A diag(x) B.
    """
    joined = torch.cat(tuple(blocks), dim=1)
    root = inverse_root(blocks)
    if root is not None:
        return joined @ root
    left, _, right = torch.linalg.svd(joined, full_matrices=False)
    return left @ right
