"""Electing a sign for every entry and averaging the task vectors that agree: the second half of TIES."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from merges.block import Survey
from merges.masks import count, differs, is_above, is_below, masked


def agreeing_mean(kept: Sequence[Tensor], weights: Sequence[float], elect: str, zero_sum: str, divisor: str) -> Tensor:
    """Return the mean, entry by entry, of those task vectors whose sign is the elected one.

    With t_i the entries of vector i, 0 where trimming or dropping removed them:

        sign = sgn(sum_i t_i)                                   (elect raw)
               sgn(sum_i w_i t_i)                               (elect weighted)
               sgn(sum_i sgn(t_i))                              (elect count)
        a_i  = 1 where t_i is not 0 and sgn(t_i) = sign, else 0 (of w_i t_i with elect weighted)
        mean = sum_i a_i w_i t_i / sum_i a_i w_i                (divisor weights)
               sum_i a_i w_i t_i / sum_i a_i                    (divisor count)
               sum_i a_i w_i t_i                                (divisor none)

    A sum of exactly 0 has sign 0: nothing agrees and the mean is 0 (zero_sum nothing), or it counts as + (plus)
    or - (minus). A divisor of 0 gives 0. With elect raw a vector of weight 0 still votes.

    A sum of two float32 numbers is 0 only if they cancel, so two vectors elect the exact sign; the sum of more than
    two is taken in float64.

    Args:
        kept: One float32 tensor a vector, equal shapes.
        weights: One number a vector.
        elect: raw, weighted or count.
        zero_sum: nothing, plus or minus; ``zero_sign`` turns the rule majority into one of them.
        divisor: weights, count or none.

    Returns:
        Float32, the same shape. Memory: 4 tensors besides the inputs, and one a vector with elect weighted.

    Source: Yadav et al. 2023, TIES-Merging, arXiv 2306.01708, Algorithm 1, steps 2 and 3, which is elect raw,
        zero_sum nothing and divisor count with weights 1.
    Deviations: weights, which the paper does not have. The authors' code is zero_sum majority. mergekit is elect
        weighted, zero_sum plus, divisor weights or none; peft is elect raw or count, zero_sum plus, divisor count.
    """
    ballots = _ballots(kept, weights, elect)
    sums = _sums(ballots, elect)
    elects_minus = ~is_above(sums, 0) if zero_sum == "minus" else is_below(sums, 0)
    elects_plus = ~is_below(sums, 0) if zero_sum == "plus" else is_above(sums, 0)
    del sums
    total = torch.zeros_like(kept[0])
    shares = torch.zeros_like(kept[0])
    for vector, ballot, weight in zip(kept, ballots, weights, strict=True):
        agrees = is_above(ballot, 0).logical_and_(elects_plus)
        agrees.logical_or_(is_below(ballot, 0).logical_and_(elects_minus))
        agreeing = masked(vector, agrees)
        total += agreeing if weight == 1 else agreeing.mul_(weight)
        if divisor != "none":
            shares.add_(agrees.to(torch.float32), alpha=weight if divisor == "weights" else 1.0)
    if divisor == "none":
        return total
    return masked(total.div_(shares), differs(shares, 0))


def elected_balance(kept: Sequence[Tensor], weights: Sequence[float], elect: str) -> int:
    """Return how many entries elect + less how many elect -; shapes and rules as in ``agreeing_mean``."""
    sums = _sums(_ballots(kept, weights, elect), elect)
    return count(is_above(sums, 0)) - count(is_below(sums, 0))


def zero_sign(zero_sum: str, survey: Survey | None) -> str:
    """Return nothing, plus or minus: what a sum of exactly 0 elects under the rule ``zero_sum``.

    Raises:
        ValueError: The rule is majority and nobody has counted it over the whole model.

    Source: the code of the TIES authors, where zero sums take the sign of the sum of all elected signs.
    Deviations: as many + as - elect nothing, where their code lets negative entries agree.
    """
    if zero_sum != "majority":
        return zero_sum
    if survey is None:
        raise ValueError("zero_sum majority needs a survey of the whole model, found none")
    return {1: "plus", -1: "minus", 0: "nothing"}[survey.majority]


def _ballots(kept: Sequence[Tensor], weights: Sequence[float], elect: str) -> list[Tensor]:
    if elect == "weighted":
        return [vector * weight for vector, weight in zip(kept, weights, strict=True)]
    return list(kept)


def _sums(ballots: Sequence[Tensor], elect: str) -> Tensor:
    exact = torch.float32 if len(ballots) <= 2 else torch.float64
    first, *others = (ballot.sign() if elect == "count" else ballot for ballot in ballots)
    sums = first.to(exact, copy=True)
    for ballot in others:
        sums += ballot
    return sums
