"""Weighted average of whole models."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from merges.block import Block
from merges.masks import chosen, differs
from merges.parameters import SUM_TOLERANCE, Linear
from merges.vectors import check_models, weight_list


def linear(zero: Tensor | None, models: Sequence[Tensor], parameters: Linear, block: Block) -> Tensor:
    """Return the weighted average of the models.

        merged = sum_i w_i model_i                      weights sum to 1
        merged = sum_i w_i model_i / sum_i w_i          with normalize

    Entries that are equal in all models keep their value bit for bit. Where a single weight is not 0 the
    result is that model, bit for bit.

    Args:
        zero: Not used; the average needs no zero point.
        models: In the order of ``block.models``; any float dtype, equal shapes, any number of dimensions.
        parameters: Weights by role.
        block: Any slice of a tensor gives the slice of the result.

    Returns:
        Float32, the same shape, a new tensor. Memory: the result, 1 temporary tensor and 1 mask besides
        float32 copies of inputs of other dtypes.

    Raises:
        ValueError: As ``check_models``; a model has no weight; the weights of these models do not sum to 1.

    Source: Wortsman et al. 2022, Model soups, arXiv 2203.05482.
    Deviations: weights may be negative; the average is not restricted to [0, 1].
    """
    checked = check_models(models, block)
    weights = weight_list(parameters.weights, block)
    total = sum(weights)
    if parameters.normalize:
        weights = [weight / total for weight in weights]
    elif abs(total - 1) > SUM_TOLERANCE:
        raise ValueError(f"weights of {', '.join(block.models)}: expected a sum of 1, found {total:g}")
    used = [(model, weight) for model, weight in zip(checked, weights, strict=True) if weight != 0]
    first = used[0][0]
    if len(used) == 1:
        return first.clone()
    merged = first * used[0][1]
    apart = torch.zeros(first.shape, dtype=torch.bool, device=first.device)
    for model, weight in used[1:]:
        merged += model * weight
        # Bits, not values: 0.0 and -0.0 are different entries.
        apart |= differs(model.view(torch.int32), first.view(torch.int32))
    return chosen(apart, merged, first)
