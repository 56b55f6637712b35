"""Statistics of paired answers: intervals, exact McNemar, smallest detectable effect, recovery ratio, Holm.

Two models answer the same documents; every quantity is about the difference per document. Scores come in as
fractions in [0, 1], differences go out in points (0 to 100). What the numbers mean is decided in
``verdicts``; which documents are compared is decided in ``pairing``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, stats

from mergelab.report.verdicts import Interval

WALD_MIN_DOCUMENTS = 500
"""Up to this many 0/1 documents a score interval is used; Wald undercovers there."""
FEW_DIFFERENT = 30
"""With fewer documents on which the answers differ, no normal theory is trusted, whatever n is."""

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class _Sample:
    """Differences per document and how much information they carry."""

    differences: FloatArray
    variance: float
    """Of the mean difference; clustering may only widen it."""
    design_effect: float
    """That variance over the one of independent documents, at least 1."""
    quantile: float
    """Two-sided normal or t quantile."""
    is_binary: bool

    @property
    def size(self) -> float:
        """Number of independent documents that carry the same information."""
        return len(self.differences) / self.design_effect

    @property
    def num_different(self) -> float:
        """Documents with a difference, on the scale of ``size``."""
        return float(np.count_nonzero(self.differences)) / self.design_effect

    @property
    def is_normal(self) -> bool:
        """Whether the mean difference may be treated as normal (or t)."""
        enough = WALD_MIN_DOCUMENTS if self.is_binary else FEW_DIFFERENT
        return self.size > enough and self.num_different >= FEW_DIFFERENT and self.variance > 1e-15


def paired_interval(
    first: ArrayLike, second: ArrayLike, alpha: float, clusters: Sequence[Hashable] | None = None
) -> Interval:
    """Difference of two models on the same documents, with its two-sided 1 - alpha interval.

    The estimate is mean(d), with d = first - second per document. Three cases for its interval:

    - 0/1 scores, n > 500, at least 30 documents on which the answers differ: Wald on pairs,
      mean(d) +- z sqrt((mean(d^2) - mean(d)^2) / n).
    - Fractional scores with at least 30 differing documents: paired t, n - 1 degrees of freedom.
    - Otherwise the score interval of Tango, on the sums of the positive and of the negative differences.
      For fractional scores it is conservative: a difference within [-1, 1] varies at most as much as a
      0/1/-1 one of the same mean. With no difference at all it is +- z^2 / (n + z^2): equal answers on n
      documents never become certainty about all documents.

    With ``clusters`` (None inside: a cluster of its own) the variance is the cluster-robust one,
    G/(G-1) sum_g (sum_{i in g} (d_i - mean d))^2 / n^2, but never below the independent one, the quantile
    is t with G - 1 degrees of freedom, and Tango works on counts divided by the design effect (variance
    over independent variance). All sizes above are then n over the design effect. Where no document
    differs the design effect is unknown and taken at its
    largest for the given clusters, sum m_g^2 / n: whole clusters move together.

    Args:
        first: Scores of the first model, shape (n,), in [0, 1].
        second: Scores of the second model on the same documents, shape (n,), in [0, 1].
        alpha: Two-sided error, in (0, 1).
        clusters: Cluster of each document, length n; None for independent documents.

    Returns:
        Interval in points, inside [-100, 100].

    Raises:
        ValueError: unequal lengths, no document, a score outside [0, 1] or alpha outside (0, 1).

    Source: Tango 1998 (Statistics in Medicine 17: 891-908) for the score interval; Miller 2024
        (2411.00640) for paired and clustered standard errors.

    Deviations: the cluster-robust variance is floored at the independent one, and Tango is used at every n
        when fewer than 30 documents differ, since Wald is too narrow there and has width zero at none.
    """
    sample = _sample(first, second, alpha, clusters)
    estimate = float(sample.differences.mean())
    if sample.is_normal:
        half = sample.quantile * math.sqrt(sample.variance)
        low, high = max(estimate - half, -1.0), min(estimate + half, 1.0)
    else:
        gains = float(np.clip(sample.differences, 0, None).sum()) / sample.design_effect
        losses = float(np.clip(-sample.differences, 0, None).sum()) / sample.design_effect
        low, high = _tango(gains, losses, sample.size, sample.quantile)
    return Interval(100 * estimate, 100 * low, 100 * high)


def mcnemar_exact(first_only: int, second_only: int) -> float:
    """Two-sided p of the exact McNemar test: is a discordant document equally likely to favour either model?

    p = binomial test of ``first_only`` successes in ``first_only + second_only`` at 1/2. With no
    discordant document p is 1. Clusters are not taken into account.

    Args:
        first_only: Documents that only the first model solves.
        second_only: Documents that only the second model solves.

    Returns:
        p in (0, 1].

    Raises:
        ValueError: a negative count.

    Source: McNemar 1947, exact form.

    Deviations: none (not the mid-p form).
    """
    if first_only < 0 or second_only < 0:
        raise ValueError(f"counts of discordant documents must not be negative, found {first_only}, {second_only}")
    if first_only + second_only == 0:
        return 1.0
    return float(stats.binomtest(first_only, first_only + second_only, 0.5).pvalue)


def paired_p_value(first: ArrayLike, second: ArrayLike, clusters: Sequence[Hashable] | None = None) -> float:
    """Two-sided p of no difference between two models on the same documents.

    - 0/1 scores: ``mcnemar_exact``, which ignores clusters.
    - Fractional scores, at least 30 documents on which they differ: paired t of the mean difference, n - 1 degrees of
      freedom, or with ``clusters`` the variance of ``paired_interval`` and one less than the number of clusters.
    - Fewer: the exact sign test, the McNemar of who is better on a document, by however much.

    Arguments as in ``paired_interval``.

    Returns:
        p in [0, 1].

    Raises:
        ValueError: as ``paired_interval``.

    Source: the paired t test; Dixon and Mood 1946 (JASA 41: 557-566) for the sign test.

    Deviations: none.
    """
    sample = _sample(first, second, 0.05, clusters)
    if not sample.is_binary and sample.is_normal:
        groups = _group_numbers(clusters, len(sample.differences))
        freedom = len(sample.differences) - 1 if groups is None else int(groups.max())
        return float(2 * stats.t.sf(abs(sample.differences.mean()) / math.sqrt(sample.variance), freedom))
    return mcnemar_exact(int((sample.differences > 0).sum()), int((sample.differences < 0).sum()))


def minimum_detectable_effect(discordance: float, size: float, alpha: float = 0.05, power: float = 0.8) -> float:
    """Smallest true difference, in points, that a paired comparison of this size finds with the given power.

    MDE = 100 (z_{1 - alpha/2} + z_{power}) sqrt(discordance / size). A discordance below the bound that
    ``size`` documents can show, -ln(alpha) / size (the rule of three), is raised to it, so that no
    observed difference is not read as infinite precision.

    Args:
        discordance: Share of documents on which the models differ (mean squared difference), in [0, 1].
        size: Number of independent documents (n over the design effect), > 0.
        alpha: Two-sided error.
        power: Wanted probability to find the effect.

    Returns:
        Points, at most 100.

    Raises:
        ValueError: discordance outside [0, 1] or size not positive.

    Source: Miller 2024 (2411.00640), the paired case with one answer a document.

    Deviations: discordance stands for the variance of the difference (no true difference), and has a floor.
    """
    if not 0 <= discordance <= 1 or not size > 0:
        raise ValueError(f"need a discordance in [0, 1] and a size > 0, found {discordance} and {size}")
    share = min(max(discordance, -math.log(alpha) / size), 1.0)
    quantiles = stats.norm.ppf(1 - alpha / 2) + stats.norm.ppf(power)
    return min(float(100 * quantiles * math.sqrt(share / size)), 100.0)


def paired_mde(first: ArrayLike, second: ArrayLike, alpha: float, clusters: Sequence[Hashable] | None = None) -> float:
    """``minimum_detectable_effect`` of two models on the same documents.

    Its discordance is mean(d^2), its size n over the design effect. Arguments as in ``paired_interval``.
    """
    sample = _sample(first, second, alpha, clusters)
    return minimum_detectable_effect(float(np.mean(sample.differences**2)), sample.size, alpha)


def recovery_interval(
    merge: ArrayLike,
    base: ArrayLike,
    vlm: ArrayLike,
    alpha: float,
    clusters: Sequence[Hashable] | None = None,
) -> Interval | None:
    """Recovery ratio R = mean(merge - vlm) / mean(base - vlm) with its Fieller interval.

    The interval holds every r for which mean(m - r g) does not differ from 0 at ``alpha``, with m = merge
    - vlm and g = base - vlm per document and the covariances of the pairs (cluster-robust with
    ``clusters``). 0 is the vlm, 1 the base. Where merge and base (or merge and vlm) differ on fewer than
    30 documents, it is widened to what ``paired_interval`` leaves open about that difference, so that
    equal answers are no certainty here either.

    Args:
        merge: Scores of the merge, shape (n,), in [0, 1].
        base: Scores of the base on the same documents.
        vlm: Scores of the vlm on the same documents.
        alpha: Two-sided error.
        clusters: Cluster of each document; None for independent documents.

    Returns:
        Interval of the ratio (not points), or None when the gap base - vlm is not above 0 at ``alpha``:
        then no ratio means anything.

    Raises:
        ValueError: as ``paired_interval``.

    Source: Fieller 1954, for paired samples.

    Deviations: covariances are not floored at the independent ones; the widening for few differences is
        ours.
    """
    gap = paired_interval(base, vlm, alpha, clusters)
    moved, gained = _sample(merge, vlm, alpha, clusters), _sample(base, vlm, alpha, clusters)
    m, g = float(moved.differences.mean()), float(gained.differences.mean())
    groups = _group_numbers(clusters, len(moved.differences))
    var_m = _covariance(moved.differences, moved.differences, groups)
    var_g = _covariance(gained.differences, gained.differences, groups)
    cov = _covariance(moved.differences, gained.differences, groups)
    square = gained.quantile**2
    # r is inside when (m - r g)^2 <= q^2 (var_m - 2 r cov + r^2 var_g): a parabola in r, bounded when a >
    # 0.
    a, b, c = g**2 - square * var_g, m * g - square * cov, m**2 - square * var_m
    if gap.low <= 0 or a <= 0:
        return None
    root = math.sqrt(max(b**2 - a * c, 0.0))
    low, high = (b - root) / a, (b + root) / a
    loss = _sample(base, merge, alpha, clusters)
    if loss.num_different < FEW_DIFFERENT:
        left = paired_interval(base, merge, alpha, clusters)
        low, high = min(low, 1 - left.high / gap.estimate), max(high, 1 - left.low / gap.estimate)
    if moved.num_different < FEW_DIFFERENT:
        left = paired_interval(merge, vlm, alpha, clusters)
        low, high = min(low, left.low / gap.estimate), max(high, left.high / gap.estimate)
    return Interval(m / g, low, high)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p values, in the order given: reject where they are at most alpha.

    With p sorted upwards, adjusted_i = max over j <= i of min(1, (n - j) p_j), j counted from 0. An empty
    family gives an empty list.

    Raises:
        ValueError: a value outside [0, 1].

    Source: Holm 1979 (Scandinavian Journal of Statistics 6: 65-70).

    Deviations: none.
    """
    if not all(0 <= p <= 1 for p in p_values):
        raise ValueError(f"p values must lie in [0, 1], found {list(p_values)}")
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda position: p_values[position])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def _sample(first: ArrayLike, second: ArrayLike, alpha: float, clusters: Sequence[Hashable] | None) -> _Sample:
    scores = [np.asarray(values, dtype=np.float64) for values in (first, second)]
    n = len(scores[0])
    if scores[0].shape != (n,) or scores[1].shape != (n,) or n == 0:
        raise ValueError(f"need two equally long lists of scores, found shapes {[s.shape for s in scores]}")
    if not all(bool(((values >= 0) & (values <= 1)).all()) for values in scores):
        raise ValueError("scores must lie in [0, 1]")
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must lie in (0, 1), found {alpha}")
    differences = scores[0] - scores[1]
    is_binary = all(bool(np.isin(values, (0.0, 1.0)).all()) for values in scores)
    independent = float(differences.var()) / n
    groups = _group_numbers(clusters, n)
    if groups is None:
        normal = is_binary or n == 1
        quantile = float(stats.norm.ppf(1 - alpha / 2) if normal else stats.t.ppf(1 - alpha / 2, n - 1))
        variance = independent if is_binary or n == 1 else independent * n / (n - 1)
        return _Sample(differences, variance, 1.0, quantile, is_binary)
    sizes = np.bincount(groups)
    # With a single cluster nothing is known about others: one observation and the widest t quantile there
    # is.
    quantile = float(stats.t.ppf(1 - alpha / 2, max(len(sizes) - 1, 1)))
    largest = float((sizes.astype(np.float64) ** 2).sum()) / n
    if independent == 0 or len(sizes) == 1:
        return _Sample(differences, 0.0, largest, quantile, is_binary)
    variance = max(_covariance(differences, differences, groups), independent)
    return _Sample(differences, variance, variance / independent, quantile, is_binary)


