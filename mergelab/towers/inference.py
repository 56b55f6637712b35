"""The text tower of a checkpoint of no known family, inferred from names and shapes of its base.

Every stack of numbered layers of the checkpoint is a candidate. It is measured by how many of the base's layer
tensors it holds, first under the base's own names, then also with other names of the same shape, fused projections
and stacked experts (``mergelab.towers.matching``). The best one is the tower, if it is better than all others;
embedding, final norm and head are looked for beside it. What shapes leave open is handed out as choices.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mergelab.errors import PairingError, problem_list
from mergelab.towers.generic import BUFFER
from mergelab.towers.layouts import HEAD, LAYER
from mergelab.towers.leftovers import EMBEDDING_WORDS, group_of, not_vision, place_rest
from mergelab.towers.matching import Match, match_layers
from mergelab.towers.parts import EMBEDDING
from mergelab.towers.stacks import BASE_STACK, Layer, Shape, Stack, exact_coverage, find_stacks, template

MIN_COVERAGE = 0.5
"""A stack that holds less of the base is not its tower."""

MIN_ROWS = 0.75
"""An embedding has at least this share of the base's rows; fewer make it another table of the same width."""

HEAD_WORDS = re.compile(r"head|output|logit|unembed")
WORDS = {EMBEDDING: EMBEDDING_WORDS, HEAD: HEAD_WORDS}
"""What the two tables with a row per token are called."""


@dataclass(frozen=True)
class Outside:
    """A tensor of the base beside its layers: where it may be in the other checkpoint."""

    name: str
    """Canonical."""
    candidates: tuple[str, ...]
    """Stored names, one if there is no doubt, none if it is missing."""


@dataclass(frozen=True)
class Inference:
    """What names and shapes say about the tower of a checkpoint."""

    prefix: str
    """Of its layers, before the number."""
    match: Match
    runner_up: str
    """The next best prefix, empty if no other holds anything."""
    runner_up_coverage: float
    outside: tuple[Outside, ...]
    dropped: tuple[int, ...]
    """Layers of the checkpoint that the base lacks."""
    optional: tuple[str, ...]
    """Canonical names of the base that need no partner and have none."""

    def roles(self, tensors: Mapping[str, Shape], outside: Mapping[str, str]) -> dict[str, str]:
        """Return stored name -> role of every tensor that is no part of the tower; see ``place_rest``."""
        spare = {leaf.name for module in self.match.spare for leaf in module.leaves}
        inner: dict[str, str] = {}
        for name in tensors:
            if name.startswith(f"{self.prefix}."):
                number, _, leaf = name.removeprefix(f"{self.prefix}.").partition(".")
                if (number.isdecimal() and int(number) in self.dropped) or BUFFER.search(name):
                    inner[name] = "extra"
                elif not number.isdecimal() or template(leaf) in spare:
                    inner[name] = "unknown"
        return place_rest(tensors, self.prefix, inner, outside)

    @property
    def missing(self) -> list[str]:
        """What of the base has no place, in the words of names."""
        layers = [f"{BASE_STACK}.*.{leaf.name}" for module in self.match.missing for leaf in sorted(module.leaves)]
        lost = [place.name for place in self.outside if not place.candidates and place.name != HEAD]
        return [*lost, *layers]


