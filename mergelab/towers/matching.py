"""Which modules of a layer are which: equal names, other names of equal shape, fused projections, stacked experts.

A base's layer is matched module by module (a weight with its bias) against a layer of another checkpoint. Names
that are equal with equal shapes stand; what is left on both sides is matched by shape alone:

- one to one, where a shape is left once on both sides;
- several that were fused along rows: q|k|v, k|v, gate|up, by the sum of their rows;
- experts, stacked into one tensor per layer, in both orientations.

Where shapes leave several ways (k|v or v|k, q|k|v in a row or per key-value head, two norms of one width), all of
them are handed out as the options of a ``Choice``; which one is true can only be read off the numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from mergelab.towers.modules import Module, Need, Operation, Option, groupings, modules_of, tail
from mergelab.towers.stacks import Layer, Leaf, Stack, aligned

MAX_OPTIONS = 120
"""More ways than this to match some modules is no match."""


@dataclass(frozen=True)
class Choice:
    """Modules that shapes can place in several ways; the numbers have to say which."""

    options: tuple[Option, ...]

    @property
    def text(self) -> str:
        """The modules in question."""
        return ", ".join(operation.source.name for operation in self.options[0])


@dataclass(frozen=True)
class Match:
    """How the layers of a base lie in those of another checkpoint."""

    layers: tuple[int, ...]
    """Number of the other's layer for each of the base's; empty if they do not line up."""
    settled: Option
    """Operations that shapes leave no doubt about."""
    choices: tuple[Choice, ...]
    missing: tuple[Module, ...]
    """Modules of the base without a place."""
    spare: tuple[Module, ...]
    """Modules of the other's kept layers that the base lacks."""
    covered: int
    """How many tensors of the base's layers have a place."""
    total: int

    @property
    def coverage(self) -> float:
        """Share of the base's layer tensors."""
        return self.covered / self.total if self.total else 0.0

    @property
    def is_exact(self) -> bool:
        """True if names did it alone."""
        return not self.settled and not self.choices


def match_layers(base: Sequence[Layer], stack: Stack) -> Match:
    """Match the layers of a base with those of a stack.

    Args:
        base: The base's layers, in order.
        stack: The other checkpoint's; more layers than the base's are allowed, see ``aligned``.
    """
    mine, theirs = counted(base), counted(stack.in_order)
    exact = exact_modules(mine, theirs)
    left = sorted(module for module in mine if module not in exact)
    taken = {leaf for module in exact for leaf in module.leaves}
    free = sorted(module for module in theirs if not (module.leaves & taken))
    usable = {module: number for module, number in theirs.items() if module in free}
    settled: list[Operation] = []
    choices: list[Choice] = []
    if left:
        needs = best_needs(left, usable, mine)
        candidates = {need: [m for m in usable if enough(need, m, mine, usable)] for need in needs}
        for cluster in clusters(candidates):
            options = [*limited(assignments(cluster, candidates))]
            options = [option for option in options if lines_up(base, stack, (*settled, *option))] or options
            if len(options) == 1:
                settled.extend(options[0])
            elif 1 < len(options) <= MAX_OPTIONS:
                choices.append(Choice(tuple(options)))
    operations = (*settled, *(operation for choice in choices for operation in choice.options[0]))
    layers = aligned(base, stack, lambda a, b: not lacking(a, b, operations))
    kept = layers if layers is not None else list(stack.layers) if len(stack.layers) == len(base) else []
    lacks: Counter[Module] = Counter()
    covered, total = 0, sum(leaf.count for layer in base for leaf in layer)
    for layer, number in zip(base, kept or stack.layers, strict=False):
        lack = lacking(layer, stack.layers[number], operations)
        covered += sum(leaf.count for leaf in layer) - sum(leaf.count for leaf in lack)
        lacks.update(modules_of(lack))
    used = {leaf for operation in operations for leaf in operation.source.leaves}
    used |= {leaf for module in mine for leaf in module.leaves} - {
        leaf for operation in operations for part in operation.parts for leaf in part.leaves
    }
    spare = sorted({m for number in kept for m in modules_of(stack.layers[number] - used)})
    return Match(tuple(kept), tuple(settled), tuple(choices), tuple(sorted(lacks)), tuple(spare), covered, total)


def counted(layers: Iterable[Layer]) -> Counter[Module]:
    """Return in how many layers each module is."""
    kinds = Counter(layers)
    found: Counter[Module] = Counter()
    for layer, number in kinds.items():
        for module in modules_of(layer):
            found[module] += number
    return found


def exact_modules(mine: Counter[Module], theirs: Counter[Module]) -> set[Module]:
    """Return the base's modules that the other has under the same name with the same shapes.

    A norm's name is proof only if all norms of its shape are there: a family that puts its norms elsewhere may use
    the same names for others.
    """
    have = {leaf for module in theirs for leaf in module.leaves}
    exact = {module for module in mine if module.leaves <= have}
    doubtful = {module.sizes for module in mine if module not in exact and module.is_norm}
    return {module for module in exact if not (module.is_norm and module.sizes in doubtful)}


