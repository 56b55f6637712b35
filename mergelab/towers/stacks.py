"""Stacks of numbered layers among the names of a checkpoint, and how a base's layers lie in them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]

BASE_STACK = "model.layers"
"""Where the layers of every canonical text model are."""


@dataclass(frozen=True, order=True)
class Leaf:
    """One kind of tensor of a layer."""

    name: str
    """Name inside the layer, every number in it as ``*`` (experts)."""
    shape: Shape
    count: int = 1
    """How many tensors of a layer have this name and shape."""

    @property
    def is_norm(self) -> bool:
        """True for a gain, of which a layer has several that look alike."""
        return len(self.shape) == 1 and ("norm" in self.name or "ln" in self.name)


Layer = frozenset[Leaf]


@dataclass(frozen=True)
class Stack:
    """Numbered layers under one prefix."""

    prefix: str
    layers: Mapping[int, Layer]
    """By number, in order."""

    @property
    def in_order(self) -> list[Layer]:
        """The layers without their numbers."""
        return list(self.layers.values())


def find_stacks(tensors: Mapping[str, Shape]) -> dict[str, Stack]:
    """Return every run of numbered layers by its prefix; one tensor may lie in several, one inside the other."""
    found: dict[str, dict[int, Counter[tuple[str, Shape]]]] = defaultdict(lambda: defaultdict(Counter))
    for name, shape in tensors.items():
        parts = name.split(".")
        for place in range(1, len(parts) - 1):
            if parts[place].isdecimal():
                leaf = template(".".join(parts[place + 1 :]))
                found[".".join(parts[:place])][int(parts[place])][leaf, tuple(shape)] += 1
    return {
        prefix: Stack(
            prefix,
            {
                number: frozenset(Leaf(name, shape, count) for (name, shape), count in layers[number].items())
                for number in sorted(layers)
            },
        )
        for prefix, layers in found.items()
    }


def exact_coverage(base: Sequence[Layer], stack: Stack) -> float:
    """Return the share of the base's layer tensors that a stack holds under the same name and shape, in order."""
    layers = aligned(base, stack, lambda mine, theirs: mine <= theirs) or list(stack.layers)
    total = sum(leaf.count for layer in base for leaf in layer)
    pairs = zip(base, (stack.layers[number] for number in layers), strict=False)
    return sum(leaf.count for mine, theirs in pairs for leaf in mine & theirs) / total if total else 0.0


def aligned(base: Sequence[Layer], stack: Stack, holds: Callable[[Layer, Layer], bool]) -> list[int] | None:
    """Return the numbers of the stack's layers that are the base's, in order; None unless the count fits.

    Kept are the layers that hold every tensor of a layer of the base. Inserted layers lack some, so a stack with
    more layers fits if what is kept is as many as the base has and lies in the base's order.

    Args:
        base: The base's layers, in order.
        stack: The other checkpoint's.
        holds: Whether a layer of the stack (second) has all that a layer of the base (first) needs.
    """
    known: dict[tuple[Layer, Layer], bool] = {}

    def fits(mine: Layer, theirs: Layer) -> bool:
        if (mine, theirs) not in known:
            known[mine, theirs] = holds(mine, theirs)
        return known[mine, theirs]

    kinds = set(base)
    kept = [number for number, layer in stack.layers.items() if any(fits(mine, layer) for mine in kinds)]
    if len(kept) != len(base) or not base:
        return None
    return kept if all(fits(mine, stack.layers[number]) for mine, number in zip(base, kept, strict=True)) else None


def template(name: str) -> str:
    """Return a name with ``*`` for every number in it."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))
