from __future__ import annotations

import numpy as np
import pytest
import statsmodels.api as sm
from scipy import optimize, stats
from statsmodels.stats.contingency_tables import mcnemar
from statsmodels.stats.multitest import multipletests

from mergelab.report.statistics import (
    holm,
    mcnemar_exact,
    minimum_detectable_effect,
    paired_interval,
    paired_mde,
    paired_p_value,
    recovery_interval,
)


def pairs(gains, losses, both, neither=0):
    first = np.r_[np.ones(gains), np.zeros(losses), np.ones(both), np.zeros(neither)]
    second = np.r_[np.zeros(gains), np.ones(losses), np.ones(both), np.zeros(neither)]
    return first, second


def bounds(interval):
    return interval.low, interval.high


# Exact McNemar


@pytest.mark.parametrize(
    ("first_only", "second_only", "p"),
    [
        (13, 4, 0.049),
        (14, 5, 0.064),
        (32, 23, 0.28),
        (35, 19, 0.040),
        (49, 33, 0.097),
        (48, 32, 0.093),
        (107, 56, 8e-5),
        (56, 27, 0.0019),
        (43, 33, 0.30),
        (91, 39, 5.9e-6),
        (96, 48, 7.8e-5),
        (83, 40, 1.3e-4),
        (126, 25, 2.0e-17),
    ],
)
def test_mcnemar_gives_the_pinned_values_of_the_published_tables(first_only, second_only, p):
    digits = len(f"{p:g}".replace("e", ".").split(".")[1]) if p > 1e-3 else None
    found = mcnemar_exact(first_only, second_only)
    assert found == pytest.approx(p, abs=0.5 * 10**-digits if digits else 0.06 * p)


@pytest.mark.parametrize(("b", "c"), [(0, 0), (0, 1), (5, 0), (12, 12), (40, 17)])
def test_mcnemar_equals_statsmodels(b, c):
    if b + c == 0:
        assert mcnemar_exact(b, c) == 1.0
    else:
        assert mcnemar_exact(b, c) == pytest.approx(mcnemar([[7, b], [c, 9]], exact=True).pvalue, rel=1e-12)


def test_mcnemar_refuses_negative_counts():
    with pytest.raises(ValueError, match="-1"):
        mcnemar_exact(-1, 2)


# Intervals


def test_wald_interval_gives_the_published_gap():
    interval = paired_interval(*pairs(43, 33, 400, 65), alpha=0.05)
    assert interval.estimate == pytest.approx(1.85, abs=0.005)
    assert bounds(interval) == pytest.approx((-1.31, 5.00), abs=0.005)


def test_tango_interval_gives_the_published_example():
    # Airway hyper-responsiveness before and after transplantation, n = 21: the usual textbook example.
    interval = paired_interval(*pairs(1, 7, 1, 12), alpha=0.05)
    assert bounds(interval) == pytest.approx((-51.7, -2.6), abs=0.05)


def likelihood_score(gains, losses, n, delta):
    """The score statistic the slow way: the constrained likelihood is maximised by search."""
    low, high = max(0.0, -delta), (1 - delta) / 2

    def minus_log_likelihood(second_only):
        first_only, same = second_only + delta, 1 - 2 * second_only - delta
        counts = ((gains, first_only), (losses, second_only), (n - gains - losses, same))
        return -sum(count * np.log(max(share, 1e-300)) for count, share in counts if count)

    found = optimize.minimize_scalar(
        minus_log_likelihood, bounds=(low, high), method="bounded", options={"xatol": 1e-12}
    )
    variance = n * (2 * found.x + delta - delta**2)
    return (gains - losses - n * delta) / np.sqrt(variance)


@pytest.mark.parametrize(("gains", "losses", "n"), [(1, 7, 21), (12, 3, 60), (0, 5, 200), (20, 20, 100), (3, 0, 8)])
def test_score_interval_ends_where_the_score_equals_the_normal_quantile(gains, losses, n):
    interval = paired_interval(*pairs(gains, losses, n - gains - losses), alpha=0.05)
    quantile = stats.norm.ppf(0.975)
    assert likelihood_score(gains, losses, n, interval.low / 100) == pytest.approx(quantile, abs=1e-3)
    assert likelihood_score(gains, losses, n, interval.high / 100) == pytest.approx(-quantile, abs=1e-3)


