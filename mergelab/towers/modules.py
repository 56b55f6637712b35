"""The modules of a layer, and the ways in which one stored module can be one or several of a base's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from typing import Literal

from mergelab.towers.stacks import Leaf, Shape

How = Literal["rename", "rows", "grouped", "stacked", "transposed"]

ATTENTION_PARTS = ("q_proj", "k_proj", "v_proj")

FUSABLE = (ATTENTION_PARTS, ("k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Sibling modules that families fuse along rows, in the usual order."""

KINDS = {"": "weight", "scale": "weight", "gamma": "weight", "beta": "bias"}
"""Other names of a module's tensors; a bare parameter is the weight of a module of its own."""

EXPERT_PARTS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


@dataclass(frozen=True, order=True)
class Module:
    """A weight with its bias, or a bare parameter."""

    name: str
    """As in ``Leaf``, without ``.weight`` or ``.bias``."""
    tensors: tuple[tuple[str, Shape, int], ...]
    """Kind (weight, bias, or empty for a bare parameter), shape and count of each."""

    @property
    def leaves(self) -> frozenset[Leaf]:
        """The module's tensors."""
        return frozenset(
            Leaf(f"{self.name}.{kind}" if kind else self.name, shape, count) for kind, shape, count in self.tensors
        )

    @property
    def num_tensors(self) -> int:
        """How many tensors of a layer it stands for."""
        return sum(count for _, _, count in self.tensors)

    @property
    def is_norm(self) -> bool:
        """True for a norm, whose gains look like any other's."""
        return any(leaf.is_norm for leaf in self.leaves)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kind of each tensor."""
        return tuple(kind for kind, _, _ in self.tensors)

    @property
    def sizes(self) -> tuple[tuple[str, Shape, int], ...]:
        """The tensors under the usual kinds, whatever they are called; what can be compared."""
        return tuple(sorted((KINDS.get(kind, kind), shape, count) for kind, shape, count in self.tensors))


@dataclass(frozen=True)
class Operation:
    """One module of the other checkpoint and the base's modules in it."""

    source: Module
    parts: tuple[Module, ...]
    """In stored order; one for a rename."""
    how: How
    """rename; rows: one after the other; grouped: q, k, v per key-value head; stacked: experts [E, n I, H];
    transposed: experts [E, H, n I]."""
    interleaved: bool = False
    """Of stacked experts: the rows of two parts alternate."""

    @property
    def is_trivial(self) -> bool:
        """True if the name stays."""
        return self.how == "rename" and self.source.name == self.parts[0].name

    @property
    def text(self) -> str:
        """The operation in words."""
        parts = "|".join(part.name for part in self.parts)
        return f"{self.source.name} = {parts}" + (
            "" if self.how in ("rename", "rows") else f" ({self.how}{', interleaved' * self.interleaved})"
        )


Option = tuple[Operation, ...]


@dataclass(frozen=True)
class Need:
    """Modules of the base that one module of the other checkpoint must hold."""

    parts: tuple[Module, ...]
    kind: Literal["one", "rows", "experts"]

    @property
    def num_tensors(self) -> int:
        """How many tensors of the base it places in a layer."""
        return sum(part.num_tensors for part in self.parts)

    def ways(self, source: Module) -> list[Operation]:
        """Return every way in which ``source`` can be these modules; none if shapes forbid it."""
        if self.kind == "one":
            same = source.sizes == self.parts[0].sizes and source.name.count("*") == self.parts[0].name.count("*")
            return [Operation(source, self.parts, "rename")] if same else []
        if self.kind == "experts":
            return expert_ways(self.parts, source)
        if source.sizes != fused(self.parts):
            return []
        ways = [Operation(source, order, "rows") for order in permutations(self.parts)]
        rows = [part.tensors[0][1][0] for part in self.parts]
        if len(rows) == 3 and rows[1] == rows[2] and rows[0] % rows[1] == 0:
            ways.append(Operation(source, self.parts, "grouped"))
        return ways


