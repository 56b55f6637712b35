"""The paper's figures from its own table: golden numbers, and a table with an error is found out."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from importlib import resources

import numpy as np
import pytest
import torch

from mergelab.report.evidence import bfloat16_logit, verify
from mergelab.report.panel import TASKS, load_panel, num_distinct, subset

GOLDEN = {
    "spearman, 17 pairs, sink_strength ifeval": 0.8770,
    "spearman, 9 pairs, sink_strength ifeval": 0.9449,
    "spearman, 9 pairs, sink_strength gsm8k_cot": 0.8768,
    "spearman, 9 pairs, sink_strength eq_bench": 0.8598,
    "spearman, 9 pairs, sink_strength gpqa_diamond_cot": 0.8206,
    "spearman, 6 pairs, sink_strength ifeval": 0.9710,
    "spearman, 6 pairs, sink_strength eq_bench": 0.9710,
    "spearman, 6 pairs, sink_strength gsm8k_cot": 0.9710,
    "spearman, 6 pairs, sink_strength gpqa_diamond_cot": 0.8827,
    "spearman, 6 pairs, margin ifeval": 0.8857,
    "mean, 6 pairs, ifeval": -8.72,
    "mean, 6 pairs, eq_bench": -16.32,
    "mean, 6 pairs, gsm8k_cot": -14.17,
    "mean, 6 pairs, gpqa_diamond_cot": -7.92,
    "leave-one-out error, 6 pairs, ifeval": 2.59,
    "leave-one-out error, 6 pairs, eq_bench": 19.12,
    "leave-one-out error, 6 pairs, gsm8k_cot": 7.94,
    "leave-one-out error, 6 pairs, gpqa_diamond_cot": 1.98,
    "leave-one-out error without Molmo2-O, 6 pairs, ifeval": 1.66,
    "leave-one-out error without Molmo2-O, 6 pairs, eq_bench": 0.95,
    "leave-one-out error without Molmo2-O, 6 pairs, gsm8k_cot": 1.03,
    "leave-one-out error without Molmo2-O, 6 pairs, gpqa_diamond_cot": 1.70,
    "leave-one-out error of the mean, 6 pairs, ifeval": 4.42,
    "leave-one-out prediction, 6 pairs, ifeval Qwen3-VL-8B-Instruct": -0.86,
    "leave-one-out prediction, 6 pairs, ifeval InternVL3.5-8B": -3.41,
    "leave-one-out prediction, 6 pairs, ifeval Qwen2.5-VL-7B-Instruct": -10.80,
    "leave-one-out prediction, 6 pairs, ifeval InternVL3-8B": -10.97,
    "leave-one-out prediction, 6 pairs, ifeval LLaVA-OneVision-Qwen2-7B-ov": -9.04,
    "leave-one-out prediction, 6 pairs, ifeval Molmo2-O-7B": -13.70,
    "IFEval difference from counts of prompts, Qwen3-VL-8B-Instruct": -5.36,
    "IFEval difference from counts of prompts, InternVL3.5-8B": -1.85,
    "IFEval difference from counts of prompts, Qwen2.5-VL-7B-Instruct": -9.61,
    "IFEval difference from counts of prompts, InternVL3-8B": -8.87,
    "IFEval difference from counts of prompts, LLaVA-OneVision-Qwen2-7B-ov": -7.95,
    "IFEval difference from counts of prompts, Molmo2-O-7B": -18.67,
}


def test_every_golden_number_is_recomputed() -> None:
    found = {check.quantity: check.recomputed for check in verify() if not check.quantity.startswith("S is")}
    assert found.keys() == GOLDEN.keys()
    for quantity, expected in GOLDEN.items():
        digits = 4 if quantity.startswith("spearman") else 2
        assert abs(found[quantity] - expected) <= 0.5001 * 10**-digits, quantity


def test_all_figures_of_the_paper_agree() -> None:
    checks = verify()
    assert [check.quantity for check in checks if not check.ok] == []
    assert len({check.quantity for check in checks}) == len(checks)
    assert checks[0].record().keys() >= {"quantity", "paper", "recomputed", "ok"}


@pytest.mark.parametrize(
    ("vlm", "change", "quantity"),
    [
        ("Qwen2.5-VL-7B-Instruct", {"sink_strength": 1.08}, "leave-one-out prediction"),
        ("Qwen3-VL-2B", {"sink_strength": 1.85}, "bfloat16"),
        ("Idefics3-8B", {"ifeval": -2.27}, "spearman, 17 pairs"),
        ("Molmo2-O-7B", {"ifeval": -17.8}, "counts of prompts"),
        ("LLaVA-OneVision-Qwen2-7B-ov", {"eq_bench": -6.8}, "mean, 6 pairs, eq_bench"),
    ],
)
def test_a_slip_in_the_table_is_found_out(vlm: str, change: dict[str, float], quantity: str) -> None:
    panel = []
    for entry in load_panel():
        if entry.vlm == vlm:
            deltas = {**entry.deltas, **{task: value for task, value in change.items() if task in TASKS}}
            entry = replace(entry, deltas=deltas, sink_strength=change.get("sink_strength", entry.sink_strength))
        panel.append(entry)
    assert any(quantity in check.quantity for check in verify(panel) if not check.ok)


def test_panel_holds_what_the_paper_prints() -> None:
    panel = load_panel()
    assert [len(subset(panel, size)) for size in (6, 9, 17)] == [6, 9, 17]
    assert (num_distinct(subset(panel, 6)), num_distinct(panel)) == (4, 12)
    assert len({entry.base for entry in panel}) == 13
    assert all(entry.source for entry in panel)
    gaps = {entry.vlm: (entry.b_gap, entry.margin) for entry in panel if entry.b_gap is not None}
    assert len(gaps) == 7
    # G - B is the difference of the printed medians, up to rounding.
    for entry in panel:
        if entry.margin is not None and entry.b_gap is not None:
            assert entry.margin == pytest.approx(entry.sink_strength - entry.b_gap, abs=0.0151)


def test_counts_of_prompts_are_those_of_ifeval() -> None:
    text = (resources.files("mergelab.report") / "data" / "buckets.csv").read_text("utf-8")
    rows = list(csv.DictReader(text.splitlines()))
    assert [sum(int(row[name]) for name in ("both_pass", "lost", "gained", "both_fail")) for row in rows] == [541] * 6


def test_rank_correlation_against_ranks_by_hand() -> None:
    strength = np.array([5.5, 5.5, 2.5, 2.5, 4.0, 1.0])  # 2.36 twice, 1.18 twice, 1.44, 0.24
    loss = np.array([5.0, 6.0, 2.0, 3.0, 4.0, 1.0])  # -5.4, -1.8, -9.6, -8.9, -7.9, -18.7
    by_hand = float(np.corrcoef(strength, loss)[0, 1])
    found = next(check for check in verify() if check.quantity == "spearman, 6 pairs, sink_strength ifeval")
    assert found.recomputed == pytest.approx(by_hand)


def test_nearest_bfloat16_probability_is_torchs() -> None:
    for strength in (-6.0, -0.21, -0.19, 0.0, 0.24, 0.9, 1.18, 2.36, 5.5):
        rounded = float(torch.tensor(1 / (1 + math.exp(-strength)), dtype=torch.float64).to(torch.bfloat16))
        assert bfloat16_logit(strength) == pytest.approx(math.log(rounded / (1 - rounded)), abs=1e-12)
    assert bfloat16_logit(9.0) == math.inf
