"""Which part of which tensor a merge function is given, and what is known of the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Survey:
    """What passes over all tensors of the vectors, or over all parts of one, have found before anything is merged.

    Attributes:
        num_entries: Entries of each task vector that take part.
        thresholds: By role, the smallest kept magnitude over the whole model (or tensor), as the 31 bits of a float32.
        last: By role, the flat index of the last entry that is kept among those at the threshold; without a role all
            of them are.
        asked: By role, how many entries the density asks to keep.
        majority: The sign that more entries elect than not, over the whole model: +1, -1, or 0 for none.
    """

    num_entries: int = 0
    thresholds: Mapping[str, int] = field(default_factory=dict)
    last: Mapping[str, int] = field(default_factory=dict)
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
        survey: For methods that need to know the whole model, or the whole tensor, first (``merges.surveyor``).
        kept: By role, the masks of ``merges.kept``, for a caller that has them at hand; without them the methods
            make the same ones.
    """

    name: str
    kind: str
    models: tuple[str, ...]
    seed: int = 0
    start: int = 0
    survey: Survey | None = None
    kept: Mapping[str, Tensor] | None = field(default=None, compare=False)
