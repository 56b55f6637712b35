"""Small inputs for the merge tests, and bitwise equality."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import settings
from torch import Tensor

from merges.block import Block
from merges.methods import METHODS
from merges.parameters import build

TWO = ("base", "vlm")
ONE = ("vlm",)

REPEATABLE = settings(max_examples=100, deadline=None, derandomize=True)
"""The same examples in every run, and no clock: the first call into torch is slow on a busy machine."""


def block(models: Sequence[str] = TWO, kind: str = "mlp", name: str = "w", seed: int = 0, start: int = 0) -> Block:
    return Block(name=name, kind=kind, models=tuple(models), seed=seed, start=start)


def merge(
    method: str,
    zero: Tensor,
    models: Sequence[Tensor],
    conventions: str = "paper",
    *,
    kind: str = "mlp",
    name: str = "w",
    seed: int = 0,
    start: int = 0,
    **values: object,
) -> Tensor:
    """Merge by the names of a recipe, with lambda_ for lambda and weights in the order of the models."""
    roles = ONE if len(models) == 1 else TWO if len(models) == 2 else tuple(f"m{i}" for i in range(len(models)))
    if "lambda_" in values:
        values["lambda"] = values.pop("lambda_")
    if isinstance(weights := values.get("weights"), list):
        values["weights"] = dict(zip(roles, weights, strict=True))
    parameters = build(method, values, roles, conventions)
    return METHODS[method](zero, models, parameters, block(roles, kind, name, seed, start))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Equal entry by entry as bits, so that 0.0 and -0.0 differ."""
    assert one.dtype == other.dtype == torch.float32
    assert one.shape == other.shape
    return torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))


def normal(shape: Sequence[int], seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)) * scale
