"""What names and shapes leave open about an inferred tower, settled by sampled numbers.

For every way in which some modules can be placed, their sampled rows are compared with base's:

    relative norm = |v - b| / |b|       near 0 for the true way, about 1.41 for unrelated matrices

The best way counts if it is clearly better than the next. A gain that was renamed is compared with the same gain of
other layers: unrelated gains are near each other as well, but not nearer in their own layer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import numpy as np
import numpy.typing as npt

from mergelab.checkpoints.headers import Checkpoint
from mergelab.checkpoints.reader import read_entries
from mergelab.checkpoints.safetensors_format import TensorHeader
from mergelab.engine.ancestry import sampled_rows
from mergelab.errors import PairingError
from mergelab.towers.ancestry import OUTLIER_NORM, norm
from mergelab.towers.inference import HEAD_WORDS, Inference
from mergelab.towers.inferred_rule import Setting, family_of
from mergelab.towers.kinds import module_kind
from mergelab.towers.layouts import HEAD, Tower, locate_tower
from mergelab.towers.matching import Choice
from mergelab.towers.modules import Module, Operation, Option
from mergelab.towers.parts import EMBEDDING
from mergelab.towers.stacks import BASE_STACK

Block = npt.NDArray[np.float64]

CLEARLY = 0.5
"""The best way must be at most this share of the next best one's relative norm."""

NUM_LAYERS = 4
"""How many layers are looked at, first and last among them."""

TABLE_ROWS = 64
MAX_OTHERS = 32
"""Of base's other gains: how many a gain without a word must be further from than from the one that it seems to be."""

UNLIKE = 2.0
"""Relative norm that stands for: cannot be compared."""


@dataclass(frozen=True)
class Models:
    """A base, whose canonical names are known, and a vlm whose names are not."""

    base: Mapping[str, TensorHeader]
    """Canonical name -> header."""
    vlm: Checkpoint


def settle_outside(inference: Inference, models: Models) -> tuple[dict[str, str], list[str]]:
    """Choose what lies beside the layers, by the first rows; what is taken for the embedding is not the head as well.

    Returns:
        Canonical name -> stored name, and what the numbers do not tell.
    """
    picks: dict[str, str] = {}
    undecided: list[str] = []
    for place in sorted(inference.outside, key=lambda place: place.name != EMBEDDING):
        names = [name for name in place.candidates if name not in picks.values()]
        if not names:
            continue
        scores = {name: table_distance(models, place.name, name) for name in names}
        ranked = sorted(names, key=lambda name: scores[name])
        picks[place.name] = ranked[0]
        if len(ranked) > 1 and not clear(scores[ranked[0]], scores[ranked[1]]):
            picks[place.name] = names[0]
            undecided.append(f"{place.name}: {', '.join(names)} are equally near to base's")
        elif place.name == HEAD and not HEAD_WORDS.search(ranked[0]) and scores[ranked[0]] >= OUTLIER_NORM:
            del picks[HEAD]  # some other table; the head is tied
        elif not likely(models, place.name, picks[place.name], scores[picks[place.name]]):
            undecided.append(f"{place.name}: {picks[place.name]} has its shape, and no likeness to base's")
    return picks, undecided


def likely(models: Models, canonical: str, stored: str, score: float) -> bool:
    """Say whether a tensor beside the layers is base's: a table by its numbers, a gain by its word or its numbers.

    A head that base lacks was trained from none of its tensors; its word has to do.
    """
    if canonical not in models.base:
        return True
    if len(models.base[canonical].shape) > 1:
        return score < OUTLIER_NORM
    named = f".{stored}".endswith(f".{canonical.removeprefix('model.')}")
    if named or ("norm" in canonical and re.search(r"norm|ln", stored)):
        return True
    shape = models.base[canonical].shape
    others = [name for name, header in models.base.items() if header.shape == shape and name != canonical]
    return bool(others) and clear(score, min(table_distance(models, name, stored) for name in others[:MAX_OTHERS]))


def table_distance(models: Models, canonical: str, stored: str) -> float:
    """Return the relative norm over the first rows; a head that base lacks is compared with its embedding."""
    mine = models.base.get(canonical) or models.base[EMBEDDING]
    theirs = models.vlm.tensors[stored]
    if not mine.shape or not theirs.shape:
        return UNLIKE
    count = min(TABLE_ROWS, mine.shape[0], theirs.shape[0]) * math.prod(mine.shape[1:])
    return distance(entries(theirs, 0, count), entries(mine, 0, count))


