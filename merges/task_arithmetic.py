"""Adding scaled task vectors to the zero point."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from merges.block import Block
from merges.parameters import TaskArithmetic
from merges.vectors import add_scaled, check_inputs, weight_list


def task_arithmetic(zero: Tensor | None, models: Sequence[Tensor], parameters: TaskArithmetic, block: Block) -> Tensor:
    """Return the zero point plus the scaled sum of the weighted task vectors.

        tau_i  = model_i - zero
        merged = zero + lambda * sum_i w_i tau_i

    Where the sum is 0 the zero point keeps its bits; lambda 0 returns all of them. When one vector alone has
    a coefficient lambda * w_i other than 0 and it is 1, the result is that model bit for bit.

    Args:
        zero: The zero point.
        models: In the order of ``block.models``; any float dtype, equal shapes, any number of dimensions.
        parameters: Weights by role and lambda.
        block: Any slice of a tensor gives the slice of the result.

    Returns:
        Float32, the same shape, a new tensor. Memory: 4 tensors of that size at most, besides float32 copies
        of inputs of other dtypes.

    Raises:
        ValueError: As ``check_inputs``; a model has no weight.

    Source: Ilharco et al. 2023, Editing models with task arithmetic, arXiv 2212.04089, section 2.
    Deviations: a weight for each vector beside the one scale; the exact ends above.
    """
    start, checked = check_inputs(zero, models, block)
    weights = weight_list(parameters.weights, block)
    # lambda enters each factor in float64, so that every vector is rounded once and not twice.
    return add_scaled(start, checked, [parameters.lambda_ * weight for weight in weights])
