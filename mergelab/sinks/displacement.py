"""How the attention scores of a tower differ from those of its base around the base's sink.

Scores in, statistics of each row out, as ``metric`` does for one model. Where scores come from is ``capture``'s
business; pooling is done by ``summarize_displacements``. All logarithms are natural.

Shape letters: H query heads, Q queries, K keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mergelab.sinks.metric import measure_rows
from mergelab.sinks.scores import Projections, score_blocks
from mergelab.sinks.summary import bootstrap_median, median

LEMMA_TOLERANCE = 1e-9
"""Relative to 1 + B_gap: what float64 rounding of scores may cost."""


@dataclass(frozen=True)
class Displacements:
    """Statistics of the rows of one layer in two models, every field of shape (H, Q), float64 unless said.

    Rows that see one key have a B_gap of 0 and log-odds of +inf; they are dropped when pooled.
    """

    b_gap: Tensor
    """B_gap = max over visible p other than the sink of abs(delta_p - delta_sink), >= 0."""
    log_odds: Tensor
    """G of the base at its sink."""
    log_odds_after: Tensor
    """Log-odds of the tower at the base's sink, whether or not its own row maximum lies there."""
    is_same_sink: Tensor
    """Whether the tower's row maximum lies on the base's sink, bool."""
    num_visible: Tensor
    """int64."""

    @property
    def kept(self) -> Tensor:
        """Rows with something to compare: two visible keys or more, bool."""
        return self.num_visible >= 2


def compare_scores(
    base: Tensor, tower: Tensor, visible: Tensor, sink_logits: tuple[Tensor, Tensor] | None = None
) -> Displacements:
    """Compute the displacement of attention rows from the raw scores of two models.

    With s and s' the scores of base and tower, m the first index of the base's row maximum and
    delta = s' - s:

        b_gap          = max over visible p != m of abs(delta_p - delta_m)
        log_odds       = s_m - logsumexp(s_k, k != m)
        log_odds_after = s'_m - logsumexp(s'_k, k != m)

    A constant added to a row of either model changes nothing, so b_gap equals the change of log attention
    ratios that the definition names, without its probabilities that round to 0. Equal scores give b_gap 0.
    Lemma 1 of the paper, 1 - a'_m <= sigmoid(b_gap - G), is log_odds_after >= log_odds - b_gap.

    Args:
        base: (H, Q, K) scores, float32 or float64, after scaling.
        tower: Same shape and dtype.
        visible: Boolean, broadcastable to them; each row must see at least one key.
        sink_logits: (H,) learned logits of base and tower that join every softmax. They count as one more p, never
            as the sink.

    Returns:
        The row statistics in the dtype of the scores.

    Raises:
        ValueError: The shapes or dtypes differ, or as ``metric.measure_rows``.

    **Source**: arXiv 2609.00746, B_gap and Lemma 1.

    **Deviations**: none; raw scores where the paper reads probabilities.
    """
    if base.shape != tower.shape or base.dtype != tower.dtype:
        raise ValueError(f"scores are {base.dtype} {tuple(base.shape)} and {tower.dtype} {tuple(tower.shape)}")
    visible = visible.expand(base.shape)
    rows = measure_rows(base, visible, None if sink_logits is None else sink_logits[0])
    sink = base.masked_fill(~visible, -torch.inf).argmax(dim=-1, keepdim=True)
    delta = tower - base
    moved = (delta - delta.gather(-1, sink)).abs().masked_fill(~visible, 0.0)
    shown = tower.masked_fill(~visible, -torch.inf)
    others = torch.logsumexp(shown.scatter(-1, sink, -torch.inf), dim=-1)
    b_gap = moved.amax(dim=-1)
    if sink_logits is not None:
        before, after = (logits[:, None].to(base) for logits in sink_logits)
        b_gap = torch.maximum(b_gap, (after - before - delta.gather(-1, sink).squeeze(-1)).abs())
        others = torch.logaddexp(others, after)
    return Displacements(
        b_gap=b_gap,
        log_odds=rows.log_odds,
        log_odds_after=shown.gather(-1, sink).squeeze(-1) - others,
        is_same_sink=shown.argmax(dim=-1) == sink.squeeze(-1),
        num_visible=rows.num_visible,
    )


