"""Pooling row statistics over prompts, layers and heads into the numbers of a sink record.

Pure: rows in, JSON-able numbers out. What a row's statistics are is in ``metric``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mergelab.sinks.metric import Rows, read_bfloat16, sink_rate_share

PREVALENCE_LOG_ODDS = 2.0
"""A row counts as a sink row in ``prevalence`` when G is above this (a > 0.881)."""

MASS_QUERIES = 8
"""``position0_mass`` averages over this many last queries of each prompt."""

SINK_RATE_THRESHOLDS = (0.3, 0.8)
"""The eps of Sink_1^eps: 0.3 in Gu et al., 0.8 in Barbero et al."""

BOOTSTRAP_RESAMPLES = 1000
BOOTSTRAP_ALPHA = 0.05
BOOTSTRAP_SEED = 0


@dataclass(frozen=True)
class _Kept:
    """The rows of one prompt and layer that see at least two keys, per head; NumPy float64 or bool."""

    log_odds: list[np.ndarray]
    log_odds_bfloat16: list[np.ndarray]
    gap: list[np.ndarray]
    is_first: list[np.ndarray]


def _keep(rows: Rows) -> _Kept:
    # Query 0 sees itself alone; windows and chunks can leave later queries with one key, too.
    keep = [mask.numpy() for mask in rows.num_visible >= 2]
    bfloat16 = read_bfloat16(rows.log_odds)

    def per_head(values: Tensor) -> list[np.ndarray]:
        array = values.numpy() if values.dtype == torch.bool else values.double().numpy()
        return [head[mask] for head, mask in zip(array, keep, strict=True)]

    return _Kept(per_head(rows.log_odds), per_head(bfloat16), per_head(rows.gap), per_head(rows.is_first))


def median(values: np.ndarray) -> float:
    """Return the median, which may be infinite; an even count takes the mean of the two middle values.

    Raises:
        ValueError: There are no values.
    """
    if values.size == 0:
        raise ValueError("the median of no rows is undefined")
    return float(np.median(values))


def bootstrap_median(
    groups: Sequence[np.ndarray],
    *,
    resamples: int = BOOTSTRAP_RESAMPLES,
    alpha: float = BOOTSTRAP_ALPHA,
    seed: int = BOOTSTRAP_SEED,
) -> tuple[float, float] | None:
    """Compute a percentile bootstrap interval of the pooled median, drawing whole groups with replacement.

    Each resample draws as many groups as there are and takes the median over all their values together.
    Groups are prompts here: rows of one prompt depend on each other, so rows are not drawn.

    Args:
        groups: One array of finite values for each prompt.
        resamples: Number of resamples, >= 1.
        alpha: 1 - alpha is the level, in (0, 1).
        seed: Seed of the NumPy generator; the same input gives the same interval.

    Returns:
        (low, high), or None for fewer than two groups, where drawing again shows no spread.

    **Source**: Efron's percentile bootstrap.

    **Deviations**: none.
    """
    if len(groups) < 2:
        return None
    values = np.concatenate(groups)
    order = np.argsort(values, kind="stable")
    values = values[order]
    group_of_value = np.repeat(np.arange(len(groups)), [group.size for group in groups])[order]
    generator = np.random.default_rng(seed)
    draws = generator.integers(len(groups), size=(resamples, len(groups)))
    medians = np.empty(resamples)
    for index, drawn in enumerate(draws):
        # Walking along the values, sorted once, with the copies of each group saves sorting every resample.
        copies = np.bincount(drawn, minlength=len(groups))
        reached = np.cumsum(copies[group_of_value])
        total = int(reached[-1])
        middle = np.searchsorted(reached, [(total - 1) // 2, total // 2], side="right")
        medians[index] = values[middle].mean()
    low, high = np.quantile(medians, [alpha / 2, 1 - alpha / 2])
    return float(low), float(high)


def summarize_rows(prompts: Sequence[Mapping[int, Rows]]) -> dict[str, Any]:
    """Summarize the rows of all prompts into the numbers of a sink record.

    Medians pool prompts, heads and queries. Rows that see one key (query 0 always) have nothing to compare:
    they are dropped, and those beyond query 0 counted in ``num_skipped_rows``. The two numbers that only read
    key 0 keep more: ``sink_rate`` all rows, as defined, and ``position0_mass`` all but query 0.

    Args:
        prompts: For each prompt the rows of each measured layer, on the CPU; all prompts have the same
            layers.

    Returns:
        JSON-able: ``sink_strength`` (median G), ``sink_strength_bf16`` (None if the median itself is
        infinite), ``sink_strength_low`` and ``_high`` (95 % bootstrap over prompts, None for one prompt),
        ``num_rows``, ``num_saturated_rows`` (infinite in the bfloat16 read-out), ``num_skipped_rows``,
        ``position0_share``, ``position0_mass`` (mean over prompts of the mean over layers, heads and the last
        8 queries), ``prevalence`` (share of G > 2; shares and mass in [0, 1]), ``gap_to_second`` (median),
        ``sink_rate`` (Sink_1^eps in percent by eps), ``per_prompt`` (list of medians), ``per_layer`` (layer:
        median), ``per_head`` (layers x heads), ``window_layers`` (layers where some row saw fewer keys than
        lie before it).

    Raises:
        ValueError: There is no prompt or no layer, or a prompt or layer has no row that sees two keys.

    **Source**: arXiv 2609.00746 (S, prevalence, position-0 probe); arXiv 2410.10781 (Sink_1^eps).

    **Deviations**: the paper does not say whether query 0 is dropped; it must be, its G is infinite.
    """
    if not prompts or not prompts[0]:
        raise ValueError(
            f"{len(prompts)} prompts with {len(prompts[0]) if prompts else 0} layers: nothing to summarize"
        )
    layers = sorted(prompts[0])
    kept = [{layer: _keep(prompt[layer]) for layer in layers} for prompt in prompts]
    everything = [entry for prompt in kept for entry in prompt.values()]
    pooled = _pool(head for entry in everything for head in entry.log_odds)
    pooled_bfloat16 = _pool(head for entry in everything for head in entry.log_odds_bfloat16)
    is_first = _pool(head for entry in everything for head in entry.is_first)
    by_prompt = [_pool(head for entry in prompt.values() for head in entry.log_odds) for prompt in kept]
    interval = bootstrap_median(by_prompt)
    bfloat16_median = median(pooled_bfloat16)
    num_heads = [len(kept[0][layer].log_odds) for layer in layers]
    return {
        "sink_strength": median(pooled),
        "sink_strength_bf16": bfloat16_median if math.isfinite(bfloat16_median) else None,
        "sink_strength_low": interval[0] if interval else None,
        "sink_strength_high": interval[1] if interval else None,
        "num_rows": int(pooled.size),
        "num_saturated_rows": int(np.isinf(pooled_bfloat16).sum()),
        "num_skipped_rows": sum(
            int((rows.num_visible[:, 1:] < 2).sum()) for prompt in prompts for rows in prompt.values()
        ),
        "position0_share": float(is_first.mean()),
        "position0_mass": float(np.mean([_last_mass(prompt) for prompt in prompts])),
        "prevalence": float((pooled > PREVALENCE_LOG_ODDS).mean()),
        "gap_to_second": median(_pool(head for entry in everything for head in entry.gap)),
        "sink_rate": sink_rates(prompts),
        "per_prompt": [median(values) for values in by_prompt],
        "per_layer": {
            str(layer): median(_pool(head for prompt in kept for head in prompt[layer].log_odds)) for layer in layers
        },
        "per_head": [
            [median(_pool(prompt[layer].log_odds[head] for prompt in kept)) for head in range(heads)]
            for layer, heads in zip(layers, num_heads, strict=True)
        ],
        "window_layers": [layer for layer in layers if any(_has_window(prompt[layer]) for prompt in prompts)],
    }


def sink_rates(prompts: Sequence[Mapping[int, Rows]]) -> dict[str, float]:
    """Compute Sink_1^eps: the percentage of (prompt, layer, head) whose alpha_1 is strictly above eps.

    Args:
        prompts: For each prompt the rows of each measured layer.

    Returns:
        Percent in [0, 100] by eps as text ("0.3", "0.8"); it falls as eps rises.

    **Source**: Gu et al., arXiv 2410.10781; thresholds are applied to each prompt before averaging, as there.

    **Deviations**: only the measured (last) layers enter, and prompts may have fewer than 64 tokens, so
    published values are not comparable.
    """
    shares = torch.cat([sink_rate_share(rows.first_mass) for prompt in prompts for rows in prompt.values()])
    return {str(eps): float((shares > eps).double().mean()) * 100.0 for eps in SINK_RATE_THRESHOLDS}


def _pool(parts: Iterable[np.ndarray]) -> np.ndarray:
    return np.concatenate(list(parts))


def _last_mass(prompt: Mapping[int, Rows]) -> float:
    # Query 0 has no choice but key 0, so a short prompt contributes its other queries alone.
    masses = [rows.first_mass[:, 1:][:, -MASS_QUERIES:].double().mean(dim=-1) for rows in prompt.values()]
    return float(torch.cat(masses).mean())


def _has_window(rows: Rows) -> bool:
    num_before = torch.arange(1, rows.num_visible.shape[-1] + 1)
    return bool((rows.num_visible < num_before).any())