def infer_tower(base: Mapping[str, Shape], tensors: Mapping[str, Shape], optional: Collection[str] = ()) -> Inference:
    """Find the tower of a checkpoint by the names and shapes of its base.

    Args:
        base: Canonical name -> shape.
        tensors: Stored name -> shape of the other checkpoint.
        optional: Canonical names of the base that need no partner: layers for multi-token prediction.

    Raises:
        PairingError: No stack of layers holds half of the base's, or two hold it equally well.
    """
    needed = {name: shape for name, shape in base.items() if name not in optional}
    found = find_stacks(needed).get(BASE_STACK)
    if found is None:
        raise PairingError(f"base has no {BASE_STACK}.*; its tower cannot be looked for.")
    layers = found.in_order
    stack, match, runner_up, share = best_stack(layers, find_stacks(tensors))
    dropped = tuple(number for number in stack.layers if match.layers and number not in match.layers)
    if any(number - sum(gone < number for gone in dropped) != place for place, number in enumerate(match.layers)):
        raise PairingError(f"the layers {stack.prefix}.* do not count from 0: {[*stack.layers]}.")
    mine = {name: shape for name, shape in needed.items() if not name.startswith(BASE_STACK + ".")}
    beside = {name: shape for name, shape in tensors.items() if not name.startswith(stack.prefix + ".")}
    outside = place_outside(mine, beside, stack.prefix)
    unneeded = tuple(name for name in base if name in optional)
    return Inference(stack.prefix, match, runner_up, share, outside, dropped, unneeded)


def best_stack(base: Sequence[Layer], stacks: Mapping[str, Stack]) -> tuple[Stack, Match, str, float]:
    """Return the stack that holds most of the base, its match, and the next best prefix with its coverage.

    The runner-up is measured as the winner is: by equal names if those place everything, else with all operations. Of
    stacks that hold as much, one whose name speaks of pictures gives way, and is no rival of one whose name does not.
    """
    shares = {prefix: exact_coverage(base, stack) for prefix, stack in stacks.items()}
    matches: dict[str, Match] = {}
    if max(shares.values(), default=0.0) < 1.0:
        matches = {prefix: match_layers(base, stack) for prefix, stack in stacks.items()}
        shares = {prefix: match.coverage for prefix, match in matches.items()}
    ranked = sorted(shares, key=lambda prefix: (-shares[prefix], not not_vision(prefix), prefix))
    if not ranked or shares[ranked[0]] < MIN_COVERAGE:
        best = f"the best, {ranked[0]}.*, holds {shares[ranked[0]]:.0%}" if ranked else "there are no numbered layers"
        raise PairingError(f"no stack of layers holds half of the base's tensors; {best}.")
    winner = ranked[0]
    rivals = [prefix for prefix in ranked[1:] if not nested(prefix, winner)]
    if not_vision(winner):
        rivals = [prefix for prefix in rivals if not_vision(prefix)]
    equal = [prefix for prefix in rivals if shares[prefix] == shares[winner]]
    if equal:
        heading = f"{len(equal) + 1} towers hold {shares[winner]:.0%} of the base's layers each:"
        advice = "Which one is meant cannot be told; say it with a family file, in the pair's `family:`."
        raise PairingError(problem_list(heading, [f"{prefix}.*" for prefix in (winner, *equal)], advice))
    match = matches[winner] if winner in matches else match_layers(base, stacks[winner])
    runner_up = rivals[0] if rivals and shares[rivals[0]] > 0 else ""
    return stacks[winner], match, runner_up, shares[runner_up] if runner_up else 0.0


def nested(first: str, second: str) -> bool:
    """Say whether one prefix lies in the other."""
    return f"{first}.".startswith(f"{second}.") or f"{second}.".startswith(f"{first}.")