def test_equal_answers_leave_room_for_the_documents_not_seen():
    interval = paired_interval(*pairs(0, 0, 541), alpha=0.05)
    expected = 100 * stats.norm.ppf(0.975) ** 2 / (541 + stats.norm.ppf(0.975) ** 2)
    assert interval.estimate == 0
    assert bounds(interval) == pytest.approx((-expected, expected), abs=1e-6)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param([1.0] * 50, [0.0] * 50, id="always better"),
        pytest.param([0.5] * 50, [0.5] * 50, id="equal fractions"),
        pytest.param([0.75] * 50, [0.25] * 50, id="always half better"),
        pytest.param([1.0], [1.0], id="one document"),
        pytest.param([1.0], [0.0], id="one document, different"),
    ],
)
def test_no_interval_has_width_zero(first, second):
    interval = paired_interval(first, second, alpha=0.05)
    assert interval.high - interval.low > 1
    assert -100 <= interval.low <= interval.estimate <= interval.high <= 100


def test_swapping_the_models_mirrors_the_interval():
    there, back = (paired_interval(*scores, alpha=0.05) for scores in (pairs(9, 2, 80), pairs(2, 9, 80)))
    assert bounds(there) == pytest.approx((-back.high, -back.low), abs=1e-6)


def test_wald_and_score_nearly_agree_where_one_takes_over_from_the_other():
    just_below, just_above = (paired_interval(*pairs(60, 30, n - 90), alpha=0.05) for n in (500, 501))
    assert bounds(just_below) == pytest.approx(bounds(just_above), abs=0.15)


def test_fractional_scores_use_the_paired_t_interval():
    draws = np.random.default_rng(1)
    first, second = draws.uniform(size=200), draws.uniform(size=200)
    expected = stats.ttest_rel(first, second).confidence_interval(0.95)
    interval = paired_interval(first, second, alpha=0.05)
    assert bounds(interval) == pytest.approx((100 * expected.low, 100 * expected.high), rel=1e-9)


def clustered_pairs(draws, num_clusters=80, size=9, spread=0.25):
    """0/1 scores of two models that agree within a cluster more than between clusters."""
    level = np.clip(0.6 + spread * draws.normal(size=(num_clusters, 2)), 0, 1)
    scores = (draws.uniform(size=(num_clusters, size, 2)) < level[:, None, :]).astype(float).reshape(-1, 2)
    return scores[:, 0], scores[:, 1], [f"c{index // size}" for index in range(len(scores))]


def test_cluster_interval_equals_statsmodels():
    first, second, clusters = clustered_pairs(np.random.default_rng(2), num_clusters=300)
    groups = np.array([int(name[1:]) for name in clusters])
    fit = sm.OLS(first - second, np.ones(len(first))).fit(
        cov_type="cluster", cov_kwds={"groups": groups, "df_correction": True}, use_t=True
    )
    low, high = fit.conf_int(0.05)[0]
    interval = paired_interval(first, second, 0.05, clusters)
    assert bounds(interval) == pytest.approx((100 * low, 100 * high), rel=1e-9)
    alone = paired_interval(first, second, 0.05)
    assert interval.high - interval.low > 1.5 * (alone.high - alone.low)


def test_clusters_of_one_document_change_nothing():
    first, second = pairs(43, 33, 465)
    assert paired_interval(first, second, 0.05, [f"c{i}" for i in range(541)]) == paired_interval(first, second, 0.05)
    assert paired_interval(first, second, 0.05, [None] * 541) == paired_interval(first, second, 0.05)


