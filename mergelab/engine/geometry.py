"""How two task vectors lie to each other, and how much of a merge lies outside the plane they span."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

DOT_ENTRIES = 1 << 18
"""Entries summed in float32 at a time: one float32 sum over an embedding is wrong in the third digit."""


@dataclass
class Plane:
    """Inner products of two task vectors a and b, and of a merged vector m, added up over blocks."""

    aa: float = 0.0
    ab: float = 0.0
    bb: float = 0.0
    am: float = 0.0
    bm: float = 0.0
    mm: float = 0.0

    def add(self, first: torch.Tensor, second: torch.Tensor, merged: torch.Tensor | None) -> None:
        """Add one block: flat float32 parts of both task vectors and, if its place is asked for, of the merge."""
        self.aa += dot(first, first)
        self.ab += dot(first, second)
        self.bb += dot(second, second)
        if merged is not None:
            self.am += dot(first, merged)
            self.bm += dot(second, merged)
            self.mm += dot(merged, merged)

    def cosine(self) -> float | None:
        """Return the cosine of the task vectors; None unless both are there and not 0."""
        norms = math.sqrt(self.aa), math.sqrt(self.bb)
        return self.ab / (norms[0] * norms[1]) if all(norms) else None

    def outside_share(self) -> float | None:
        """Return the norm of m outside span{a, b} over the norm of m, in 0..1; None for m = 0 or without m.

            1 - share^2 = |projection of m on the span|^2 / |m|^2,    the projection by Gram-Schmidt: along a, then
            along b - (ab / aa) a.

        Task arithmetic stays in the span: 0 up to about 1e-3, the root of the rounding of the products. Trimming
        and dropping leave it as well; for them the share says how much was cut.
        """
        if self.mm == 0:
            return None
        inside = 0.0
        if self.aa > 0:
            inside += self.am**2 / self.aa
        rest = self.bb - (self.ab**2 / self.aa if self.aa > 0 else 0.0)
        # Parallel vectors span a line; what is left of b is rounding then.
        if rest > 1e-9 * self.bb:
            inside += (self.bm - (self.am * self.ab / self.aa if self.aa > 0 else 0.0)) ** 2 / rest
        return math.sqrt(max(0.0, 1.0 - inside / self.mm))


def dot(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the inner product of two flat float32 tensors, added up in float64 over slices."""
    parts = zip(first.split(DOT_ENTRIES), second.split(DOT_ENTRIES), strict=True)
    sums = [torch.dot(one, two) for one, two in parts]
    return float(torch.stack(sums).cpu().double().sum()) if sums else 0.0
