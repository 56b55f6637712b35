"""Singular values and vectors of task matrices, through the smaller Gram matrix wherever that is exact enough."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST_RATIO = 1e-5
"""Down to this share of the largest, singular values come from the Gram matrix: its float64 error grows with
the square of the ratio and stays near 1e-6, the resolution of float32."""

RESOLUTION = 2.0**-23
"""Singular values below this share of the largest are rounding of the float32 entries they were read from."""


MIN_STRIP = 64
"""Narrower strips of a Gram matrix save less than their calls cost."""


@dataclass(frozen=True)
class Triplets:
    """Leading singular triplets of a matrix: left (m, k), values (k,), right (n, k); orthonormal columns."""

    left: Tensor
    values: Tensor
    right: Tensor


def leading_triplets(matrix: Tensor, rank: int) -> Triplets:
    """Return the ``rank`` leading singular triplets of a float64 matrix, fewer if singular values are 0.

    They come from the eigenvectors of the smaller Gram matrix, twice as fast as an SVD, unless a needed
    singular value is too small beside the largest for that. Zero means below ``RESOLUTION`` of the
    largest.
    """
    rows, columns = matrix.shape
    if rows < columns:
        turned = leading_triplets(matrix.T, rank)
        return Triplets(turned.right, turned.values, turned.left)
    squares, vectors = torch.linalg.eigh(lower_gram(matrix))
    values = squares[-rank:].flip(0).clamp(min=0).sqrt()
    if values[-1] > SMALLEST_RATIO * values[0]:
        right = vectors[:, -rank:].flip(1)
        return Triplets(matrix @ right / values, values, right)
    left, values, turned_right = torch.linalg.svd(matrix, full_matrices=False)
    enough = int((values[:rank] > RESOLUTION * values[0]).sum())
    return Triplets(left[:, :enough], values[:enough], turned_right[:enough].T)


def spectrum(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return all singular values, largest first, and the right singular vectors, for rows >= columns.

    Both come from the Gram matrix. Values below ``RESOLUTION`` of the largest are returned as 0; those below
    ``SMALLEST_RATIO`` are good to 1e-8 of the largest and not to their own size.

    Args:
        matrix: Float64, shape (m, n) with m >= n.

    Returns:
        Values of shape (n,) and vectors of shape (n, n), one a column.
    """
    squares, vectors = torch.linalg.eigh(lower_gram(matrix))
    values = squares.flip(0).clamp(min=0).sqrt()
    return values.masked_fill(values <= RESOLUTION * values[0], 0.0), vectors.flip(1)


def lower_gram(matrix: Tensor) -> Tensor:
    """Return matrix^T matrix of shape (n, n), of which only the lower triangle is whole.

    ``torch.linalg.eigh`` reads no more than that, and blocks above the diagonal, 3 of 8 of the work, are left 0.
    """
    size = matrix.shape[1]
    step = max(MIN_STRIP, -(-size // 4))
    gram = matrix.new_zeros(size, size)
    for first in range(0, size, step):
        strip = slice(first, min(first + step, size))
        torch.mm(matrix[:, strip].T, matrix[:, : strip.stop], out=gram[strip, : strip.stop])
    return gram
