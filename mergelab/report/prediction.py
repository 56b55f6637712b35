"""Where a Sink Strength falls on the panel, and the loss a straight line through the panel expects there."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mergelab.report.panel import IFEVAL, Entry

LEVEL = 0.9
"""Aimed level of the interval. With n bases at most n / (n + 1) can be reached."""

FloatArray = NDArray[np.float64]


def fit_line(strengths: FloatArray, deltas: FloatArray) -> tuple[float, float]:
    """Return (slope, intercept) of the least-squares line through the points.

    Args:
        strengths: (n,) with two different values or more.
        deltas: (n,).

    Raises:
        ValueError: All strengths are equal: no line is determined.
    """
    centred = strengths - strengths.mean()
    spread = float(centred @ centred)
    if spread == 0:
        raise ValueError("all Sink Strengths are equal, so no line is determined")
    slope = float(centred @ deltas) / spread
    return slope, float(deltas.mean() - slope * strengths.mean())


def leave_out(strengths: FloatArray, deltas: FloatArray, groups: Sequence[object]) -> FloatArray:
    """Predict each delta by a line fitted without any point of its group.

    Args:
        strengths: (n,).
        deltas: (n,).
        groups: n labels; all different leaves one point out at a time.

    Returns:
        (n,) predictions.

    Raises:
        ValueError: Without some group the strengths are all equal.
    """
    predictions = np.empty_like(deltas)
    for group in dict.fromkeys(groups):
        inside = np.array([other == group for other in groups])
        slope, intercept = fit_line(strengths[~inside], deltas[~inside])
        predictions[inside] = intercept + slope * strengths[inside]
    return predictions


@dataclass(frozen=True)
class Prediction:
    """The expected IFEval difference (vlm minus base, points) of a VLM made from a model with this S."""

    sink_strength: float
    delta: float
    low: float
    high: float
    level: float
    """Nominal: the share of exchangeable bases that the interval covers. Published bases are no random sample."""
    num_pairs: int
    num_bases: int
    num_distinct: int
    """Different S among the pairs."""
    is_extrapolation: bool
    """S lies outside the panel's range."""
    rank: int
    """How many pairs of the panel have a larger S."""
    nearest: tuple[str, ...]
    """The panel's vlms whose base has the nearest S."""


def predict(panel: Sequence[Entry], sink_strength: float) -> Prediction:
    """Predict the IFEval loss at a Sink Strength from the straight line through a panel.

        delta(S) = intercept + slope * S,   interval = delta(S) -+ r

    r is an order statistic of leave-one-base-out residuals: every base is left out with all its pairs, its
    pairs are predicted from the others, and the largest absolute residual stands for the base. Of n such
    residuals the ceil((n + 1) * 0.9)-th smallest is taken, at most the largest.

    Args:
        panel: Pairs with an IFEval difference, of two bases or more.
        sink_strength: S in nats, finite.

    Returns:
        The prediction; ``delta`` may lie above 0, where no loss is expected.

    Raises:
        ValueError: S is not finite, or the panel determines no line without one of its bases.

    **Source**: line on S as in arXiv 2609.00746; interval after split-conformal prediction (Vovk et al.; Lei et
    al. 2018) with bases as the exchangeable units.

    **Deviations**: the paper leaves out one pair at a time; pairs of one base share their S and are not
    independent. Residuals come from leave-one-out fits (as in the jackknife+), so the level is nominal.
    """
    if not math.isfinite(sink_strength):
        raise ValueError(f"Sink Strength is {sink_strength}, expected a finite number")
    used = [entry for entry in panel if IFEVAL in entry.deltas]
    strengths = np.array([entry.sink_strength for entry in used])
    deltas = np.array([entry.deltas[IFEVAL] for entry in used])
    bases = [entry.base for entry in used]
    slope, intercept = fit_line(strengths, deltas)
    residuals = np.abs(deltas - leave_out(strengths, deltas, bases))
    largest = sorted(float(residuals[[other == base for other in bases]].max()) for base in dict.fromkeys(bases))
    count = len(largest)
    position = min(count, math.ceil((count + 1) * LEVEL))
    delta = intercept + slope * sink_strength
    distances = np.abs(strengths - sink_strength)
    return Prediction(
        sink_strength=sink_strength,
        delta=delta,
        low=delta - largest[position - 1],
        high=delta + largest[position - 1],
        level=position / (count + 1),
        num_pairs=len(used),
        num_bases=count,
        num_distinct=len(set(strengths.tolist())),
        is_extrapolation=not float(strengths.min()) <= sink_strength <= float(strengths.max()),
        rank=int((strengths > sink_strength).sum()),
        nearest=tuple(entry.vlm for entry, near in zip(used, distances == distances.min(), strict=True) if near),
    )
