"""DARE with task arithmetic: drop entries at random, rescale, add."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from merges.block import Block
from merges.dare import dare_mask, rescale_factor
from merges.masks import masked
from merges.parameters import DareLinear
from merges.vectors import add_delta, add_kept, check_inputs, check_whole, weight_list


def dare_linear(zero: Tensor | None, models: Sequence[Tensor], parameters: DareLinear, block: Block) -> Tensor:
    """Return the zero point plus lambda times the weighted sum of randomly thinned, rescaled task vectors.

        tau_i  = model_i - zero
        m_i    ~ Bernoulli(1 - drop_rate) for every entry        (``dare_mask``)
        merged = zero + lambda * sum_i w_i m_i tau_i / (1 - drop_rate)

    Other factors than 1 / (1 - drop_rate): ``rescale_factor``. Entries whose merged delta is 0, such as
    dropped ones, keep the bits of the zero point. With one vector and a total factor of 1 kept entries are
    those of the model bit for bit, so drop_rate 0 returns the model.

    Args:
        zero: The zero point.
        models: In the order of ``block.models``; any float dtype, equal shapes, any number of dimensions.
        parameters: Drop rate, weights by role, lambda and the rescale rule.
        block: Any slice of a tensor gives the slice of the result; with rescale l1 a whole tensor.

    Returns:
        Float32, the same shape, a new tensor. Memory: 5 tensors of that size at most, besides float32 copies
        of inputs of other dtypes.

    Raises:
        ValueError: As ``check_inputs``; a model has no weight; a slice with rescale l1.

    Source: Yu et al. 2024, Language models are super Mario, arXiv 2311.03099, equations 2 and 3.
    Deviations: weights as in task arithmetic; the random stream of ``dare_mask``.
    """
    start, checked = check_inputs(zero, models, block)
    if parameters.scope == "tensor":
        check_whole(block, "dare_linear with rescale l1")
    used = []
    for role, model, weight in zip(block.models, checked, weight_list(parameters.weights, block), strict=True):
        if parameters.lambda_ * weight == 0:
            continue
        kept = dare_mask(role, parameters.drop_rate, block, model)
        rescale = rescale_factor(parameters.rescale, parameters.drop_rate, model - start, kept)
        used.append((model, kept, parameters.lambda_ * weight * rescale))
    if len(used) == 1:
        return add_kept(start, *used[0])
    if not used:
        return start.clone()
    delta, *others = (masked((model - start).mul_(factor), kept) for model, kept, factor in used)
    for other in others:
        delta += other
    return add_delta(start, delta)