@dataclass(frozen=True)
class Judge:
    """Chooses among the ways to read the layers of a vlm, by comparing it with its base."""

    models: Models
    inference: Inference
    outside: Mapping[str, str]
    """Canonical name -> stored name beside the layers."""
    setting: Setting

    @property
    def layers(self) -> list[int]:
        """The base's layers that are looked at."""
        last = len(self.inference.match.layers) - 1
        return sorted({round(step * last / (NUM_LAYERS - 1)) for step in range(NUM_LAYERS)})

    def settle(self) -> tuple[Option, list[str]]:
        """Return the operations with every choice made, and what the numbers do not tell: there it is the usual way."""
        undecided: list[str] = []
        picked: Option = self.inference.match.settled
        choices = self.inference.match.choices
        for place, choice in enumerate(choices):
            rest = tuple(operation for later in choices[place + 1 :] for operation in later.options[0])
            picked += self.choose(choice, picked + rest, undecided)
        tower = self.read(picked)
        if tower is None:
            return picked, [*undecided, "the sampled layers cannot be read as inferred"]
        return picked, undecided + self.unproven(picked, tower)

    def choose(self, choice: Choice, others: Option, undecided: list[str]) -> Option:
        """Return the option that the numbers speak for, the first if they are silent."""
        scores: dict[int, float] = {}
        for number, option in enumerate(choice.options):
            tower = self.read(others + option)
            if tower is not None:
                scores[number] = fmean(
                    self.module_distance(tower, part) for operation in option for part in operation.parts
                )
        ranked = sorted(scores, key=lambda number: scores[number])
        if ranked and (len(ranked) == 1 or clear(scores[ranked[0]], scores[ranked[1]])):
            return choice.options[ranked[0]]
        best = ", ".join(f"{scores[number]:.2f}" for number in ranked[:2])
        undecided.append(
            f"{choice.text}: {len(choice.options)} ways fit by shape and the numbers do not tell which "
            f"(relative norm {best or 'unknown'}); the usual one is {wording(choice.options[0])}"
        )
        return choice.options[0]

    def read(self, operations: Option) -> LocatedTower | None:
        """Return the sampled layers of the vlm, read in one way; None if they cannot be."""
        family = family_of(self.inference, operations, self.outside, self.setting)
        numbers = {self.inference.match.layers[layer] for layer in self.layers} | {*self.inference.dropped}
        starts = tuple(f"{self.inference.prefix}.{number}." for number in numbers)
        beside = {*self.outside.values()}
        vlm = self.models.vlm
        kept = {name: header for name, header in vlm.tensors.items() if name.startswith(starts) or name in beside}
        try:
            tower = locate_tower(kept, {**vlm.config, "tie_word_embeddings": True}, self.models.base, family)
        except PairingError:
            return None
        return LocatedTower(vlm, tower)

    def module_distance(self, tower: LocatedTower, module: Module) -> float:
        """Return the median relative norm of a module over the sampled layers that have it."""
        found = [self.layer_distance(tower, module, layer, layer) for layer in self.layers]
        return median([value for value in found if value is not None] or [UNLIKE])

    def layer_distance(self, tower: LocatedTower, module: Module, layer: int, other: int) -> float | None:
        """Return the relative norm of the vlm's module in ``layer`` against base's in ``other``."""
        leaf = max(module.leaves, key=lambda leaf: (len(leaf.shape), leaf.name.endswith("weight")))
        mine = self.models.base.get(f"{BASE_STACK}.{other}.{leaf.name.replace('*', '0')}")
        theirs = tower.header(f"{BASE_STACK}.{layer}.{leaf.name.replace('*', '0')}")
        if mine is None:
            return None
        if theirs is None or theirs.shape != mine.shape:
            return UNLIKE
        return distance(flat(sampled_rows(theirs)), flat(sampled_rows(mine)))

    def unproven(self, operations: Iterable[Operation], tower: LocatedTower) -> list[str]:
        """Return what was renamed and is no matrix of attention or MLP, which the ancestry digest looks at."""
        problems = []
        for operation in operations:
            for part in operation.parts:
                leaf = min(part.leaves)
                if operation.source.name == part.name or judged(leaf.name, leaf.shape):
                    continue
                own = [self.layer_distance(tower, part, layer, layer) for layer in self.layers]
                crossed = [self.layer_distance(tower, part, a, b) for a in self.layers for b in self.layers if a != b]
                mine, theirs = ([value for value in found if value is not None] for found in (own, crossed))
                if not mine or not theirs or not clear(fmean(mine), fmean(theirs)):
                    problems.append(f"{operation.source.name}: that it is {part.name} is told by its shape alone")
        return problems


@dataclass(frozen=True)
class LocatedTower:
    """A tower whose fused tensors can be read by their parts."""

    checkpoint: Checkpoint
    tower: Tower

    def header(self, canonical: str) -> TensorHeader | None:
        """Return the header of a tensor or part, None if the tower has none of this name."""
        if canonical in self.tower.stored:
            return self.checkpoint.tensors[self.tower.stored[canonical]]
        for fused, parts in self.tower.parts.items():
            for part in parts:
                if part.name == canonical:
                    label = f"{self.tower.stored[fused]}[{part.label}]"
                    return self.checkpoint.with_parts({label: (self.tower.stored[fused], part.view)}).parts[label]
        return None


def judged(name: str, shape: tuple[int, ...]) -> bool:
    """Say whether the ancestry digest looks at such a tensor."""
    return module_kind(f"{BASE_STACK}.0.{name}", shape) in ("attention", "mlp")


def clear(best: float, second: float) -> bool:
    """Say whether one relative norm is clearly the smaller."""
    return best <= CLEARLY * second and best < second


def wording(option: Option) -> str:
    """Return an option in words."""
    return "; ".join(operation.text for operation in option)


def flat(block: npt.NDArray[np.floating[Any]]) -> Block:
    """Return numbers as one finite float64 vector."""
    return np.nan_to_num(np.asarray(block, dtype=np.float64).reshape(-1), posinf=0.0, neginf=0.0)


def entries(header: TensorHeader, start: int, stop: int) -> Block:
    """Return entries of a tensor as one finite float64 vector."""
    return flat(read_entries(header, start, stop).float().numpy())


def distance(theirs: Block, mine: Block) -> float:
    """Return |theirs - mine| / |mine|; ``UNLIKE`` against zeros."""
    length = norm(mine)
    apart = norm(theirs - mine)
    return apart / length if length else (UNLIKE if apart else 0.0)
