"""Do these models come from one another? A digest of sampled weights, and what it means for a merge.

For a sampled block of the vlm's tensor v and that of another model b (float64 sums over its entries):

    cosine        = <v, b> / (|v| |b|)         decides whether there is a common origin
    relative norm = |v - b| / |b|              measures how far they drifted; 1.41 for unrelated matrices
    projection    = <v - A, B - A> / |B - A|^2  over all blocks; A ancestor, B base

The projection is 0 for a tower that was tuned from the ancestor, 1 for one tuned from base and between for one
that was merged already (or comes from a model that is not here).

Only matrices of attention and MLP are asked: norm gains look related to anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mergelab.towers.names import module_name
from mergelab.towers.pairs import PairedTensor

Verdict = Literal[
    "child",
    "cousin",
    "frozen tower",
    "already merged",
    "unrelated",
    "wrong ancestor",
    "swapped projection",
    "shifted layers",
    "partly unrelated",
    "undecided",
]

STOPPING: tuple[Verdict, ...] = (
    "unrelated",
    "wrong ancestor",
    "swapped projection",
    "shifted layers",
    "partly unrelated",
)
"""Verdicts that make a merge meaningless, the first of several is the pair's."""

MIN_COSINE = 0.1
"""Below it two matrices share no training; chance gives 1 / sqrt(entries)."""

CHANCE_DEVIATIONS = 4.0
"""A cosine counts only if it is this many standard deviations of chance away from 0; matters for tiny matrices."""

OUTLIER_NORM = 1.0
OUTLIER_FACTOR = 3.0
"""A relative norm above the first, and this many times the median, is another matrix or another order of rows."""

FROZEN_NORM = 1e-6
COUSIN_NORM = 0.3
MERGED_LOW, MERGED_HIGH = 0.2, 0.8
"""Projections between them: merged already, or another ancestor."""

NUM_LAYERS = 8
"""How many layers are sampled, first and last among them."""

NUM_SEARCHED = 3
"""For how many layers a partner in every other layer is looked for."""

Block = npt.NDArray[np.floating[Any]]
Read = Callable[[str, str], Block]
"""(role, canonical name) -> the sampled entries of that tensor; equal shapes give the same entries."""


@dataclass(frozen=True)
class Module:
    """One matrix of a layer."""

    name: str
    projection: str
    """q, k, v, o, gate, up, down, or its name inside the layer."""
    layer: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class TensorRelation:
    """One sampled matrix of the vlm against the same one of another model."""

    name: str
    projection: str
    layer: int
    cosine: float
    relative_norm: float
    equal_share: float
    """Share of entries that are equal, bit for bit; the sharpest cue between two close candidates."""
    related: bool
    partner: str | None = None
    """The other model's tensor that it is related to instead."""


@dataclass(frozen=True)
class Relation:
    """What the vlm's tower is to one other model."""

    role: str
    verdict: Verdict
    reason: str
    tensors: tuple[TensorRelation, ...]

    @property
    def cosine(self) -> float:
        """Median over the matrices."""
        return median(tensor.cosine for tensor in self.tensors)

    @property
    def relative_norm(self) -> float:
        """Median over the matrices."""
        return median(tensor.relative_norm for tensor in self.tensors)


@dataclass(frozen=True)
class Digest:
    """The verdict on a pair, and the numbers behind it."""

    verdict: Verdict
    reason: str
    relations: Mapping[str, Relation] = field(default_factory=dict)
    """Role -> what the tower is to it."""
    projection: float | None = None
    """None without an ancestor, or if base equals it."""
    projections: Mapping[str, float] = field(default_factory=dict)
    """By kind of projection."""

    @property
    def stops(self) -> bool:
        """True if a merge of these models means nothing."""
        return self.verdict in STOPPING

    def record(self) -> dict[str, Any]:
        """Return the digest as JSON can say it."""
        return {
            "verdict": self.verdict,
            "reason": self.reason,
            "projection": self.projection,
            "projections": dict(self.projections),
            "relations": {
                role: {
                    "verdict": relation.verdict,
                    "reason": relation.reason,
                    "cosine": relation.cosine,
                    "relative_norm": relation.relative_norm,
                    "by_layer": medians((t.layer, t.relative_norm) for t in relation.tensors),
                    "by_projection": medians((t.projection, t.relative_norm) for t in relation.tensors),
                    "tensors": [asdict(tensor) for tensor in relation.tensors],
                }
                for role, relation in self.relations.items()
            },
        }


def linear_modules(tensors: Iterable[PairedTensor]) -> list[Module]:
    """Return the matrices of attention and MLP; of several experts the first stands for all."""
    modules: dict[tuple[int, str], Module] = {}
    for paired in tensors:
        projection, layer = module_name(paired.name, paired.kind)
        if paired.kind in ("attention", "mlp") and layer is not None and 0 not in paired.shape:
            modules.setdefault((layer, projection), Module(paired.name, projection, layer, tuple(paired.shape)))
    return list(modules.values())


