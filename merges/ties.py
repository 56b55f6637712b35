"""TIES: trim every task vector, elect a sign for every entry, average the vectors that agree with it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from merges.block import Block
from merges.consensus import agreeing_mean, zero_sign
from merges.masks import masked
from merges.parameters import Ties
from merges.trim import reaches, trim_mask
from merges.vectors import add_delta, add_kept, check_inputs, check_whole, weight_list


def ties(zero: Tensor | None, models: Sequence[Tensor], parameters: Ties, block: Block) -> Tensor:
    """Return the zero point plus lambda times the mean of trimmed task vectors that agree in sign.

        tau_i  = model_i - zero
        m_i    = the density of largest magnitudes of tau_i      (``trim_mask``)
        sign   = sgn(sum_i m_i tau_i)
        a_i    = m_i and sgn(tau_i) = sign
        merged = zero + lambda * sum_i a_i w_i tau_i / sum_i a_i w_i

    Where the kept entries sum to exactly 0 the sign is 0, nothing agrees with it, and the zero point stays.
    Other rules of election, of a zero sum and of the divisor: ``agreeing_mean``. With one vector the mean is
    the vector itself, so merged = zero + lambda m tau, and kept entries are those of the model bit for bit
    when lambda is 1; all entries are with density 1. Entries whose merged delta is 0 keep the bits of the
    zero point.

    Args:
        zero: The zero point.
        models: In the order of ``block.models``; any float dtype, equal shapes, any number of dimensions.
        parameters: Density, weights by role, lambda and the conventions.
        block: A whole tensor; or any slice, and its survey (``merges.surveyor``), without which trim_scope model
            cannot be.

    Returns:
        Float32, the same shape, a new tensor. Memory: with T vectors about T + 6 tensors of that size,
        besides float32 copies of inputs of other dtypes; with one vector 4.

    Raises:
        ValueError: As ``check_inputs``; a task vector leaves the range of float32; a model has no weight; the
            block starts inside its tensor; a needed survey is missing; a single vector has a weight other than 1,
            which would cancel.

    Source: Yadav et al. 2023, TIES-Merging, arXiv 2306.01708, Algorithm 1.
    Deviations: trims every tensor by default, as the implementations for language models do, where the paper trims
        the whole vector (trim_scope model); weights, which the paper does not have; counts and ties as in
        ``trim_mask``. mergekit elects on weighted entries and lets a zero sum count as plus.
    """
    start, checked = check_inputs(zero, models, block)
    if parameters.scope == "tensor" and (block.survey is None or not block.survey.thresholds):
        check_whole(block, "ties")
    weights = weight_list(parameters.weights, block)
    if len(checked) == 1:
        factor = single_factor(parameters.lambda_, weights[0], parameters.divisor, "ties")
        if factor == 1 and parameters.density == 1:
            return checked[0].clone()
        kept = kept_mask(checked[0] - start, block.models[0], parameters, block)
        return add_kept(start, checked[0], kept, factor)
    if parameters.lambda_ == 0:
        return start.clone()
    zero_sum = zero_sign(parameters.zero_sum, block.survey)
    trimmed = trimmed_vectors(start, checked, parameters, block)
    mean = agreeing_mean(trimmed, weights, parameters.elect, zero_sum, parameters.divisor)
    return add_delta(start, mean.mul_(parameters.lambda_))


def kept_mask(delta: Tensor, role: str, parameters: Ties, block: Block) -> Tensor:
    """Return which entries of the task vector of ``role`` are kept; of a whole tensor, where the block has no survey.

    It is the mask of ``block.kept`` where the caller has made it already.

    Raises:
        ValueError: trim_scope is model and the survey of the block has no threshold for the role.
    """
    if block.kept is not None and role in block.kept:
        return block.kept[role]
    survey = block.survey
    if survey is not None and role in survey.thresholds:
        last = survey.last[role] - block.start if role in survey.last else None
        return reaches(delta, survey.thresholds[role], last)
    if parameters.trim_scope == "model":
        raise ValueError(f"trim_scope model needs a survey of the whole model, found no threshold for {role}")
    return trim_mask(delta, parameters.density, parameters.kept_count)


def trimmed_vectors(zero: Tensor, models: Sequence[Tensor], parameters: Ties, block: Block) -> list[Tensor]:
    """Return the task vectors of float32 models with all but their kept entries set to 0."""
    trimmed = []
    for role, model in zip(block.models, models, strict=True):
        delta = model - zero
        trimmed.append(masked(delta, kept_mask(delta, role, parameters, block)))
    return trimmed


def single_factor(lambda_: float, weight: float, divisor: str, method: str) -> float:
    """Return what the one task vector is multiplied by.

    Raises:
        ValueError: The mean is divided by the weights and the weight is not 1, so that it would have no
            effect.
    """
    if divisor != "weights":
        return lambda_ * weight
    if weight != 1:
        raise ValueError(f"the weight of a single vector cancels in {method}, found {weight}; use lambda")
    return lambda_
