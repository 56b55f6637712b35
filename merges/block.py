"""Which part of which tensor a merge function is given."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    """Names one tensor, or a slice of it, for a merge function.

    Attributes:
        name: Canonical name of the tensor.
        kind: Module kind: embedding, head, norm, bias, attention, mlp or other.
        models: Roles of the models, in the order in which their tensors are handed over.
        seed: Seed of methods that draw.
        start: Flat index, in the whole tensor, of the first entry handed over.
    """

    name: str
    kind: str
    models: tuple[str, ...]
    seed: int = 0
    start: int = 0
