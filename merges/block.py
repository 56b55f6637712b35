"""Which part of which tensor a merge function is given, and what is known of the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Survey:
    """What passes over all tensors of the vectors have found before any of them is merged.

    Attributes:
        num_entries: Entries of each task vector that take part.
        thresholds: By role, the smallest kept magnitude over the whole model, as the 31 bits of a float32.
        asked: By role, how many entries the density asks to keep.
        majority: The sign that more entries elect than not, over the whole model: +1, -1, or 0 for none.
    """

    num_entries: int = 0
    thresholds: Mapping[str, int] = field(default_factory=dict)
    asked: Mapping[str, int] = field(default_factory=dict)
    majority: int = 0


@dataclass(frozen=True)
class Block:
    """Names one tensor, or a slice of it, for a merge function.

    Attributes:
        name: Canonical name of the tensor.
        kind: Module kind: embedding, head, norm, bias, attention, mlp or other.
        models: Roles of the models, in the order in which their tensors are handed over.
        seed: Seed of methods that draw.
        start: Flat index, in the whole tensor, of the first entry handed over.
        survey: For methods that need to know the whole model first (``merges.surveyor``).
    """

    name: str
    kind: str
    models: tuple[str, ...]
    seed: int = 0
    start: int = 0
    survey: Survey | None = None
