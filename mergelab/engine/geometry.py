"""How two task vectors lie to each other, and how much of a merge lies outside the plane they span."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

DOT_ENTRIES = 1 << 18
"""Entries summed in float32 at a time: one float32 sum over an embedding is wrong in the third digit."""


class ExactSum:
    """A sum of floats without rounding, so that neither order nor grouping matters (Shewchuk 1997)."""

    def __init__(self, start: float = 0.0) -> None:
        self._parts = [start]
        """Numbers that do not overlap, whose exact sum it is; a handful."""

    def add(self, term: float) -> None:
        """Add a finite number."""
        parts = []
        for part in self._parts:
            large, small = (term, part) if abs(term) >= abs(part) else (part, term)
            term = large + small
            if rest := small - (term - large):
                parts.append(rest)
        self._parts = [*parts, term]

    def add_sum(self, other: ExactSum) -> None:
        """Add another sum."""
        for part in other._parts:
            self.add(part)

    def value(self) -> float:
        """Return the sum, rounded once."""
        return math.fsum(self._parts)


@dataclass
class Plane:
    """Inner products of two task vectors a and b, and of a merged vector m, added up over blocks."""

    aa: ExactSum = field(default_factory=ExactSum)
    ab: ExactSum = field(default_factory=ExactSum)
    bb: ExactSum = field(default_factory=ExactSum)
    am: ExactSum = field(default_factory=ExactSum)
    bm: ExactSum = field(default_factory=ExactSum)
    mm: ExactSum = field(default_factory=ExactSum)

    def add(self, first: torch.Tensor, second: torch.Tensor, merged: torch.Tensor | None) -> None:
        """Add one block: flat float32 parts of both task vectors and, if its place is asked for, of the merge."""
        self.aa.add(dot(first, first))
        self.ab.add(dot(first, second))
        self.bb.add(dot(second, second))
        if merged is not None:
            self.am.add(dot(first, merged))
            self.bm.add(dot(second, merged))
            self.mm.add(dot(merged, merged))

    def add_plane(self, other: Plane) -> None:
        """Add the products of other blocks."""
        for name, products in vars(self).items():
            products.add_sum(getattr(other, name))

    def cosine(self) -> float | None:
        """Return the cosine of the task vectors; None unless both are there and not 0."""
        norms = math.sqrt(self.aa.value()), math.sqrt(self.bb.value())
        return self.ab.value() / (norms[0] * norms[1]) if all(norms) else None

    def outside_share(self) -> float | None:
        """Return the norm of m outside span{a, b} over the norm of m, in 0..1; None for m = 0 or without m.

            1 - share^2 = |projection of m on the span|^2 / |m|^2,    the projection by Gram-Schmidt: along a, then
            along b - (ab / aa) a.

        Task arithmetic stays in the span: 0 up to about 1e-3, the root of the rounding of the products. Trimming
        and dropping leave it as well; for them the share says how much was cut.
        """
        aa, ab, bb, am, bm, mm = (getattr(self, name).value() for name in ("aa", "ab", "bb", "am", "bm", "mm"))
        if mm == 0:
            return None
        inside = 0.0
        if aa > 0:
            inside += am**2 / aa
        rest = bb - (ab**2 / aa if aa > 0 else 0.0)
        # Parallel vectors span a line; what is left of b is rounding then.
        if rest > 1e-9 * bb:
            inside += (bm - (am * ab / aa if aa > 0 else 0.0)) ** 2 / rest
        return math.sqrt(max(0.0, 1.0 - inside / mm))


def dot(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the inner product of two flat float32 tensors, added up in float64 over slices."""
    if 0 < first.numel() <= DOT_ENTRIES:
        return float(torch.dot(first, second))
    parts = zip(first.split(DOT_ENTRIES), second.split(DOT_ENTRIES), strict=True)
    sums = [torch.dot(one, two) for one, two in parts]
    return float(torch.stack(sums).cpu().double().sum()) if sums else 0.0