def test_clusters_in_which_gains_cancel_losses_do_not_narrow_the_interval():
    first, second = np.tile([1.0, 0.0], 300), np.tile([0.0, 1.0], 300)
    clusters = [str(index // 2) for index in range(600)]
    clustered, alone = paired_interval(first, second, 0.05, clusters), paired_interval(first, second, 0.05)
    assert clustered.high - clustered.low >= alone.high - alone.low


def test_equal_answers_in_clusters_count_as_one_document_a_cluster():
    ones = np.ones(600)
    interval = paired_interval(ones, ones, 0.05, [str(index // 10) for index in range(600)])
    square = stats.t.ppf(0.975, 59) ** 2
    assert interval.high == pytest.approx(100 * square / (60 + square), abs=1e-6)


def test_a_single_cluster_says_next_to_nothing():
    interval = paired_interval(*pairs(300, 10, 300), 0.05, ["same"] * 610)
    assert interval.low < -90 and interval.high > 99


@pytest.mark.parametrize(
    ("first", "second", "alpha", "clusters"),
    [
        pytest.param([], [], 0.05, None, id="empty"),
        pytest.param([1.0], [1.0, 0.0], 0.05, None, id="unequal lengths"),
        pytest.param([2.0], [1.0], 0.05, None, id="out of range"),
        pytest.param([float("nan")], [1.0], 0.05, None, id="nan"),
        pytest.param([1.0], [1.0], 1.0, None, id="alpha"),
        pytest.param([1.0, 1.0], [1.0, 0.0], 0.05, ["a"], id="clusters"),
    ],
)
def test_bad_scores_are_refused(first, second, alpha, clusters):
    with pytest.raises(ValueError, match=r"need|scores|alpha"):
        paired_interval(first, second, alpha, clusters)


@pytest.mark.parametrize(
    ("n", "p10", "p01"),
    [(40, 0.1, 0.1), (60, 0.2, 0.02), (100, 0.1, 0.02), (120, 0.05, 0.0), (120, 0.02, 0.02)],
)
def test_score_interval_covers_as_promised(n, p10, p01):
    """Exact: the probability of every table with its interval, not a simulation."""
    covered = total = 0.0
    for gains in range(n + 1):
        for losses in range(n - gains + 1):
            both = n - gains - losses
            share = stats.binom.pmf(gains, n, p10) * stats.binom.pmf(losses, n - gains, p01 / (1 - p10))
            if share < 1e-6:
                continue
            interval = paired_interval(*pairs(gains, losses, both), alpha=0.05)
            total += share
            covered += share * (interval.low <= 100 * (p10 - p01) <= interval.high)
    assert total > 0.999
    assert 0.94 <= covered <= 0.98


@pytest.mark.parametrize(("n", "p10", "p01"), [(600, 0.04, 0.03), (1000, 0.04, 0.0), (600, 0.3, 0.05)])
def test_wald_interval_covers_as_promised(n, p10, p01):
    draws = np.random.default_rng(3)
    tables = draws.multinomial(n, [p10, p01, 1 - p10 - p01], size=1000)
    drawn = [paired_interval(*pairs(*table), alpha=0.05) for table in tables]
    assert 0.93 <= coverage(drawn, 100 * (p10 - p01)) <= 0.985


def coverage(intervals, truth):
    return float(np.mean([interval.low <= truth <= interval.high for interval in intervals]))


def test_intervals_of_clustered_documents_cover_and_ignoring_clusters_does_not():
    draws = np.random.default_rng(4)
    drawn = [clustered_pairs(draws) for _ in range(300)]
    with_clusters = [paired_interval(first, second, 0.05, clusters) for first, second, clusters in drawn]
    without = [paired_interval(first, second, 0.05) for first, second, _ in drawn]
    assert 0.92 <= coverage(with_clusters, 0) <= 0.98
    assert coverage(without, 0) < 0.85


# Smallest detectable effect


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (164, (6.9, 9.8, 12.0)),
        (198, (6.3, 8.9, 10.9)),
        (448, (4.2, 5.9, 7.2)),
        (500, (4.0, 5.6, 6.9)),
        (541, (3.8, 5.4, 6.6)),
        (817, (3.1, 4.4, 5.4)),
        (1319, (2.4, 3.4, 4.2)),
        (3270, (1.5, 2.2, 2.7)),
        (5000, (1.3, 1.8, 2.2)),
        (6511, (1.1, 1.6, 1.9)),
        (12032, (0.8, 1.1, 1.4)),
        (14042, (0.7, 1.1, 1.3)),
    ],
)
def test_mde_gives_the_pinned_table(n, expected):
    found = tuple(minimum_detectable_effect(share, n) for share in (0.1, 0.2, 0.3))
    assert found == pytest.approx(expected, abs=0.0501)


def test_mde_without_a_difference_is_not_zero():
    assert minimum_detectable_effect(0.0, 541) == pytest.approx(280.16 * np.sqrt(2.9957 / 541 / 541), rel=1e-3)


def test_mde_with_clusters_counts_what_they_are_worth():
    first, second, clusters = clustered_pairs(np.random.default_rng(5))
    assert paired_mde(first, second, 0.05, clusters) > 1.3 * paired_mde(first, second, 0.05)


@pytest.mark.parametrize(("share", "size"), [(-0.1, 10), (1.1, 10), (0.1, 0)])
def test_mde_refuses_impossible_values(share, size):
    with pytest.raises(ValueError, match="discordance"):
        minimum_detectable_effect(share, size)


# Recovery ratio


def three_models(draws, n=800):
    base = (draws.uniform(size=n) < 0.9).astype(float)
    vlm = base * (draws.uniform(size=n) < 0.5)
    merge = np.where(draws.uniform(size=n) < 0.6, base, vlm)
    return merge, base, vlm


def test_recovery_interval_agrees_with_the_paired_bootstrap():
    draws = np.random.default_rng(6)
    merge, base, vlm = three_models(draws)
    picks = draws.integers(len(base), size=(3000, len(base)))
    ratios = (merge[picks] - vlm[picks]).mean(1) / (base[picks] - vlm[picks]).mean(1)
    found = recovery_interval(merge, base, vlm, alpha=0.05)
    assert found.estimate == pytest.approx((merge - vlm).mean() / (base - vlm).mean())
    assert bounds(found) == pytest.approx(tuple(np.quantile(ratios, [0.025, 0.975])), abs=0.012)


def test_recovery_interval_ends_where_the_residual_test_turns():
    merge, base, vlm = three_models(np.random.default_rng(7))
    found = recovery_interval(merge, base, vlm, alpha=0.05)
    quantile = stats.norm.ppf(0.975)
    for ratio in bounds(found):
        residual = (merge - vlm) - ratio * (base - vlm)
        z = residual.mean() / (residual.std(ddof=1) / np.sqrt(len(residual)))
        assert abs(z) == pytest.approx(quantile, rel=1e-9)


def test_recovery_with_clusters_is_wider():
    draws = np.random.default_rng(8)
    level = np.repeat(draws.uniform(size=80), 10)
    base = np.ones(800)
    vlm = (draws.uniform(size=800) < 0.4).astype(float)
    merge = np.maximum(vlm, (draws.uniform(size=800) < level**2).astype(float))
    clusters = [str(index // 10) for index in range(800)]
    alone, clustered = (
        recovery_interval(merge, base, vlm, 0.05),
        recovery_interval(merge, base, vlm, 0.05, clusters),
    )
    assert clustered.high - clustered.low > 1.3 * (alone.high - alone.low)


def test_recovery_of_equal_answers_is_no_certainty():
    _, base, vlm = three_models(np.random.default_rng(9))
    all_back, nothing_back = (recovery_interval(merge, base, vlm, 0.05) for merge in (base, vlm))
    assert all_back.estimate == 1 and all_back.low < 0.995 and all_back.high > 1.005
    assert nothing_back.estimate == 0 and nothing_back.low < -0.005 and nothing_back.high > 0.005


def test_recovery_without_a_gap_does_not_exist():
    first, second = pairs(20, 20, 500)
    assert recovery_interval(first, first, second, 0.05) is None
    assert recovery_interval(first, first, first, 0.05) is None


# Holm


@pytest.mark.parametrize(
    "p_values", [[], [0.03], [0.01, 0.04, 0.03, 0.005], [0.5, 0.5, 0.9], [0.001, 0.001, 1.0, 0.02, 0.02]]
)
def test_holm_equals_statsmodels(p_values):
    expected = multipletests(p_values, method="holm")[1] if p_values else []
    assert holm(p_values) == pytest.approx(list(expected))


def test_holm_refuses_what_is_no_probability():
    with pytest.raises(ValueError, match=r"1\.2"):
        holm([0.5, 1.2])


def test_p_value_of_fractional_scores_is_a_paired_t_and_with_few_differences_a_sign_test():
    draw = np.random.default_rng(0)
    first, second = draw.uniform(0.2, 1, 100), draw.uniform(0, 0.9, 100)
    assert paired_p_value(first, second) == pytest.approx(stats.ttest_rel(first, second).pvalue, rel=1e-9)
    few = second.copy()
    few[:20] = [*[value / 2 for value in few[:15]], *[(1 + value) / 2 for value in few[15:20]]]
    assert paired_p_value(second, few) == pytest.approx(stats.binomtest(15, 20).pvalue)
    assert paired_p_value(second, second) == 1.0


def test_p_value_of_clusters_counts_them_and_not_their_documents():
    first, second = np.repeat(np.linspace(0.3, 0.9, 40), 5), np.repeat(np.linspace(0.35, 0.8, 40), 5)
    groups = [str(number // 5) for number in range(200)]
    means = stats.ttest_rel(first[::5], second[::5]).pvalue
    assert paired_p_value(first, second, groups) == pytest.approx(means, rel=0.05)
    assert paired_p_value(first, second) < means / 10


def test_p_value_of_binary_scores_is_mcnemar():
    first, second = [1] * 9 + [0] * 51, [0] * 8 + [1, 1] + [0] * 50
    assert paired_p_value(first, second) == mcnemar_exact(8, 1)