def compare_projections(base: Projections, tower: Projections) -> Displacements:
    """Compute the displacements of one layer block by block, scores in float64, on the CPU.

    Args:
        base: Projections of the base for one prompt.
        tower: Of the tower for the same token ids: the same H and T.

    Returns:
        Displacements of (H, T).

    Raises:
        ValueError: Heads, tokens or visible keys differ between the models.
    """
    if base.query.shape[:2] != tower.query.shape[:2]:
        raise ValueError(
            f"{base.query.shape[0]} heads and {base.query.shape[1]} tokens in base, {tower.query.shape[0]} and "
            f"{tower.query.shape[1]} in the tower"
        )
    if (base.sink_logits is None) != (tower.sink_logits is None):
        raise ValueError("only one of the models has learned sink logits")
    logits = None
    if base.sink_logits is not None and tower.sink_logits is not None:
        logits = base.sink_logits, tower.sink_logits
    blocks = []
    pairs = zip(score_blocks(base, torch.float64), score_blocks(tower, torch.float64), strict=True)
    for (base_scores, base_visible), (tower_scores, tower_visible) in pairs:
        if not bool((base_visible == tower_visible).all()):
            raise ValueError("a query sees other keys in the tower than in base (another window)")
        blocks.append(compare_scores(base_scores, tower_scores, base_visible, logits))
    names = [entry.name for entry in fields(Displacements)]
    return Displacements(**{name: torch.cat([getattr(block, name) for block in blocks], dim=-1) for name in names})


def summarize_displacements(
    prompts: Sequence[Mapping[int, Displacements]], last_layers: Sequence[int]
) -> dict[str, Any]:
    """Summarize the displacements of all prompts into the numbers of a diagnosis.

    Args:
        prompts: For each prompt the displacements of every layer, on the CPU; all prompts have the same layers.
        last_layers: The layers that single numbers pool, as in Sink Strength.

    Returns:
        JSON-able. Pooled over ``last_layers``: ``b_gap`` (median, nats) with its 95 % bootstrap interval over
        prompts (``b_gap_low``, ``b_gap_high``; None for one prompt), ``margin`` = median G - median B_gap,
        ``median_row_margin`` (median of G - B_gap by row: another number), ``same_sink_share``, ``num_rows``.
        ``per_layer``: layer -> b_gap, margin and same_sink_share. ``per_head``: layers x heads, median B_gap.
        ``lemma1`` over every row of every layer: ``num_rows``, ``num_violations`` (0 unless the computation is
        wrong), ``smallest_slack`` of log_odds_after - (G - B_gap), in nats.

    Raises:
        ValueError: No row sees two keys.

    **Source**: arXiv 2609.00746 (margin G - B: difference of medians, not median of differences; Lemma 1).

    **Deviations**: none.
    """
    layers = sorted(prompts[0])
    inside = [layer for layer in layers if layer in set(last_layers)]
    every = [prompt[layer] for prompt in prompts for layer in layers]
    slack = np.concatenate([_kept(rows.log_odds_after - (rows.log_odds - rows.b_gap), rows) for rows in every])
    allowed = LEMMA_TOLERANCE * (1 + np.concatenate([_kept(rows.b_gap, rows) for rows in every]))
    by_prompt = [np.concatenate([_kept(prompt[layer].b_gap, prompt[layer]) for layer in inside]) for prompt in prompts]
    interval = bootstrap_median(by_prompt)
    pooled = _medians([prompt[layer] for prompt in prompts for layer in inside])
    return {
        **pooled,
        "b_gap_low": interval[0] if interval else None,
        "b_gap_high": interval[1] if interval else None,
        "per_layer": {str(layer): _medians([prompt[layer] for prompt in prompts]) for layer in layers},
        "per_head": [
            [
                median(np.concatenate([_kept(prompt[layer].b_gap, prompt[layer], head) for prompt in prompts]))
                for head in range(prompts[0][layer].b_gap.shape[0])
            ]
            for layer in layers
        ],
        "lemma1": {
            "num_rows": int(slack.size),
            "num_violations": int((slack < -allowed).sum()),
            "smallest_slack": float(slack.min()),
        },
    }


def _medians(parts: Sequence[Displacements]) -> dict[str, Any]:
    b_gap = np.concatenate([_kept(rows.b_gap, rows) for rows in parts])
    log_odds = np.concatenate([_kept(rows.log_odds, rows) for rows in parts])
    same = np.concatenate([_kept(rows.is_same_sink.double(), rows) for rows in parts])
    return {
        "b_gap": median(b_gap),
        "margin": median(log_odds) - median(b_gap),
        "median_row_margin": median(log_odds - b_gap),
        "same_sink_share": float(same.mean()),
        "num_rows": int(b_gap.size),
    }


def _kept(values: Tensor, rows: Displacements, head: int | None = None) -> np.ndarray:
    if head is not None:
        return values[head][rows.kept[head]].numpy()
    return values[rows.kept].numpy()