def _group_numbers(clusters: Sequence[Hashable] | None, n: int) -> NDArray[np.int64] | None:
    """Number the clusters; None when every document stands alone."""
    if clusters is None:
        return None
    if len(clusters) != n:
        raise ValueError(f"need a cluster for each of {n} documents, found {len(clusters)}")
    numbers: dict[Any, int] = {}
    groups = [
        numbers.setdefault((index,) if cluster is None else (cluster, "cluster"), len(numbers))
        for index, cluster in enumerate(clusters)
    ]
    return None if len(numbers) == n else np.array(groups, dtype=np.int64)


def _covariance(x: FloatArray, y: FloatArray, groups: NDArray[np.int64] | None) -> float:
    """Covariance of the means of x and y over documents, cluster-robust when groups are given."""
    n = len(x)
    dx, dy = x - x.mean(), y - y.mean()
    if groups is None:
        return float(dx @ dy) / n / max(n - 1, 1)
    num_groups = int(groups.max()) + 1
    sums_x, sums_y = np.bincount(groups, weights=dx), np.bincount(groups, weights=dy)
    return float(sums_x @ sums_y) * num_groups / max(num_groups - 1, 1) / n**2


def _tango(gains: float, losses: float, n: float, quantile: float) -> tuple[float, float]:
    """Score interval of Tango for (gains - losses) / n; counts may be fractional."""

    def excess(delta: float) -> float:
        """(Squared score - quantile^2) times the variance: negative inside the interval."""
        b = -gains - losses + (2 * n - gains + losses) * delta
        c = -losses * delta * (1 - delta)
        # Constrained maximum-likelihood share of the pairs that only the second model solves.
        share = (math.sqrt(max(b * b - 8 * n * c, 0.0)) - b) / (4 * n)
        variance = n * (2 * share + delta * (1 - delta))
        return float((gains - losses - n * delta) ** 2 - quantile**2 * max(variance, 0.0))

    estimate = (gains - losses) / n
    return _crossing(excess, estimate, -1.0), _crossing(excess, estimate, 1.0)


def _crossing(excess: Callable[[float], float], estimate: float, end: float) -> float:
    """Where ``excess`` turns positive between the estimate and the end of the scale."""
    # At the estimate itself the excess can be 0 (no discordant pair), which is not the crossing looked for.
    start = estimate + math.copysign(1e-10, end)
    if abs(start) >= 1 or excess(end) <= 0 or excess(start) >= 0:
        return end if abs(start) >= 1 or excess(end) <= 0 else estimate
    return float(optimize.brentq(excess, start, end, xtol=1e-12))