def modules_of(layer: Iterable[Leaf]) -> list[Module]:
    """Return the modules of a layer, by name."""
    found: dict[str, list[tuple[str, Shape, int]]] = defaultdict(list)
    for leaf in layer:
        head, _, kind = leaf.name.rpartition(".")
        named = (head, kind) if head and kind in ("weight", "bias", "scale", "gamma", "beta") else (leaf.name, "")
        found[named[0]].append((named[1], leaf.shape, leaf.count))
    return [Module(name, tuple(sorted(tensors))) for name, tensors in sorted(found.items())]


def fused(parts: Sequence[Module]) -> tuple[tuple[str, Shape, int], ...] | None:
    """Return what modules are when they are fused along rows, None if they cannot be."""
    if any(len(part.sizes) != len(parts[0].sizes) for part in parts):
        return None
    result = []
    for tensors in zip(*(part.sizes for part in parts), strict=True):
        if len({(kind, shape[1:], count) for kind, shape, count in tensors}) != 1 or () in (s for _, s, _ in tensors):
            return None
        kind, shape, count = tensors[0]
        result.append((kind, (sum(shape[0] for _, shape, _ in tensors), *shape[1:]), count))
    return tuple(result)


def expert_ways(parts: Sequence[Module], source: Module) -> list[Operation]:
    """Return every way in which a bare tensor or weight can be the experts' modules, stacked."""
    if len(source.tensors) != 1 or any(len(part.tensors) != 1 for part in parts):
        return []
    (_, shape, count), (_, one, experts) = source.tensors[0], parts[0].tensors[0]
    if count != 1 or len(one) != 2 or any(part.tensors[0][1:] != (one, experts) for part in parts):
        return []
    rows, width = len(parts) * one[0], one[1]
    found: list[How] = []
    if shape in ((experts, rows, width), (experts * rows, width)):
        found.append("stacked")
    if shape in ((experts, width, rows), (experts * width, rows)):
        found.append("transposed")
    mixed = (False, True) if len(parts) == 2 and len(shape) == 3 else (False,)
    return [Operation(source, order, how, mix) for how in found for mix in mixed for order in permutations(parts)]


def groupings(left: Sequence[Module]) -> Iterator[list[Need]]:
    """Yield every way to group modules that families fuse; the first leaves all of them single."""
    by_name = {module.name: module for module in left}
    modes: list[list[list[Need]]] = []
    grouped: set[Module] = set()
    for parent in dict.fromkeys(module.name.rpartition(".")[0] for module in left):
        inside = {name.rpartition(".")[2]: module for name, module in by_name.items() if parent == parent_of(name)}
        ways = expert_groupings(inside) if parent.endswith("*") else row_groupings(inside)
        for names, needs in ways:
            modes.append([[Need((inside[name],), "one") for name in names], *needs])
            grouped.update(inside[name] for name in names)
    singles = [Need((module,), "one") for module in left if module not in grouped]
    for combination in product(*modes):
        yield [*singles, *(need for needs in combination for need in needs)]


def parent_of(name: str) -> str:
    """Return what a name's last part belongs to."""
    return name.rpartition(".")[0]


def row_groupings(inside: dict[str, Module]) -> list[tuple[tuple[str, ...], list[list[Need]]]]:
    """Return the siblings that may be fused along rows, and how."""
    found: list[tuple[tuple[str, ...], list[list[Need]]]] = []
    for names in FUSABLE:
        if not set(names) <= set(inside) or any(set(names) <= set(other) for other, _ in found):
            continue
        parts = tuple(inside[name] for name in names)
        needs = [[Need(parts, "rows")]]
        if names == ATTENTION_PARTS:
            needs.append([Need(parts[:1], "one"), Need(parts[1:], "rows")])
        found.append((names, needs))
    return found


def expert_groupings(inside: dict[str, Module]) -> list[tuple[tuple[str, ...], list[list[Need]]]]:
    """Return how the modules of numbered experts may be stacked."""
    for names in EXPERT_PARTS:
        if set(names) <= set(inside):
            gate, up, down = (inside[name] for name in names)
            alone = [Need((part,), "experts") for part in (gate, up, down)]
            return [(names, [[Need((gate, up), "experts"), alone[2]], alone])]
    return []


def tail(module: Module) -> str:
    """Return the last part of a module's name."""
    return module.name.rpartition(".")[2]
