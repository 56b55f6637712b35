"""The line and its interval against slow loops, and what is said outside the panel."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mergelab.report.panel import Entry, load_panel
from mergelab.report.prediction import fit_line, leave_out, predict


def entry(base: str, strength: float, delta: float) -> Entry:
    return Entry(vlm=f"vlm of {base}", base=base, sink_strength=strength, deltas={"ifeval": delta}, source="here")


def slow_interval(panel: list[Entry], strength: float) -> tuple[float, float, float]:
    slope, intercept = np.polyfit([e.sink_strength for e in panel], [e.deltas["ifeval"] for e in panel], 1)
    worst = []
    for base in {e.base for e in panel}:
        rest = [e for e in panel if e.base != base]
        line = np.polyfit([e.sink_strength for e in rest], [e.deltas["ifeval"] for e in rest], 1)
        own = [abs(e.deltas["ifeval"] - np.polyval(line, e.sink_strength)) for e in panel if e.base == base]
        worst.append(max(own))
    radius = sorted(worst)[min(len(worst), math.ceil((len(worst) + 1) * 0.9)) - 1]
    centre = intercept + slope * strength
    return centre, centre - radius, centre + radius


@pytest.mark.parametrize("strength", [2.36, 1.0, -0.2])
def test_prediction_equals_a_slow_loop_over_bases(strength: float) -> None:
    panel = list(load_panel())
    found = predict(panel, strength)
    assert (found.delta, found.low, found.high) == pytest.approx(slow_interval(panel, strength))
    assert (found.num_pairs, found.num_bases, found.num_distinct) == (17, 13, 12)
    assert found.level == pytest.approx(13 / 14)
    assert not found.is_extrapolation


def test_more_bases_than_the_level_needs_drop_the_largest_residual() -> None:
    generator = np.random.default_rng(0)
    panel = [entry(f"b{i}", i / 10, float(value)) for i, value in enumerate(generator.normal(size=39))]
    found = predict(panel, 1.0)
    assert (found.delta, found.low, found.high) == pytest.approx(slow_interval(panel, 1.0))
    assert found.level == 0.9


def test_interval_leaves_out_all_pairs_of_a_base() -> None:
    twins = [entry("d", 3, 30), entry("d", 3, 31)]
    panel = [entry("a", 0, 0), entry("b", 1, 1), entry("c", 2, 2), *twins]
    found = predict(panel, 1.5)
    assert (found.delta, found.low, found.high) == pytest.approx(slow_interval(panel, 1.5))
    assert found.high - found.delta == pytest.approx(28), "31 where the others' line says 3"


def test_pairs_of_one_base_are_left_out_together() -> None:
    panel = [entry("a", 0, 0), entry("b", 1, 1), entry("c", 2, 2), entry("d", 3, 30), entry("d", 3, 31)]
    strengths, deltas = (
        np.array([getattr_(e) for e in panel])
        for getattr_ in (lambda e: float(e.sink_strength), lambda e: float(e.deltas["ifeval"]))
    )
    together = leave_out(strengths, deltas, [e.base for e in panel])
    assert together[3:] == pytest.approx([3, 3])
    alone = leave_out(strengths, deltas, range(5))
    assert alone[3] > 10, "the twin of the same base gives the answer away"


@pytest.mark.parametrize(("strength", "outside"), [(2.36, False), (2.37, True), (-0.21, False), (-0.3, True)])
def test_extrapolation_is_flagged(strength: float, outside: bool) -> None:
    assert predict(load_panel(), strength).is_extrapolation is outside


def test_place_on_the_panel() -> None:
    found = predict(load_panel(), 1.2)
    assert found.rank == 10
    assert found.nearest == ("Qwen2.5-VL-7B-Instruct", "InternVL3-8B", "Ovis2-8B")


def test_exact_line() -> None:
    slope, intercept = fit_line(np.array([0.0, 1.0, 3.0]), np.array([-2.0, 0.0, 4.0]))
    assert (slope, intercept) == pytest.approx((2.0, -2.0))


def test_what_determines_no_line_is_refused() -> None:
    with pytest.raises(ValueError, match="all Sink Strengths are equal"):
        predict([entry("a", 1, 0), entry("b", 1, 2)], 1.0)
    with pytest.raises(ValueError, match="finite"):
        predict(load_panel(), math.inf)
