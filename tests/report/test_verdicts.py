from __future__ import annotations

import pytest

from mergelab.report import verdicts
from mergelab.report.verdicts import Interval, overall_verdict, text_verdict, vision_verdict

GAP = (20, 30)


def interval(bounds):
    low, high = bounds
    return Interval((low + high) / 2, low, high)


@pytest.mark.parametrize(
    ("gap", "loss", "moved", "verdict"),
    [
        pytest.param(GAP, (-1, 1.9), (20, 28), "restored", id="non-inferior and above the vlm"),
        pytest.param(GAP, (5, 9), (15, 20), "partly restored", id="not restored, above the vlm"),
        pytest.param(GAP, (25, 35), (-9, -3), "harms", id="not restored, below the vlm"),
        pytest.param(GAP, (20, 30), (-4, 4), "fails to restore", id="not restored, like the vlm"),
        pytest.param(GAP, (-1, 5), (15, 25), "inconclusive", id="loss straddles the margin"),
        pytest.param(GAP, (-1, 1), (-2, 2), "inconclusive", id="non-inferior, yet not above the vlm"),
        pytest.param(GAP, (-1, 1), (-5, -2), "inconclusive", id="non-inferior, yet below the vlm"),
        pytest.param((-1, 5), (-1, 1), (1, 5), "inconclusive", id="gap unresolved, merge non-inferior"),
        pytest.param((-1, 5), (20, 30), (-30, -15), "inconclusive", id="gap unresolved, merge far below"),
        pytest.param((-1, 1.9), (-1, 1), (1, 2), "no gap", id="vlm as good"),
        pytest.param((-30, -20), (-30, -20), (-2, 2), "no gap", id="vlm better"),
        pytest.param((-1, 1), (20, 30), (-30, -20), "no gap", id="no gap names nothing else"),
        # A bound on the margin or on zero decides nothing.
        pytest.param((0, 2), (-1, 1), (1, 2), "inconclusive", id="gap upper bound on the margin"),
        pytest.param((2, 9), (-1, 1), (1, 9), "inconclusive", id="gap lower bound on the margin"),
        pytest.param((2.001, 9), (-1, 1), (1, 9), "restored", id="gap lower bound just above"),
        pytest.param(GAP, (-1, 2), (15, 25), "inconclusive", id="loss upper bound on the margin"),
        pytest.param(GAP, (-1, 1.999), (15, 25), "restored", id="loss upper bound just below"),
        pytest.param(GAP, (2, 9), (15, 25), "inconclusive", id="loss lower bound on the margin"),
        pytest.param(GAP, (2.001, 9), (15, 25), "partly restored", id="loss lower bound just above"),
        pytest.param(GAP, (-1, 1), (0, 25), "inconclusive", id="moved lower bound on zero, non-inferior"),
        pytest.param(GAP, (5, 9), (0, 25), "fails to restore", id="moved lower bound on zero, not restored"),
        pytest.param(GAP, (5, 9), (-9, 0), "fails to restore", id="moved upper bound on zero"),
    ],
)
def test_text_verdict_follows_the_table(gap, loss, moved, verdict):
    assert text_verdict(interval(gap), interval(loss), interval(moved), margin=2) == verdict


@pytest.mark.parametrize(
    ("loss", "verdict"),
    [
        ((-1, 1.9), "retained"),
        ((-9, -3), "retained"),
        ((2.1, 8), "lost"),
        ((-1, 8), "inconclusive"),
        ((-1, 2), "inconclusive"),
        ((2, 8), "inconclusive"),
    ],
)
def test_vision_verdict_follows_the_table(loss, verdict):
    assert vision_verdict(interval(loss), margin=2) == verdict


@pytest.mark.parametrize(
    ("text", "vision", "overall"),
    [
        (["restored"], ["retained"], "restored"),
        (["restored", "restored"], ["retained", "retained"], "restored"),
        (["restored", "no gap"], ["retained"], "restored"),
        (["restored"], [], "restored (text only)"),
        (["restored"], ["lost"], "restored, pictures lost"),
        (["restored"], ["retained", "lost"], "restored, pictures lost"),
        (["restored"], ["inconclusive"], "inconclusive"),
        (["restored", "inconclusive"], ["retained"], "inconclusive"),
        (["restored", "partly restored"], ["retained"], "partly restored"),
        (["restored", "fails to restore", "inconclusive"], ["retained"], "fails to restore"),
        (["harms", "restored"], ["lost"], "harms, pictures lost"),
        (["no gap"], ["retained"], "no gap"),
        (["no gap"], ["lost"], "no gap, pictures lost"),
        ([], ["retained"], "retained"),
        ([], [], ""),
    ],
)
def test_overall_restores_only_with_text_restored_and_pictures_retained(text, vision, overall):
    assert overall_verdict(text, vision) == overall


def test_every_verdict_has_a_sentence():
    assert set(verdicts.SENTENCES) == {*verdicts.TEXT_VERDICTS, *verdicts.VISION_VERDICTS}
    assert all(sentence.endswith(".") for sentence in verdicts.SENTENCES.values())


def test_rounded_interval_has_no_negative_zero():
    assert str(Interval(-0.0001, -0.0, 1.23456).rounded(3)) == str(Interval(0.0, 0.0, 1.235))
    assert str(Interval(0.0, 0.0, 1.0).negated()) == str(Interval(0.0, -1.0, 0.0))