def sampled_layers(modules: Iterable[Module]) -> list[int]:
    """Return at most ``NUM_LAYERS`` layers spread evenly over the depth, first and last included."""
    layers = sorted({module.layer for module in modules})
    if len(layers) <= NUM_LAYERS:
        return layers
    return [layers[round(step * (len(layers) - 1) / (NUM_LAYERS - 1))] for step in range(NUM_LAYERS)]


def digest_ancestry(modules: Sequence[Module], roles: Sequence[str], read: Read) -> Digest:
    """Judge how the vlm's tower is related to base and, if there is one, to the ancestor.

    Args:
        modules: ``linear_modules`` of the pairing; only some layers are read, all of them where tensors do not
            match and their true place is looked for.
        roles: The other models: base, or ancestor and base.
        read: Hands out sampled entries, the vlm's under the role ``vlm``. Numbers that are not finite count as 0.

    Returns:
        The digest; ``undecided`` if there is no matrix to look at.
    """
    chosen = set(sampled_layers(modules))
    sampled = [module for module in modules if module.layer in chosen]
    if not sampled:
        return Digest("undecided", "the models have no attention or MLP matrices")
    found: dict[str, list[TensorRelation]] = {role: [] for role in roles}
    parts: dict[str, list[float]] = {}
    for module in sampled:
        blocks = {role: entries(read, role, module.name) for role in ("vlm", *roles)}
        for role in roles:
            found[role].append(compare(module, blocks["vlm"], blocks[role]))
        if "ancestor" in blocks and "base" in blocks:
            change = blocks["base"] - blocks["ancestor"]
            sums = parts.setdefault(module.projection, [0.0, 0.0])
            sums[0] += inner(blocks["vlm"] - blocks["ancestor"], change)
            sums[1] += inner(change, change)
    relations = {}
    for role, tensors in found.items():
        relations[role] = judge(role, with_partners(with_outliers(tensors), modules, role, read))
    total = sum(length for _, length in parts.values())
    projection = sum(product for product, _ in parts.values()) / total if total else None
    verdict, reason = overall(relations, projection)
    by_kind = {kind: product / length for kind, (product, length) in parts.items() if length}
    return Digest(verdict, reason, relations, projection, by_kind)


def entries(read: Read, role: str, name: str) -> npt.NDArray[np.float64]:
    """Return a sampled block as a flat float64 vector of finite numbers."""
    return np.nan_to_num(np.asarray(read(role, name), dtype=np.float64).reshape(-1), posinf=0.0, neginf=0.0)


def inner(first: npt.NDArray[np.float64], second: npt.NDArray[np.float64]) -> float:
    """Return the inner product. Not by BLAS: its threads cost more than these sums, and decide their last digits."""
    return float(np.add.reduce(first * second))


def norm(vector: npt.NDArray[np.float64]) -> float:
    """Return the Euclidean norm."""
    return math.sqrt(inner(vector, vector))


def cosine_of(first: npt.NDArray[np.float64], second: npt.NDArray[np.float64]) -> float:
    """Return the cosine; 1 for two zero vectors, 0 if only one is zero."""
    lengths = norm(first) * norm(second)
    if lengths == 0.0:
        return float(not first.any() and not second.any())
    return inner(first, second) / lengths


def enough(cosine: float, num_entries: int) -> bool:
    """Say whether a cosine is more than chance."""
    return cosine >= max(MIN_COSINE, min(0.9, CHANCE_DEVIATIONS / math.sqrt(num_entries)))


