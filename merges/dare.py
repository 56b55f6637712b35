"""Dropping entries of a task vector at random and rescaling the others: what both DARE methods share."""

from __future__ import annotations

import torch
from torch import Tensor

from merges.block import Block
from merges.masks import masked
from merges.random import keep_mask, stream_key

SMALLEST_NORM = 1e-7
"""L1 norms below this have no meaningful ratio; the factor is then 1, as in mergekit."""


def dare_mask(role: str, drop_rate: float, block: Block, like: Tensor) -> Tensor:
    """Return which entries of the block are kept for the model ``role``; both DARE methods draw the same.

    The mask depends on (seed, role, tensor name, flat index) alone: not on slices, order, threads or device. It is
    that of ``block.kept`` where the caller has drawn it already.

    Source: Yu et al. 2024, arXiv 2311.03099, equation 2: m ~ Bernoulli(p), tau (1 - m) / (1 - p).
    Deviations: a counter-based stream instead of a global generator.
    """
    if block.kept is not None and role in block.kept:
        return block.kept[role]
    key = stream_key("mask", block.seed, role, block.name)
    return keep_mask(key, block.start, like.numel(), drop_rate, like.device).view(like.shape)


def rescale_factor(rescale: str, drop_rate: float, delta: Tensor, kept: Tensor) -> float:
    """Return what kept entries are multiplied by.

        1 / (1 - drop_rate)                     inverse: the expectation over masks is delta
        sum |delta| / sum |delta| over kept     l1: the L1 norm stays, the expectation does not
        1                                       none

    Sums are float64. An L1 norm below 1e-7 gives 1.
    """
    if rescale == "inverse":
        return 1 / (1 - drop_rate)
    if rescale == "none":
        return 1.0
    before = float(delta.abs().sum(dtype=torch.float64))
    after = float(masked(delta, kept).abs().sum(dtype=torch.float64))
    return before / after if min(before, after) >= SMALLEST_NORM else 1.0
