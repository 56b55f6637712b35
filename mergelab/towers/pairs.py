"""What a pairing is made of and made into: plain values, no decisions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mergelab.strides import View
from mergelab.towers.layouts import TensorLike, Tower
from mergelab.towers.parts import Part
from mergelab.towers.vocabulary import RowMap


class CheckpointLike(Protocol):
    """What is asked of a checkpoint here; ``checkpoints.Checkpoint`` fits."""

    @property
    def folder(self) -> Path:
        """Where it lies, for its tokenizer files and for messages."""

    @property
    def tensors(self) -> Mapping[str, TensorLike]:
        """Stored name -> header."""

    @property
    def config(self) -> Mapping[str, Any]:
        """Its ``config.json``."""


@dataclass(frozen=True)
class PairedTensor:
    """One weight that all models have."""

    name: str
    """Canonical name."""
    kind: str
    """See ``module_kind``."""
    shape: tuple[int, ...]
    """The vlm's."""
    dtype: str
    """The vlm's, a code of the safetensors format."""
    stored: Mapping[str, str]
    """Role -> stored name; that of a virtual head is the embedding's."""
    virtual: tuple[str, ...]
    """Roles whose checkpoint ties the head and stores none."""
    rows: RowMap | None
    """Which rows pair; None: all of them, one to one."""
    parts: tuple[Part, ...] = ()
    """The weights inside a tensor that is fused alike in all models and merged as one."""


@dataclass(frozen=True)
class MustEqual:
    """A condition on bytes that names alone cannot settle; whoever reads the tensors has to check it."""

    first: tuple[str, str]
    """Role and stored name."""
    second: tuple[str, str]
    """Role and stored name."""
    reason: str


@dataclass(frozen=True)
class StoredView:
    """One weight inside a fused tensor that was taken apart because a partner stores it by itself."""

    stored: str
    view: View


@dataclass(frozen=True)
class Pairing:
    """What becomes of every tensor."""

    tensors: tuple[PairedTensor, ...]
    """In layer order; embedding first, norm and head last."""
    copied: tuple[str, ...]
    """Stored names of the vlm that are copied as they are: everything outside the tower, buffers."""
    explained: Mapping[str, str]
    """"role: stored name" -> why that tensor of the base or ancestor is not merged."""
    must_equal: tuple[MustEqual, ...]
    layouts: Mapping[str, str]
    """Role -> layout of its tower."""
    towers: Mapping[str, Tower]
    """Role -> tower."""
    vocabulary: Mapping[str, Mapping[str, Any]]
    """Canonical name of an embedding or head -> by, and row counts: shared, vlm_only, base_only, padding."""
    notes: tuple[str, ...]
    """What a person should know: rows, tied heads, config fields that differ."""
    views: Mapping[str, Mapping[str, StoredView]] = field(default_factory=dict)
    """Role -> name of a part (``STORED[q_proj]``) -> where it lies. These names stand in ``PairedTensor.stored``."""
