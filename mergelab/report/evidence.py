"""Recomputes what the paper says about its panels from the panel's own table.

``data/published.csv`` holds the printed figures, ``data/buckets.csv`` the counts of IFEval prompts that pass
before and after. Nothing here needs a model.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources

import numpy as np
from scipy import stats

from mergelab.report.panel import IFEVAL, Entry, load_panel, subset
from mergelab.report.prediction import FloatArray, leave_out

UNROUNDED_TOLERANCE = 0.07
"""For leave-one-out figures: the paper computed them before it rounded S to 0.01 and differences to 0.1, which moves
them by some hundredths. Everything else must agree to the last printed digit."""

WITHOUT = "Molmo2-O-7B"


@dataclass(frozen=True)
class Check:
    """One printed figure beside the one that its own table gives."""

    quantity: str
    paper: float
    recomputed: float
    tolerance: float
    """Largest difference that rounding explains."""

    @property
    def ok(self) -> bool:
        """Whether the two agree."""
        return abs(self.paper - self.recomputed) <= self.tolerance + 1e-9

    def record(self) -> dict[str, object]:
        """Return the check as JSON-able values."""
        return {
            "quantity": self.quantity,
            "paper": self.paper,
            "recomputed": self.recomputed,
            "ok": self.ok,
            "tolerance": self.tolerance,
        }


def verify(panel: Sequence[Entry] | None = None) -> list[Check]:
    """Recompute every printed figure.

    Rank correlations use average ranks; leave-one-out lines leave one pair out, as the paper does.

    Args:
        panel: Rows to compute from; None for the shipped table.

    Returns:
        Correlations, means, leave-one-out errors and predictions, IFEval differences from the counts of prompts, and
        for every different S the logit of the nearest bfloat16 probability, which it must equal to two decimals.
    """
    entries = load_panel() if panel is None else tuple(panel)
    return [*_published(entries), *_buckets(entries), *_grid(entries)]


def bfloat16_logit(strength: float) -> float:
    """Return ln(p / (1 - p)) of the bfloat16 number p in (2^-126, 1) that is nearest to sigmoid(strength).

    **Source**: bfloat16 has 8 significant bits, so p in [2^e, 2^(e+1)) moves in steps of 2^(e-7).

    **Deviations**: none.
    """
    probability = 1 / (1 + math.exp(-strength))
    step = 2.0 ** (math.floor(math.log2(probability)) - 7)
    rounded = round(probability / step) * step
    return math.inf if rounded >= 1 else math.log(rounded / (1 - rounded))


def _published(entries: Sequence[Entry]) -> Iterator[Check]:
    for row in _read("published.csv"):
        chosen = subset(entries, int(row["panel"]))
        words = row["of"].split()
        tolerance = UNROUNDED_TOLERANCE if row["statistic"].startswith("leave-one-out") else _half_digit(row["paper"])
        yield Check(
            quantity=f"{row['statistic']}, {row['panel']} pairs, {' '.join(words)}",
            paper=float(row["paper"]),
            recomputed=_compute(row["statistic"], chosen, words),
            tolerance=tolerance,
        )


def _compute(statistic: str, entries: Sequence[Entry], words: Sequence[str]) -> float:
    if statistic == "spearman":
        return float(stats.spearmanr(_column(entries, words[0]), _column(entries, words[1])).statistic)
    deltas = _column(entries, words[0])
    if statistic == "mean":
        return float(deltas.mean())
    if statistic == "leave-one-out error of the mean":
        others = (deltas.sum() - deltas) / (len(deltas) - 1)
        return float(np.abs(others - deltas).mean())
    if statistic == "leave-one-out error without Molmo2-O":
        entries = [entry for entry in entries if entry.vlm != WITHOUT]
        deltas = _column(entries, words[0])
    predictions = leave_out(_column(entries, "sink_strength"), deltas, range(len(entries)))
    if statistic == "leave-one-out prediction":
        return float(predictions[[entry.vlm for entry in entries].index(words[1])])
    return float(np.abs(predictions - deltas).mean())


def _buckets(entries: Sequence[Entry]) -> Iterator[Check]:
    deltas = {entry.vlm: entry.deltas[IFEVAL] for entry in entries}
    for row in _read("buckets.csv"):
        counts = {name: int(row[name]) for name in ("both_pass", "lost", "gained", "both_fail")}
        yield Check(
            quantity=f"IFEval difference from counts of prompts, {row['vlm']}",
            paper=deltas[row["vlm"]],
            recomputed=100 * (counts["gained"] - counts["lost"]) / sum(counts.values()),
            tolerance=0.05,
        )


def _grid(entries: Sequence[Entry]) -> Iterator[Check]:
    for strength in sorted({entry.sink_strength for entry in entries}, reverse=True):
        bases = dict.fromkeys(entry.base for entry in entries if entry.sink_strength == strength)
        yield Check(
            quantity=f"S is the logit of a bfloat16 probability, {', '.join(bases)}",
            paper=strength,
            recomputed=bfloat16_logit(strength),
            tolerance=0.005,
        )


def _column(entries: Sequence[Entry], name: str) -> FloatArray:
    if name in ("sink_strength", "margin"):
        return np.array([getattr(entry, name) for entry in entries], dtype=float)
    return np.array([entry.deltas[name] for entry in entries])


def _half_digit(printed: str) -> float:
    return 0.5 * 10.0 ** -len(printed.partition(".")[2])


def _read(name: str) -> list[dict[str, str]]:
    text = (resources.files("mergelab.report") / "data" / name).read_text("utf-8")
    return list(csv.DictReader(text.splitlines()))
