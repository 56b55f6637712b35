"""Displacements against closed forms and against log ratios of eager attention maps; Lemma 1, also when it fails."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mergelab.sinks import scores as scores_module
from mergelab.sinks.capture import capturing
from mergelab.sinks.displacement import (
    Displacements,
    compare_projections,
    compare_scores,
    summarize_displacements,
)
from mergelab.sinks.scores import Projections
from tests.sinks.models import tiny
from tests.sinks.test_capture import TOKENS, eager_maps


def compare_row(base: list[float], tower: list[float], visible: list[bool] | None = None) -> Displacements:
    scores = [torch.tensor([[row]], dtype=torch.float64) for row in (base, tower)]
    return compare_scores(*scores, torch.tensor(visible or [True] * len(base)))


def test_paper_example_meets_the_bound_of_lemma_1_with_equality() -> None:
    # 63 equal keys with logsumexp 2 under a sink of 5: G = 3. Sink and others part by 0.4.
    other = 2 - math.log(63)
    found = compare_row([5.0] + [other] * 63, [4.8] + [other + 0.2] * 63)
    assert found.log_odds.item() == pytest.approx(3.0)
    assert found.b_gap.item() == pytest.approx(0.4)
    lost = torch.sigmoid(-found.log_odds_after).item()
    assert lost == pytest.approx(0.069, abs=5e-4)
    assert lost == pytest.approx(1 / (1 + math.exp(2.6)))


def test_identical_scores_have_no_gap_and_keep_their_sink() -> None:
    scores = 9 * torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = compare_scores(scores, scores, torch.ones(7, dtype=torch.bool))
    assert (found.b_gap == 0).all()
    assert torch.equal(found.log_odds, found.log_odds_after)
    assert found.is_same_sink.all()


def test_constants_added_to_rows_change_nothing() -> None:
    base, tower = [1.0, 4.0, -2.0], [0.5, 1.0, 3.0]
    plain = compare_row(base, tower)
    shifted = compare_row([value + 40 for value in base], [value - 7 for value in tower])
    # delta = -0.5, -3, +5 at the sink -3: gaps 2.5 and 8.
    assert plain.b_gap.item() == 8.0
    assert not plain.is_same_sink.item()
    for name in ("b_gap", "log_odds", "log_odds_after"):
        assert getattr(shifted, name).item() == pytest.approx(getattr(plain, name).item())


def test_invisible_keys_do_not_count() -> None:
    found = compare_row([1.0, 2.0, 50.0], [1.5, 2.0, -90.0], [True, True, False])
    assert found.b_gap.item() == 0.5
    assert found.log_odds_after.item() == pytest.approx(0.5)
    assert found.num_visible.item() == 2


def test_scores_of_different_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="scores are"):
        compare_scores(torch.zeros(1, 2, 2), torch.zeros(2, 2, 2), torch.ones(2, dtype=torch.bool))


def projections_of(model: Any) -> dict[int, Projections]:
    with capturing(model, TOKENS) as capture:
        return capture.rows_and_projections(TOKENS, capture.layers)[1]


@pytest.mark.parametrize("block_entries", [10**6, 4 * 14 * 5], ids=["one block", "blocks of five"])
@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "gemma3_text", "olmo3", "mistral", "phi3", "gemma2", "gpt_oss"]
)
def test_gap_equals_that_of_eager_probabilities(
    family: str, block_entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores_module, "BLOCK_ENTRIES", block_entries)
    base, tower = tiny(family, seed=0), tiny(family, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)
    has_sink_logit = family == "gpt_oss"
    if has_sink_logit:  # what is missing from a float32 map is lost in its rounding
        for model in (base, tower):
            model.double().set_experts_implementation("eager")
    before, after = projections_of(base), projections_of(tower)
    maps = [eager_maps(model, [TOKENS]) for model in (base, tower)]
    largest = 0.0
    for layer in before:
        found = compare_projections(before[layer], after[layer])
        slack = found.log_odds_after - (found.log_odds - found.b_gap)
        assert (slack[found.kept] >= -1e-9).all(), "Lemma 1"
        for head in range(4):
            for query in range(1, len(TOKENS)):
                old, new = (model[layer][0, head, query].tolist() for model in maps)
                seen = [key for key in range(query + 1) if old[key] > 0]
                sink = max(seen, key=lambda key: old[key])
                gaps = [
                    abs(math.log(new[key] / new[sink]) - math.log(old[key] / old[sink])) for key in seen if key != sink
                ]
                rest = math.fsum(new[key] for key in seen if key != sink)
                if has_sink_logit:
                    lost_before, lost_after = 1 - math.fsum(old), 1 - math.fsum(new)
                    gaps.append(abs(math.log(lost_after / new[sink]) - math.log(lost_before / old[sink])))
                    rest += lost_after
                assert found.b_gap[head, query].item() == pytest.approx(max(gaps, default=0.0), abs=2e-4)
                if gaps:
                    expected = math.log(new[sink] / rest)
                    assert found.log_odds_after[head, query].item() == pytest.approx(expected, abs=2e-4)
                largest = max(largest, found.b_gap[head, query].item())
    assert largest > 0.5, "the two models differ, or nothing was compared"


def test_another_window_is_refused() -> None:
    base, tower = (projections_of(tiny("mistral", sliding_window=window))[0] for window in (6, 5))
    with pytest.raises(ValueError, match="another window"):
        compare_projections(base, tower)


def test_another_number_of_heads_is_refused() -> None:
    base = projections_of(tiny("llama"))[0]
    with pytest.raises(ValueError, match="4 heads and 14 tokens in base, 2 and 14"):
        compare_projections(base, replace(base, query=base.query[:2]))


def random_displacements(seed: int, size: int) -> Displacements:
    generator = torch.Generator().manual_seed(seed)
    base, tower = (3 * torch.randn(2, size, size, generator=generator, dtype=torch.float64) for _ in range(2))
    return compare_scores(base, tower, torch.ones(size, size, dtype=torch.bool).tril())


def test_summary_equals_a_slow_loop_and_lemma_1_holds() -> None:
    prompts = [
        {layer: random_displacements(10 * number + layer, size) for layer in (2, 5, 6)}
        for number, size in enumerate((9, 6))
    ]
    summary = summarize_displacements(prompts, (5, 6))

    def values(name: str, layers: tuple[int, ...]) -> np.ndarray:
        return np.array(
            [
                float(getattr(prompt[layer], name)[head, query])
                for prompt in prompts
                for layer in layers
                for head in range(2)
                for query in range(1, prompt[layer].b_gap.shape[1])
            ]
        )

    gaps, log_odds = values("b_gap", (5, 6)), values("log_odds", (5, 6))
    assert summary["num_rows"] == len(gaps) == 2 * 2 * (8 + 5)
    assert summary["b_gap"] == np.median(gaps)
    assert summary["margin"] == np.median(log_odds) - np.median(gaps)
    assert summary["median_row_margin"] == np.median(log_odds - gaps) != summary["margin"]
    assert summary["b_gap_low"] <= summary["b_gap"] <= summary["b_gap_high"]
    assert summary["per_layer"]["2"]["b_gap"] == np.median(values("b_gap", (2,)))
    assert np.shape(summary["per_head"]) == (3, 2)
    lemma = summary["lemma1"]
    assert (lemma["num_rows"], lemma["num_violations"]) == (3 * 2 * (8 + 5), 0)
    assert lemma["smallest_slack"] >= -1e-12


def test_a_broken_computation_violates_lemma_1() -> None:
    right = random_displacements(0, 8)
    wrong = replace(right, b_gap=right.b_gap / 4)
    assert summarize_displacements([{0: right}], (0,))["lemma1"]["num_violations"] == 0
    assert summarize_displacements([{0: wrong}], (0,))["lemma1"]["num_violations"] > 0
