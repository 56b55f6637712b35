"""STAR: cut every task matrix to its leading singular directions, give it back its nuclear norm, average."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from merges.block import Block
from merges.matrices import add_matrix_delta, matrix_delta
from merges.parameters import Star
from merges.spectra import spectrum


def star(zero: Tensor | None, models: Sequence[Tensor], parameters: Star, block: Block) -> Tensor:
    """Return the zero point plus lambda times the mean of truncated, rescaled task matrices.

    For every matrix, with T vectors and U S V^T the SVD of w_i tau_i, tau_i = model_i - zero:

        r      = the smallest rank with s_1 + ... + s_r >= eta / 100 * sum S
        R_i    = (sum S / (s_1 + ... + s_r)) * U_r S_r V_r^T
        merged = zero + lambda * (R_1 + ... + R_T) / T

    Other tensors, and which ones these are: ``merges.matrices``. With eta 100 nothing is cut and the method is
    the average of the task vectors. One vector is allowed: it is then cut as well.

    Args:
        zero: The zero point.
        models: In the order of ``block.models``; any float dtype, equal shapes.
        parameters: eta in (0, 100], weights by role, lambda, scope and rest.
        block: A whole tensor; its kind decides whether it is taken apart.

    Returns:
        Float32, the same shape, a new tensor; entries whose merged delta is 0 keep the bits of the zero point.
        Memory: with T vectors about T + 6 float64 matrices of the tensor's size (of one slice, for stacks).

    Raises:
        ValueError: As ``check_inputs``; a model has no weight; the block starts inside its tensor.

    Source: Lee et al. 2025, STAR: Spectral truncation and rescale for model merging, NAACL, arXiv 2502.10339.
    Deviations: weights and lambda, which are 1 in the paper; embeddings and heads get the mean by default, where
        the authors' code takes every matrix. Singular values below 2^-23 of the largest count as 0.
    """
    delta = star_delta(zero, models, parameters, block) if parameters.lambda_ else None
    return add_matrix_delta(zero, models, parameters, block, delta)


def star_delta(zero: Tensor | None, models: Sequence[Tensor], parameters: Star, block: Block) -> Tensor | None:
    """Return the mean of the truncated task matrices, float32; None for tensors that are not taken apart."""

    def mean(vectors: list[Tensor]) -> Tensor:
        total = truncated(vectors[0], parameters.eta)
        for vector in vectors[1:]:
            total = total + truncated(vector, parameters.eta)
        return total / len(vectors)

    return matrix_delta(zero, models, parameters, block, mean)


def truncated(matrix: Tensor, eta: float) -> Tensor:
    """Return a float64 matrix cut to the rank that holds ``eta`` percent of its nuclear norm, rescaled to all of it.

    U_r S_r V_r^T is the projection of the matrix on its leading right singular vectors, so no left ones are needed.
    """
    if eta == 100:
        return matrix
    if matrix.shape[0] < matrix.shape[1]:
        return truncated(matrix.T, eta).T
    values, vectors = spectrum(matrix)
    sums = values.cumsum(0)
    if sums[-1] == 0:
        return torch.zeros_like(matrix)
    rank = min(int(torch.searchsorted(sums, eta / 100 * float(sums[-1]))) + 1, values.numel())
    leading = vectors[:, :rank]
    return (matrix @ leading) @ (leading.T * (sums[-1] / sums[rank - 1]))
