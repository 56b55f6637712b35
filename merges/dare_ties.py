"""DARE with sign election: drop entries at random, rescale, average the vectors that agree in sign."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from merges.block import Block
from merges.consensus import agreeing_mean, zero_sign
from merges.dare import dare_mask, rescale_factor
from merges.masks import masked
from merges.parameters import DareTies
from merges.ties import single_factor
from merges.vectors import add_delta, add_kept, check_inputs, check_whole, weight_list


def dare_ties(zero: Tensor | None, models: Sequence[Tensor], parameters: DareTies, block: Block) -> Tensor:
    """Return the zero point plus lambda times the mean of thinned, rescaled task vectors that agree in sign.

        tau_i  = model_i - zero
        m_i    ~ Bernoulli(1 - drop_rate) for every entry        (``dare_mask``)
        t_i    = m_i tau_i / (1 - drop_rate)
        merged = zero + lambda * (mean of the t_i that have the elected sign)

    It is TIES without trimming: election, zero sums and the mean are those of ``agreeing_mean``. With one vector the
    mean is t itself, and kept entries are those of the model bit for bit when the total factor is 1. Entries
    whose merged delta is 0 keep the bits of the zero point.

    Args:
        zero: The zero point.
        models: In the order of ``block.models``; any float dtype, equal shapes, any number of dimensions.
        parameters: Drop rate, weights by role, lambda and the conventions.
        block: Any slice of a tensor gives the slice of the result; with rescale l1 a whole tensor.

    Returns:
        Float32, the same shape, a new tensor. Memory: with T vectors about T + 7 tensors of that size,
        besides float32 copies of inputs of other dtypes.

    Raises:
        ValueError: As ``check_inputs``; a model has no weight; a slice with rescale l1; a single vector has a
            weight other than 1 that would cancel.

    Source: Yu et al. 2024, Language models are super Mario, arXiv 2311.03099, on Yadav et al. 2023,
        TIES-Merging, arXiv 2306.01708.
    Deviations: as TIES for weights; mergekit adds agreeing entries without dividing (divisor none).
    """
    start, checked = check_inputs(zero, models, block)
    if parameters.scope == "tensor":
        check_whole(block, "dare_ties with rescale l1")
    weights = weight_list(parameters.weights, block)
    if len(checked) == 1:
        factor = single_factor(parameters.lambda_, weights[0], parameters.divisor, "dare_ties")
        kept = dare_mask(block.models[0], parameters.drop_rate, block, start)
        rescale = rescale_factor(parameters.rescale, parameters.drop_rate, checked[0] - start, kept)
        return add_kept(start, checked[0], kept, factor * rescale)
    if parameters.lambda_ == 0:
        return start.clone()
    zero_sum = zero_sign(parameters.zero_sum, block.survey)
    thinned = thinned_vectors(start, checked, parameters, block)
    mean = agreeing_mean(thinned, weights, parameters.elect, zero_sum, parameters.divisor)
    return add_delta(start, mean.mul_(parameters.lambda_))


def thinned_vectors(zero: Tensor, models: Sequence[Tensor], parameters: DareTies, block: Block) -> list[Tensor]:
    """Return the task vectors of float32 models, thinned and rescaled."""
    thinned = []
    for role, model in zip(block.models, models, strict=True):
        delta = model - zero
        kept = dare_mask(role, parameters.drop_rate, block, zero)
        rescale = rescale_factor(parameters.rescale, parameters.drop_rate, delta, kept)
        thinned.append(masked(delta.mul_(rescale), kept))
    return thinned
