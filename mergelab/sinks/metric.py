"""Sink metrics of attention rows as arithmetic: scores in, statistics of each row out.

Nothing here knows a model: scores come from ``capture``. Rows are pooled over prompts, layers and heads in
``summary``. All logarithms are natural.

Shape letters: H query heads, Q queries, K keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

SINK_RATE_TOKENS = 64
"""Gu et al. truncate each prompt to this many tokens; causal attention makes that a cut of the rows."""


@dataclass(frozen=True)
class Rows:
    """Statistics of the attention rows of one layer, every field of shape (H, Q).

    A row that sees one key has ``log_odds`` and ``gap`` of +inf: there is no other key to compare with.
    """

    log_odds: Tensor
    """G = ln(a / (1 - a)) of the row maximum a, float."""
    gap: Tensor
    """T = largest minus second largest score, float, >= 0 and >= G when three or more keys are visible."""
    is_first: Tensor
    """Whether the row maximum lies on key 0, bool."""
    first_mass: Tensor
    """Attention probability of key 0, float in [0, 1]; 0 where key 0 is not visible."""
    num_visible: Tensor
    """How many keys the row sees, int64."""

    def to_cpu(self) -> Rows:
        """Return the same rows on the CPU."""
        return Rows(**{field.name: getattr(self, field.name).cpu() for field in fields(self)})


def join_rows(blocks: Sequence[Rows]) -> Rows:
    """Join blocks of consecutive queries of one layer, in order, into (H, sum of Q)."""
    names = [field.name for field in fields(Rows)]
    return Rows(**{name: torch.cat([getattr(block, name) for block in blocks], dim=-1) for name in names})


def measure_rows(scores: Tensor, visible: Tensor, sink_logits: Tensor | None = None) -> Rows:
    """Compute the sink statistics of attention rows from raw scores.

    With s the scores of the visible keys of a row, m the first index of their maximum:

        log_odds   = s_m - logsumexp(s_k, k != m)        = ln(a / (1 - a)),  a = softmax(s)_m
        gap        = s_m - max(s_k, k != m)              = ln(largest / second largest probability)
        first_mass = exp(s_0 - logsumexp(s))

    Adding a constant to a row changes nothing. n equal scores give log_odds -ln(n - 1) and gap 0; two visible
    keys give log_odds = gap; one visible key gives +inf in both. A tie takes the first index.

    Args:
        scores: (H, Q, K), float32 or float64, after scaling; entries of invisible keys are ignored.
        visible: Boolean, broadcastable to (H, Q, K); each row must see at least one key.
        sink_logits: (H,) learned logits that join the softmax of every row of their head and belong to no key
            (gpt-oss). Their mass counts in 1 - a and lowers ``first_mass``; they are never the row maximum, nor
            the second largest of ``gap``.

    Returns:
        The row statistics, floats in the dtype of ``scores``.

    Raises:
        ValueError: ``scores`` is not float32 or float64, or a row sees no key.

    **Source**: arXiv 2609.00746, section on Sink Strength (G, p_sink); the gap is T of the authors'
    repository.

    **Deviations**: the paper takes log-odds of bfloat16 probabilities, where a close to 1 becomes infinite;
    scores keep every row with two visible keys finite. ``read_bfloat16`` gives the other read-out.
    """
    if scores.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"scores are {scores.dtype}, expected float32 or float64: log-odds need the precision")
    visible = visible.expand(scores.shape)
    num_visible = visible.sum(dim=-1)
    if int(num_visible.min()) < 1:
        raise ValueError("a row sees no key at all")
    shown = scores.masked_fill(~visible, -math.inf)
    sink = shown.argmax(dim=-1, keepdim=True)
    largest = shown.gather(-1, sink).squeeze(-1)
    first = shown[..., 0].clone()
    others = shown.scatter_(-1, sink, -math.inf)
    second = others.amax(dim=-1)
    others_total = torch.logsumexp(others, dim=-1)
    if sink_logits is not None:
        others_total = torch.logaddexp(others_total, sink_logits[:, None].to(others_total))
    return Rows(
        log_odds=largest - others_total,
        gap=largest - second,
        is_first=sink.squeeze(-1) == 0,
        first_mass=torch.exp(first - torch.logaddexp(largest, others_total)),
        num_visible=num_visible,
    )


def read_bfloat16(log_odds: Tensor) -> Tensor:
    """Compute the log-odds as read off bfloat16 attention probabilities.

        p = bfloat16(sigmoid(log_odds)),  result = ln(p) - ln(1 - p)

    sigmoid(G) is the float32 softmax probability of the row maximum, and rounding keeps the order of
    probabilities, so this is what a map cast to bfloat16 shows. A probability that rounds to 1 gives +inf;
    the largest finite value is ln(255) = 5.54.

    Args:
        log_odds: G of any shape, float32 or float64.

    Returns:
        Same shape and dtype; values on the bfloat16 grid, or +inf.

    **Source**: every published S of arXiv 2609.00746 is the logit of a bfloat16 probability.

    **Deviations**: scores are multiplied in float32 here; eager attention of a bfloat16 model also rounds the
    scores to bfloat16 before its softmax.
    """
    probability = torch.sigmoid(log_odds).to(torch.bfloat16).to(log_odds.dtype)
    return torch.log(probability) - torch.log1p(-probability)


def sink_rate_share(first_mass: Tensor) -> Tensor:
    """Compute alpha_1 of each head: the mean attention to key 0 over the first 64 queries, query 0 included.

        alpha_1 = (1 / T) sum_{i = 1..T} A_{i,1},  T = min(64, number of queries)

    Args:
        first_mass: (H, T') probabilities of key 0 for the queries 0..T'-1 of one prompt.

    Returns:
        (H,) in [1/T, 1] for causal attention, whose query 0 gives 1.

    **Source**: Gu et al., arXiv 2410.10781, Sink_k^eps with k = 1.

    **Deviations**: they take texts of at least 64 tokens; shorter prompts are used whole here, and the token
    counts stand in the record.
    """
    return first_mass[:, :SINK_RATE_TOKENS].mean(dim=-1)
