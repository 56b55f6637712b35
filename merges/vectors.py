"""What the methods share around their formulas: checked float32 inputs, weights, and the way back to a model.

Task vectors are formed by the methods themselves (model - zero); here is the exact arithmetic at both ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from merges.block import Block
from merges.masks import chosen, has_negative_zero, is_finite, masked

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Types that hold plain numbers: integers are counters or packed weights, float8 has scales elsewhere."""


def check_models(models: Sequence[Tensor], block: Block) -> list[Tensor]:
    """Return the models in float32, sharing memory where they already were.

    Raises:
        ValueError: Their number is not that of ``block.models``, shapes or devices differ, a dtype is not a
            plain float, or an entry is NaN or infinite (also when it leaves the range of float32).
    """
    if not models or len(models) != len(block.models):
        raise ValueError(f"expected a tensor for each of {block.models}, found {len(models)}")
    if block.start < 0:
        raise ValueError(f"start: expected a flat index of at least 0, found {block.start}")
    return [_check(model, role, models[0]) for model, role in zip(models, block.models, strict=True)]


def check_inputs(zero: Tensor | None, models: Sequence[Tensor], block: Block) -> tuple[Tensor, list[Tensor]]:
    """Return the zero point and the models in float32, sharing memory where they already were.

    Raises:
        ValueError: There is no zero point, or as ``check_models``, of which the zero point is one here.
    """
    if zero is None:
        raise ValueError("a zero point is needed, found none")
    checked = check_models(models, block)
    return _check(zero, "zero point", models[0]), checked


def check_whole(block: Block, method: str) -> None:
    """Refuse a slice that visibly is not a whole tensor.

    Raises:
        ValueError: The block starts inside its tensor.
    """
    if block.start != 0:
        raise ValueError(f"{method} needs the whole tensor, found a block that starts at entry {block.start}")


def weight_list(weights: Mapping[str, float] | None, block: Block) -> list[float]:
    """Return the weight of each model of the block, 1 each without weights.

    Raises:
        ValueError: A model has no weight.
    """
    if weights is None:
        return [1.0] * len(block.models)
    lost = [role for role in block.models if role not in weights]
    if lost:
        raise ValueError(f"no weight for {', '.join(lost)}, only for {', '.join(weights)}")
    return [weights[role] for role in block.models]


def add_delta(zero: Tensor, delta: Tensor) -> Tensor:
    """Return zero + delta, where an entry whose delta is 0 keeps the bits of the zero point, -0.0 included.

    Float32 in and out. Memory: 2 tensors besides the inputs.
    """
    merged = zero + delta
    # A sum with 0 is the other number, bit for bit, but for -0.0 + 0.0.
    return torch.where(delta == 0, zero, merged) if has_negative_zero(zero) else merged


def add_scaled(zero: Tensor, models: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
    """Return zero + sum_i factor_i * (model_i - zero).

    When one factor alone is not 0 and it is 1, the result is that model bit for bit; where the sum is 0 the zero
    point keeps its bits. Float32 in and out.
    """
    used = [(model, factor) for model, factor in zip(models, factors, strict=True) if factor != 0]
    if not used:
        return zero.clone()
    if len(used) == 1 and used[0][1] == 1:
        return used[0][0].clone()
    model, factor = used[0]
    delta = (model - zero).mul_(factor)
    for model, factor in used[1:]:
        delta += (model - zero).mul_(factor)
    return add_delta(zero, delta)


def add_kept(zero: Tensor, model: Tensor, kept: Tensor, factor: float) -> Tensor:
    """Return zero + factor * (model - zero) at the entries of the mask ``kept`` and the zero point elsewhere.

    With factor 1 kept entries are those of the model bit for bit, which the sum in float32 is not: for zero 1
    and model 2^-30 it gives 0.
    """
    if factor == 0:
        return zero.clone()
    if factor == 1:
        return chosen(kept, model, zero)
    return add_delta(zero, masked((model - zero).mul_(factor), kept))


def _check(tensor: Tensor, role: str, like: Tensor) -> Tensor:
    if tensor.dtype not in FLOATS:
        raise ValueError(f"{role}: expected float16, bfloat16, float32 or float64, found {tensor.dtype}")
    if tensor.shape != like.shape:
        raise ValueError(f"{role}: expected shape {tuple(like.shape)}, found {tuple(tensor.shape)}")
    if tensor.device != like.device:
        raise ValueError(f"{role}: expected device {like.device}, found {tensor.device}")
    single = tensor.detach().to(torch.float32)
    if not is_finite(single):
        count = int((~torch.isfinite(single)).sum())
        raise ValueError(f"{role}: expected finite float32 numbers, found {count} NaN or infinite entries")
    return single