def compare(module: Module, vlm: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> TensorRelation:
    """Return the numbers of one matrix."""
    cosine, length = cosine_of(vlm, other), norm(other)
    distance = norm(vlm - other)
    relative = distance / length if length else float(distance > 0)
    equal = float(np.mean(vlm == other))
    related = enough(cosine, vlm.size)
    return TensorRelation(module.name, module.projection, module.layer, cosine, relative, equal, related)


def with_outliers(tensors: Sequence[TensorRelation]) -> list[TensorRelation]:
    """Mark matrices that are far off while their siblings are near: rows in another order keep some cosine."""
    limit = max(OUTLIER_NORM, OUTLIER_FACTOR * median(tensor.relative_norm for tensor in tensors))
    return [marked(tensor, related=tensor.related and tensor.relative_norm <= limit) for tensor in tensors]


def marked(tensor: TensorRelation, **changes: Any) -> TensorRelation:
    """Return a changed copy."""
    return TensorRelation(**{**asdict(tensor), **changes})


def with_partners(
    tensors: Sequence[TensorRelation], modules: Sequence[Module], role: str, read: Read
) -> list[TensorRelation]:
    """Look for the true place of every matrix that is not related: its own layer first, then the other layers."""
    by_name = {module.name: module for module in modules}

    def partner(tensor: TensorRelation, candidates: Iterable[Module]) -> str | None:
        vlm = entries(read, "vlm", tensor.name)
        scores = {
            other.name: cosine_of(vlm, entries(read, role, other.name))
            for other in candidates
            if other.name != tensor.name and other.shape == by_name[tensor.name].shape
        }
        best = max(scores, key=lambda name: scores[name], default=None)
        return best if best is not None and enough(scores[best], vlm.size) else None

    result = []
    for tensor in tensors:
        same_layer = (module for module in modules if module.layer == tensor.layer)
        result.append(tensor if tensor.related else marked(tensor, partner=partner(tensor, same_layer)))
    # A wrong layer number moves whole layers; the smallest matrix of a few of them is enough to tell.
    lost_layers = [
        layer
        for layer in dict.fromkeys(tensor.layer for tensor in result)
        if not any(tensor.related or tensor.partner for tensor in result if tensor.layer == layer)
    ]
    step = max(1, len(lost_layers) // NUM_SEARCHED)
    for layer in lost_layers[::step][:NUM_SEARCHED]:
        places = [place for place, tensor in enumerate(result) if tensor.layer == layer]
        place = min(places, key=lambda place: math.prod(by_name[result[place].name].shape))
        same = (module for module in modules if module.projection == result[place].projection)
        result[place] = marked(result[place], partner=partner(result[place], same))
    return result


def judge(role: str, tensors: Sequence[TensorRelation]) -> Relation:
    """Return the verdict on one model."""
    verdict, reason = verdict_of(role, tensors)
    return Relation(role, verdict, reason, tuple(tensors))


def verdict_of(role: str, tensors: Sequence[TensorRelation]) -> tuple[Verdict, str]:
    """Return verdict and reason for the matrices of one model."""
    lost = [tensor for tensor in tensors if not tensor.related]
    drift = median(tensor.relative_norm for tensor in tensors)
    cosine = median(tensor.cosine for tensor in tensors)
    if not lost:
        if max(tensor.relative_norm for tensor in tensors) <= FROZEN_NORM:
            return "frozen tower", f"the tower equals {role} in every sampled entry; its task vector is zero"
        if drift <= COUSIN_NORM:
            return "child", f"the tower drifted from {role} by {drift:.3f} of its norm (cosine {cosine:.3f})"
        return "cousin", (
            f"the tower is {drift:.2f} of its norm away from {role} (cosine {cosine:.2f}): another branch of one "
            "origin, or heavy continued training; task vectors are unreliable"
        )
    layers = {tensor.name: tensor.layer for tensor in tensors}
    moved = [tensor for tensor in lost if tensor.partner is not None]
    same_layer = [tensor for tensor in moved if str(tensor.partner).startswith(f"model.layers.{tensor.layer}.")]
    if same_layer:
        first = same_layer[0]
        return "swapped projection", (
            f"{len(same_layer)} of {len(tensors)} sampled matrices are another one of {role}'s same layer, the first: "
            f"the vlm's {first.name} is {role}'s {first.partner}"
        )
    if moved:
        return "shifted layers", (
            f"layers {listed(t.layer for t in lost)} do not match {role}'s; the vlm's {moved[0].name} is "
            f"{role}'s {moved[0].partner}"
        )
    if len(lost) == len(tensors) or cosine < MIN_COSINE:
        return "wrong ancestor" if role == "ancestor" else "unrelated", (
            f"the tower's weights have nothing in common with {role}'s (median cosine {cosine:.2f} over "
            f"{len(tensors)} matrices, expected near 1)"
        )
    whole = [
        kind
        for kind in dict.fromkeys(tensor.projection for tensor in lost)
        if all(not tensor.related for tensor in tensors if tensor.projection == kind)
    ]
    if whole and len({layers[tensor.name] for tensor in lost}) == len(set(layers.values())):
        return "swapped projection", (
            f"{', '.join(whole)} of every sampled layer does not match {role}'s while the rest does: rows in another "
            "order or grouping"
        )
    return "partly unrelated", (
        f"{len(lost)} of {len(tensors)} sampled matrices have nothing in common with {role}'s, "
        f"the first is {lost[0].name}"
    )


def overall(relations: Mapping[str, Relation], projection: float | None) -> tuple[Verdict, str]:
    """Return the verdict on the pair."""
    by_verdict = {relation.verdict: relation.reason for relation in reversed([*relations.values()])}
    for verdict in (*STOPPING, "frozen tower"):
        if verdict in by_verdict:
            return verdict, by_verdict[verdict]
    if projection is not None:
        measured = f"projection {projection:.2f} on the way from ancestor to base"
        if MERGED_LOW < projection < MERGED_HIGH:
            return "already merged", f"{measured}: the tower was merged with base already, or has another ancestor"
        parent = "base" if projection >= MERGED_HIGH else "ancestor"
        relation = relations[parent]
        hint = "; a task vector from the ancestor holds base's own change too" if parent == "base" else ""
        return relation.verdict, f"{relation.reason}; {measured}: it was tuned from {parent}{hint}"
    relation = relations["base"]
    return relation.verdict, relation.reason


def medians(values: Iterable[tuple[Any, float]]) -> dict[str, float]:
    """Return the median by key, in order of appearance."""
    grouped: dict[str, list[float]] = {}
    for key, value in values:
        grouped.setdefault(str(key), []).append(value)
    return {key: median(group) for key, group in grouped.items()}


def listed(layers: Iterable[int]) -> str:
    """Return layer numbers, each once."""
    return ", ".join(str(layer) for layer in sorted(set(layers)))
