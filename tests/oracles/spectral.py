"""STAR and Iso-C again in numpy float64, with full SVDs, straight from the papers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


def star(vectors: Sequence[Matrix], eta: float) -> Matrix:
    """Mean of the task matrices, each cut to the rank that holds eta percent of its nuclear norm, and rescaled."""
    cut = []
    for vector in vectors:
        u, s, v = np.linalg.svd(vector, full_matrices=False)
        rank = next(r for r in range(1, len(s) + 1) if s[:r].sum() >= eta / 100 * s.sum() - 1e-12)
        cut.append((u[:, :rank] * s[:rank]) @ v[:rank] * (s.sum() / s[:rank].sum()))
    return np.mean(cut, axis=0)


def iso_c(vectors: Sequence[Matrix]) -> Matrix:
    """The sum of the task matrices with every singular value replaced by their mean."""
    u, s, v = np.linalg.svd(np.sum(vectors, axis=0), full_matrices=False)
    return s.mean() * u @ v