def place_outside(base: Mapping[str, Shape], tensors: Mapping[str, Shape], stack: str) -> tuple[Outside, ...]:
    """Look for what the base has beside its layers: equal last names near the stack first, then equal shapes.

    A head that the base lacks is looked for as well: a small base often ties it and the vlm does not.
    """
    wanted = dict(base)
    if EMBEDDING in base:
        wanted.setdefault(HEAD, base[EMBEDDING])
    stacks = find_stacks(tensors)
    loose = [
        name
        for name in tensors
        if not any(name.startswith(f"{prefix}.") for prefix in stacks) and not BUFFER.search(name)
    ]
    elsewhere = {group_of(f"{prefix}.0", stack) for prefix in stacks}
    at_home = {name for name in loose if group_of(name, stack) not in elsewhere}
    fitting = {name: [o for o in loose if similar(name, wanted[name], tensors[o])] for name in wanted}
    named = {name: [o for o in fitting[name] if f".{o}".endswith(f".{name.removeprefix('model.')}")] for name in wanted}
    claimed = {other for names in named.values() for other in names if other in at_home}
    found: dict[str, tuple[str, ...]] = {}
    for name in wanted:
        free = [other for other in fitting[name] if other not in claimed]
        tiers = [
            nearest([other for other in named[name] if other in at_home], stack),
            [other for other in free if other in at_home and not_vision(other)],
            [] if name == HEAD else nearest(named[name], stack),  # another model's head is none of the tower's
            [other for other in free if name == EMBEDDING and EMBEDDING_WORDS.search(other)],
        ]
        found[name] = tuple(next((tier for tier in tiers if tier), ()))
        if name not in WORDS:
            found[name] = tuple(nearest(found[name], stack))
    taken = {names[0] for names in found.values() if len(names) == 1}
    found = {n: names if len(names) == 1 else tuple(o for o in names if o not in taken) for n, names in found.items()}
    settle_ends(found, HEAD in base)
    return tuple(Outside(name, names) for name, names in found.items() if names or name in base)


def settle_ends(found: dict[str, tuple[str, ...]], has_head: bool) -> None:
    """Tell embedding and head apart, in place: by their words, and a single table is the embedding.

    ``has_head`` says whether base stores a head; if not, only a word makes a table the vlm's head.
    """
    if EMBEDDING not in found:
        return
    for name, words in WORDS.items():
        said = tuple(other for other in found[name] if words.search(other))
        if len(found[name]) > 1 and len(said) == 1:
            found[name] = said
    if len(found[EMBEDDING]) == 1:
        found[HEAD] = tuple(name for name in found[HEAD] if name not in found[EMBEDDING])
    elif len(found[HEAD]) == 1:
        found[EMBEDDING] = tuple(name for name in found[EMBEDDING] if name not in found[HEAD])
    if not has_head:
        found[HEAD] = tuple(name for name in found[HEAD] if HEAD_WORDS.search(name))


def similar(name: str, mine: Shape, theirs: Shape) -> bool:
    """Say whether a tensor can be this one: equal shapes, equal widths for tables with a row per token."""
    if name in (EMBEDDING, HEAD):
        return len(theirs) == 2 and theirs[1:] == mine[1:] and theirs[0] >= MIN_ROWS * mine[0]
    return tuple(theirs) == tuple(mine)


def nearest(names: Iterable[str], prefix: str) -> list[str]:
    """Return the names that share most leading parts with a prefix."""
    scored = {name: group_of(name, prefix).count(".") for name in names}
    most = max(scored.values(), default=0)
    return [name for name, score in scored.items() if score == most]


def prediction_layers(names: Iterable[str], text_config: Mapping[str, Any]) -> set[str]:
    """Return the canonical names in layers for multi-token prediction, which a vlm made from this base may lack."""
    num_layers, num_extra = text_config.get("num_hidden_layers"), text_config.get("num_nextn_predict_layers")
    if not isinstance(num_layers, int) or not num_extra:
        return set()
    return {name for name in names if (found := LAYER.match(name)) and int(found[1]) >= num_layers}


def find_text_config(config: Mapping[str, Any], match: Match, width: int) -> str:
    """Return the dotted path of the section that describes the tower: as many layers, as wide; empty if none does.

    ``width`` is the hidden size.
    """
    wanted = {"num_hidden_layers": len(match.layers), "hidden_size": width}

    def search(section: Mapping[str, Any], path: str) -> str:
        for key, value in section.items():
            if isinstance(value, Mapping):
                place = f"{path}.{key}" if path else key
                if all(value.get(name) == number for name, number in wanted.items()):
                    return place
                if deeper := search(value, place):
                    return deeper
        return ""

    return search(config, "")
