"""TSV-M again in numpy float64, the textbook form: full SVDs, and the polar factor as A B of X = A s B."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


def polar(matrix: Matrix) -> Matrix:
    a, _, b = np.linalg.svd(matrix, full_matrices=False)
    return a @ b


def tsv_m(vectors: Sequence[Matrix]) -> Matrix:
    """polar(U) S polar(V)^T with the top int(r / T) triplets of every task matrix side by side."""
    rank = min(vectors[0].shape) // len(vectors)
    lefts, values, rights = [], [], []
    for vector in vectors:
        u, s, v = np.linalg.svd(vector, full_matrices=False)
        lefts.append(u[:, :rank])
        values.append(s[:rank])
        rights.append(v[:rank].T)
    return polar(np.hstack(lefts)) @ np.diag(np.concatenate(values)) @ polar(np.hstack(rights)).T
