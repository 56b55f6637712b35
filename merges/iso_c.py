"""Iso-C: add the task matrices and give the sum a flat spectrum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from merges.block import Block
from merges.matrices import add_matrix_delta, matrix_delta
from merges.parameters import IsoC
from merges.spectra import RESOLUTION, SMALLEST_RATIO, spectrum


def iso_c(zero: Tensor | None, models: Sequence[Tensor], parameters: IsoC, block: Block) -> Tensor:
    """Return the zero point plus lambda times the isotropic sum of the task matrices.

    For every matrix m x n, with r = min(m, n) and tau_i = model_i - zero:

        U S V^T = sum_i w_i tau_i
        merged  = zero + lambda * (sum S / r) * U V^T

    Other tensors, and which ones these are: ``merges.matrices``. With one vector the result is not that model: its
    spectrum is made flat as well.

    Args:
        zero: The zero point.
        models: In the order of ``block.models``; any float dtype, equal shapes.
        parameters: Weights by role, lambda, scope and rest.
        block: A whole tensor; its kind decides whether it is taken apart.

    Returns:
        Float32, the same shape, a new tensor; entries whose merged delta is 0 keep the bits of the zero point.
        Memory: with T vectors about T + 6 float64 matrices of the tensor's size (of one slice, for stacks).

    Raises:
        ValueError: As ``check_inputs``; a model has no weight; the block starts inside its tensor.

    Source: Marczak et al. 2025, No task left behind: isotropic model merging, ICML, arXiv 2502.04959, Iso-C.
    Deviations: weights; embeddings and heads get the mean by default, where the authors' code takes every matrix.
        Directions whose singular value is below 2^-23 of the largest get nothing: the authors give them the mean
        value in directions that the SVD routine makes up. The mean is over all r values, those included.
    """
    delta = iso_c_delta(zero, models, parameters, block) if parameters.lambda_ else None
    return add_matrix_delta(zero, models, parameters, block, delta)


def iso_c_delta(zero: Tensor | None, models: Sequence[Tensor], parameters: IsoC, block: Block) -> Tensor | None:
    """Return the isotropic sum of the task matrices, float32; None for tensors that are not taken apart."""

    def flat_sum(vectors: list[Tensor]) -> Tensor:
        total = vectors[0]
        for vector in vectors[1:]:
            total = total + vector
        return flattened(total)

    return matrix_delta(zero, models, parameters, block, flat_sum)


def flattened(matrix: Tensor) -> Tensor:
    """Return a float64 matrix with every singular value that is not 0 replaced by the mean of all of them."""
    if matrix.shape[0] < matrix.shape[1]:
        return flattened(matrix.T).T
    values, right = spectrum(matrix)
    kept = int((values > 0).sum())
    if kept == 0:
        return torch.zeros_like(matrix)
    mean = values.sum() / values.numel()
    if values[kept - 1] > SMALLEST_RATIO * values[0]:
        return ((matrix @ right[:, :kept]) * (mean / values[:kept])) @ right[:, :kept].T
    left, values, turned_right = torch.linalg.svd(matrix, full_matrices=False)
    kept = int((values > RESOLUTION * values[0]).sum())
    return (left[:, :kept] * (values.sum() / values.numel())) @ turned_right[:kept]
