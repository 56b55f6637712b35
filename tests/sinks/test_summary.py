"""Pooling of rows into record numbers, on rows written by hand."""

import math

import numpy as np
import pytest
import torch

from mergelab.sinks.metric import Rows, measure_rows
from mergelab.sinks.summary import bootstrap_median, median, sink_rates, summarize_rows


def rows_of(scores: torch.Tensor, window: int | None = None) -> Rows:
    size = scores.shape[-1]
    visible = torch.ones(size, size, dtype=torch.bool).tril()
    if window is not None:
        visible &= torch.ones(size, size, dtype=torch.bool).triu(1 - window)
    return measure_rows(scores, visible)


def random_rows(seed: int, size: int, window: int | None = None) -> Rows:
    return rows_of(3 * torch.randn(2, size, size, generator=torch.Generator().manual_seed(seed)), window)


def test_numbers_equal_a_slow_loop() -> None:
    prompts = [{3: random_rows(0, 12), 4: random_rows(1, 12)}, {3: random_rows(2, 5), 4: random_rows(3, 5)}]
    summary = summarize_rows(prompts)
    kept = [
        (number, layer, head, query)
        for number, prompt in enumerate(prompts)
        for layer, rows in prompt.items()
        for head in range(2)
        for query in range(1, rows.log_odds.shape[1])
    ]

    def values(name: str, chosen: list[tuple[int, int, int, int]] = kept) -> np.ndarray:
        return np.array([float(getattr(prompts[n][layer], name)[h, q]) for n, layer, h, q in chosen])

    log_odds = values("log_odds")
    assert summary["num_rows"] == len(kept) == 2 * 2 * (11 + 4)
    assert summary["sink_strength"] == np.median(log_odds)
    assert summary["gap_to_second"] == np.median(values("gap"))
    assert summary["position0_share"] == values("is_first").mean()
    assert summary["prevalence"] == (log_odds > 2).mean()
    assert 0 < summary["prevalence"] < 1
    last = [[c for c in kept if c[0] == n and c[3] >= size - 8] for n, size in ((0, 12), (1, 5))]
    assert [len(chosen) for chosen in last] == [2 * 2 * 8, 2 * 2 * 4]
    masses = [values("first_mass", chosen).mean() for chosen in last]
    assert summary["position0_mass"] == pytest.approx(np.mean(masses), abs=1e-7)
    assert summary["per_prompt"] == [np.median(values("log_odds", [c for c in kept if c[0] == n])) for n in (0, 1)]
    assert list(summary["per_layer"]) == ["3", "4"]
    for index, layer in enumerate((3, 4)):
        assert summary["per_layer"][str(layer)] == np.median(values("log_odds", [c for c in kept if c[1] == layer]))
        for head in (0, 1):
            chosen = [c for c in kept if c[1:3] == (layer, head)]
            assert summary["per_head"][index][head] == np.median(values("log_odds", chosen))


def test_saturated_rows_are_counted_and_the_median_survives_them() -> None:
    scores = torch.zeros(1, 6, 6)
    scores[0, 4:, 0] = 50.0
    summary = summarize_rows([{0: rows_of(scores)}])
    assert summary["num_rows"] == 5
    assert summary["num_saturated_rows"] == 2
    assert math.isfinite(summary["sink_strength_bf16"])


def test_bfloat16_median_that_is_infinite_is_none_while_float32_stays() -> None:
    scores = torch.zeros(1, 6, 6)
    scores[0, :, 0] = 50.0
    summary = summarize_rows([{0: rows_of(scores)}])
    assert summary["num_saturated_rows"] == 5
    assert summary["sink_strength_bf16"] is None
    assert summary["sink_strength"] == pytest.approx(50.0 - math.log(3), abs=1e-4)


def test_windows_are_named_and_rows_without_a_second_key_skipped() -> None:
    full, windowed = random_rows(0, 8), random_rows(1, 8, window=3)
    summary = summarize_rows([{0: full, 1: windowed}])
    assert summary["window_layers"] == [1]
    assert summary["num_skipped_rows"] == 0
    chunk = torch.arange(8) // 3
    visible = (chunk[:, None] == chunk) & torch.ones(8, 8, dtype=torch.bool).tril()
    chunked = measure_rows(torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(2)), visible)
    summary = summarize_rows([{0: full, 1: chunked}])
    assert summary["num_skipped_rows"] == 2 * 2  # queries 3 and 6 of two heads start a chunk
    assert summary["num_rows"] == 2 * 7 + 2 * 5
    assert math.isfinite(summary["gap_to_second"])


def test_layer_whose_rows_see_one_key_each_is_refused() -> None:
    with pytest.raises(ValueError, match="no rows"):
        summarize_rows([{0: random_rows(0, 8), 1: random_rows(1, 8, window=1)}])


def test_sink_rate_thresholds_each_head_and_falls_with_eps() -> None:
    scores = torch.zeros(2, 64, 64)
    scores[0, :, 0] = 200.0
    assert sink_rates([{0: rows_of(scores)}]) == {"0.3": 50.0, "0.8": 50.0}
    half = torch.zeros(1, 64, 64)
    half[..., 0] = torch.log(torch.arange(64).clamp(min=1)).float()  # half of each row on key 0
    assert sink_rates([{0: rows_of(half)}]) == {"0.3": 100.0, "0.8": 0.0}


def test_median_of_even_count_averages_and_of_nothing_is_refused() -> None:
    assert median(np.array([1.0, 2.0, 4.0, math.inf])) == 3.0
    with pytest.raises(ValueError, match="no rows"):
        median(np.array([]))


def test_nothing_to_summarize_is_refused() -> None:
    with pytest.raises(ValueError, match="0 prompts"):
        summarize_rows([])


def test_bootstrap_equals_naive_resampling() -> None:
    generator = np.random.default_rng(5)
    groups = [generator.normal(loc=number, size=size) for number, size in enumerate((4, 7, 10, 1))]
    fast = bootstrap_median(groups, resamples=200, seed=3)
    draws = np.random.default_rng(3).integers(4, size=(200, 4))
    slow = [np.median(np.concatenate([groups[index] for index in drawn])) for drawn in draws]
    assert fast == pytest.approx(tuple(np.quantile(slow, [0.025, 0.975])), abs=1e-12)
    assert fast == bootstrap_median(groups, resamples=200, seed=3)
    assert fast is not None and fast[0] < np.median(np.concatenate(groups)) < fast[1]


def test_bootstrap_of_one_group_has_no_interval() -> None:
    assert bootstrap_median([np.arange(5.0)]) is None
