"""How far the weights of a model moved, as arithmetic on matrices. Reading them is the caller's business."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

MAX_ITERATIONS = 300
RELATIVE_TOLERANCE = 1e-6
MAX_LAYERS = 8
"""Layers of a kind whose stable rank is computed; with more, this many spread evenly from first to last."""


def operator_norm(matrix: Tensor, seed: int) -> float:
    """Compute the largest singular value of a matrix by power iteration on M^T M.

    Starts from a seeded Gaussian vector, drawn on the CPU, and stops when a step changes the value by less than
    1e-6 of it, or after 300 steps.

    Args:
        matrix: (m, n), float32 or float64.
        seed: Of the start vector.

    Returns:
        |M v| for a unit vector v: at most the true value up to rounding, and where the two largest singular values
        are close, below it by no more than their difference matters. 0 for a matrix of zeros.

    **Source**: power iteration.

    **Deviations**: none.
    """
    generator = torch.Generator().manual_seed(seed)
    vector = torch.randn(matrix.shape[1], generator=generator).to(matrix)
    vector /= vector.norm()
    value = 0.0
    for _ in range(MAX_ITERATIONS):
        image = matrix @ vector
        found = float(image.norm())
        if found == 0 or abs(found - value) <= RELATIVE_TOLERANCE * found:
            return found
        value = found
        vector = matrix.T @ (image / found)
        vector /= vector.norm()
    return value


def stable_rank(matrix: Tensor, largest: float) -> float | None:
    """Compute |M|_F^2 / largest^2, in [1, rank M] for the true largest singular value; None for zeros.

    **Source**: arXiv 2609.00746, Frobenius form of its bound.

    **Deviations**: none; a largest value from power iteration is a lower bound, so this is an upper one.
    """
    if largest == 0:
        return None
    return float(matrix.double().norm()) ** 2 / largest**2


def spread(layers: Sequence[int], count: int = MAX_LAYERS) -> list[int]:
    """Return all layers, or ``count`` of them spread evenly from first to last."""
    if len(layers) <= count:
        return list(layers)
    return [layers[round(index * (len(layers) - 1) / (count - 1))] for index in range(count)]


@dataclass
class Drift:
    """Sums over the tensors of one module kind; blocks are added in any order."""

    moved: dict[int | None, float] = field(default_factory=dict)
    """Layer (None outside layers) -> sum of squares of after - before."""
    before: dict[int | None, float] = field(default_factory=dict)
    num_tensors: int = 0
    norms: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Layer -> operator norm of the weight before, and of its change."""
    ranks: dict[int, float] = field(default_factory=dict)
    """Layer -> stable rank of the change."""

    def add(self, layer: int | None, before: Tensor, after: Tensor) -> None:
        """Add a block of entries: flat or not, float32 or wider, equal shapes."""
        self.moved[layer] = self.moved.get(layer, 0.0) + float((after - before).double().square().sum())
        self.before[layer] = self.before.get(layer, 0.0) + float(before.double().square().sum())

    def add_matrix(self, layer: int, before: Tensor, after: Tensor, seed: int) -> None:
        """Add operator norms and the stable rank of the change of a whole matrix."""
        change = after - before
        largest = operator_norm(change, seed)
        self.norms[layer] = operator_norm(before, seed), largest
        rank = stable_rank(change, largest)
        if rank is not None:
            self.ranks[layer] = rank

    def record(self) -> dict[str, Any]:
        """Return the numbers of the kind, JSON-able; None where nothing was measured or the weights are zero.

        ``relative_frobenius``: |after - before|_F / |before|_F over all tensors together; ``per_layer`` the same
        by layer. ``operator_norm`` and ``delta_operator_norm``: medians over ``sampled_layers`` of the weight before
        and of the change; ``relative_operator_norm``: median of their ratio. ``stable_rank``: median.
        """
        ratios = [moved / before for before, moved in self.norms.values() if before > 0]
        return {
            "num_tensors": self.num_tensors,
            "relative_frobenius": _ratio(sum(self.moved.values()), sum(self.before.values())),
            "per_layer": {
                str(layer): _ratio(self.moved[layer], self.before[layer])
                for layer in sorted(layer for layer in self.moved if layer is not None)
            },
            "operator_norm": _median([before for before, _ in self.norms.values()]),
            "delta_operator_norm": _median([moved for _, moved in self.norms.values()]),
            "relative_operator_norm": _median(ratios),
            "stable_rank": _median(list(self.ranks.values())),
            "sampled_layers": sorted(self.norms),
        }


def _ratio(moved: float, before: float) -> float | None:
    return math.sqrt(moved / before) if before > 0 else None


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if values else None