def lacking(mine: Layer, theirs: Layer, operations: Sequence[Operation]) -> Layer:
    """Return what of a base's layer the other layer does not hold, given the operations."""
    placed: set[Leaf] = set()
    moved: set[Leaf] = set()
    for operation in operations:
        leaves = {leaf for part in operation.parts for leaf in part.leaves}
        moved |= leaves
        if operation.source.leaves <= theirs:
            placed |= leaves
    return frozenset(leaf for leaf in mine if leaf not in placed and (leaf in moved or leaf not in theirs))


def lines_up(base: Sequence[Layer], stack: Stack, operations: Sequence[Operation]) -> bool:
    """Say whether operations find their modules in as many layers as the base has them in."""
    parts = {leaf for operation in operations for part in operation.parts for leaf in part.leaves}
    only = [frozenset(layer & parts) for layer in base]
    return aligned(only, stack, lambda a, b: not lacking(a, b, operations)) is not None


def best_needs(
    left: Sequence[Module], usable: Counter[Module] | dict[Module, int], mine: Counter[Module]
) -> list[Need]:
    """Return how the base's modules are grouped so that most find a place and least of the other is left over."""
    best: tuple[tuple[int, int], list[Need]] | None = None
    for needs in groupings(left):
        found = saturated({need: [m for m in usable if enough(need, m, mine, usable)] for need in needs})
        score = -sum(need.num_tensors for need in found), len(usable) - len(found)
        if best is None or score < best[0]:
            best = score, needs
    assert best is not None
    return best[1]


def enough(need: Need, source: Module, mine: Counter[Module], usable: Counter[Module] | dict[Module, int]) -> bool:
    """Say whether a module can be what is needed, and is in as many layers."""
    return usable[source] >= max(mine[part] for part in need.parts) and bool(need.ways(source))


def saturated(candidates: dict[Need, list[Module]]) -> dict[Need, Module]:
    """Return a largest assignment of needs to different modules (augmenting paths)."""
    owner: dict[Module, Need] = {}

    def place(need: Need, seen: set[Module]) -> bool:
        for module in candidates[need]:
            if module in seen:
                continue
            seen.add(module)
            if module not in owner or place(owner[module], seen):
                owner[module] = need
                return True
        return False

    for need in candidates:
        place(need, set())
    return {need: module for module, need in owner.items()}


@dataclass
class Cluster:
    """Needs that compete for modules."""

    needs: list[Need] = field(default_factory=list)
    modules: set[Module] = field(default_factory=set)


def clusters(candidates: dict[Need, list[Module]]) -> list[Cluster]:
    """Return the needs grouped by shared candidates; those that can all be placed only.

    A module whose last name equals that of one need, and of no other, is that one, unless it is a norm.
    """
    fixed: dict[Need, Module] = {}
    for need, modules in candidates.items():
        same = [m for m in modules if need.kind == "one" and tail(m) == tail(need.parts[0])]
        if len(same) == 1 and not need.parts[0].is_norm:
            rivals = [n for n in candidates if n is not need and n.kind == "one" and tail(n.parts[0]) == tail(same[0])]
            if not any(same[0] in candidates[rival] for rival in rivals):
                fixed[need] = same[0]
    taken = set(fixed.values())
    left = {
        need: [fixed[need]] if need in fixed else [m for m in modules if m not in taken]
        for need, modules in candidates.items()
    }
    placeable = saturated(left)
    found: list[Cluster] = []
    for need in left:
        if need not in placeable:
            continue
        mine = Cluster([need], set(left[need]))
        for other in [cluster for cluster in found if cluster.modules & mine.modules]:
            mine = Cluster([*other.needs, *mine.needs], other.modules | mine.modules)
            found.remove(other)
        found.append(mine)
    for need in left:
        candidates[need] = left[need]
    return found


def assignments(cluster: Cluster, candidates: dict[Need, list[Module]]) -> Iterator[Option]:
    """Yield every way to place the needs of a cluster in different modules."""

    def place(needs: Sequence[Need], taken: frozenset[Module]) -> Iterator[Option]:
        if not needs:
            yield ()
            return
        for module in candidates[needs[0]]:
            if module not in taken:
                for rest in place(needs[1:], taken | {module}):
                    for way in needs[0].ways(module):
                        yield (way, *rest)

    return place(cluster.needs, frozenset())


def limited(options: Iterator[Option]) -> Iterator[Option]:
    """Yield at most one option more than ``MAX_OPTIONS``."""
    for number, option in enumerate(options):
        if number > MAX_OPTIONS:
            return
        yield option
