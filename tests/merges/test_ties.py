from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from merges.parameters import Ties
from merges.ties import ties
from merges.trim import reaches, trim_counts, trim_mask
from tests.merges.inputs import ONE, REPEATABLE, block, merge, normal, same_bits
from tests.oracles import merging as oracle

EIGHTHS = st.integers(-6, 6).map(lambda n: n / 8)


def delta_of(*vectors: list[float], **values: object) -> list[float]:
    models = [torch.tensor(vector) for vector in vectors]
    return merge("ties", torch.zeros_like(models[0]), models, **values).tolist()


def test_the_worked_example() -> None:
    assert delta_of([3.0, -1.0, 0.0, 2.0], [-1.0, -2.0, 1.0, 0.0], density=1) == [3.0, -1.5, 1.0, 2.0]


def test_trimming_happens_before_the_election() -> None:
    # Without trimming entry 0 would elect minus: 2 - 1 - 1.5 < 0.
    assert delta_of([2.0, 0.0, 5.0], [-1.0, 4.0, 3.0], [-1.5, 3.0, 3.0], density=2 / 3) == pytest.approx(
        [2.0, 3.5, 11 / 3]
    )


def test_election_is_on_raw_entries_and_the_mean_is_weighted() -> None:
    vectors = [3.0, 1.0], [-2.0, 2.0]
    assert delta_of(*vectors, density=1, weights=[1, 3]) == [3.0, 1.75]
    assert delta_of(*vectors, density=1, weights=[1, 3], elect="weighted") == [-2.0, 1.75]
    assert delta_of(*vectors, density=1, weights=[1, 3], divisor="count") == [3.0, 3.5]
    assert delta_of(*vectors, density=1, weights=[1, 3], divisor="none") == [3.0, 7.0]
    assert delta_of([5.0], [-1.0], [-1.0], density=1) == [5.0]
    assert delta_of([5.0], [-1.0], [-1.0], density=1, elect="count") == [-1.0]


def test_f2_a_zero_sum_elects_nothing_unless_told() -> None:
    zero = torch.tensor([-0.0])
    models = [torch.tensor([1.0]), torch.tensor([-1.0])]
    assert same_bits(merge("ties", zero, models, density=1), zero)
    assert merge("ties", zero, models, density=1, zero_sum="plus").tolist() == [1.0]


def test_a_vector_of_weight_zero_votes_but_adds_nothing() -> None:
    assert delta_of([3.0, 3.0], [-2.0, 2.0], density=1, weights=[0, 1]) == [0.0, 2.0]


def test_f1_lambda_scales_one_vector_and_weight_is_refused() -> None:
    zero, tower = torch.zeros(3), torch.tensor([1.0, -2.0, 0.0])
    results = [merge("ties", zero, [tower], density=1, lambda_=scale).tolist() for scale in (-1, 0, 0.5, 1, 2)]
    assert results == [[scale * x + 0.0 for x in (1.0, -2.0, 0.0)] for scale in (-1, 0, 0.5, 1, 2)]
    with pytest.raises(ValueError, match=r"cancels in ties, found 0\.1"):
        ties(zero, [tower], Ties(weights={"vlm": 0.1}), block(ONE))


def test_f3_tensor_scope_keeps_some_of_every_tensor() -> None:
    large = torch.arange(1, 65).view(8, 8) * 1e-3
    small = torch.full((4,), 1e-6)
    kept = [int(merge("ties", torch.zeros_like(t), [t], density=0.2).count_nonzero()) for t in (large, small)]
    assert kept == [12, 1]


def test_a_model_scope_without_a_survey_is_refused() -> None:
    parameters = Ties(trim_scope="model", kept_count="threshold")
    with pytest.raises(ValueError, match="found no threshold for vlm"):
        ties(torch.zeros(3), [torch.ones(3)], parameters, block(ONE))
    with pytest.raises(ValueError, match="zero_sum majority needs a survey"):
        merge("ties", torch.zeros(1), [torch.ones(1), -torch.ones(1)], zero_sum="majority")


def test_by_threshold_one_more_is_asked_for_and_ties_are_kept() -> None:
    delta = torch.tensor([3.0, -1.0, 1.0, 2.0, 1.0, 0.5, 0.0, 0.0, 0.0, 0.0])
    assert int(trim_mask(delta, 0.2, "threshold").sum()) == 5, "floor(2) + 1 = 3, and two share the third"
    assert int(trim_mask(delta, 0.2).sum()) == 2
    assert trim_counts(delta, 0.2, "threshold") == (3, 5)
    assert trim_counts(delta, 1.0, "threshold") == (10, 6), "zeros are never kept"


def test_f10_one_vector_keeps_the_bits_of_the_model_where_it_keeps_entries() -> None:
    zero, model = torch.tensor([1.0, -0.0, 5.0, 0.0]), torch.tensor([2.0**-30, 0.5, 5.0, -0.0])
    assert same_bits(merge("ties", zero, [model], density=1), model)
    assert same_bits(merge("ties", zero, [model], density=0.25), torch.tensor([2.0**-30, -0.0, 5.0, 0.0]))
    assert same_bits(merge("ties", zero, [model], lambda_=0), zero)
    assert same_bits(merge("ties", zero, [model, model], lambda_=0), zero)


@given(
    entries=st.lists(st.tuples(EIGHTHS, EIGHTHS, EIGHTHS), min_size=1, max_size=25),
    weights=st.tuples(st.sampled_from([0, 0.5, 1]), st.sampled_from([0.25, 1, 2])),
    tenths=st.integers(1, 10),
    scale=st.sampled_from([-0.5, 0.3, 1.0]),
    elect=st.sampled_from(["raw", "weighted", "count"]),
    zero_sum=st.sampled_from(["nothing", "plus"]),
    divisor=st.sampled_from(["weights", "count", "none"]),
)
@REPEATABLE
def test_merge_is_that_of_the_oracle(
    entries: list[tuple[float, float, float]],
    weights: tuple[float, float],
    tenths: int,
    scale: float,
    elect: str,
    zero_sum: str,
    divisor: str,
) -> None:
    zero, *models = ([entry[i] for entry in entries] for i in range(3))
    rules = {"elect": elect, "zero_sum": zero_sum, "divisor": divisor}
    merged = merge(
        "ties",
        torch.tensor(zero),
        [torch.tensor(model) for model in models],
        density=tenths / 10,
        weights=list(weights),
        lambda_=scale,
        **rules,
    )
    expected = oracle.ties(zero, models, weights, scale, Fraction(tenths, 10), **rules)
    torch.testing.assert_close(merged, torch.tensor(expected), rtol=1e-6, atol=1e-6)


def test_three_vectors_are_elected_exactly() -> None:
    # In float32 the sum would be 1e8 + 1 - 1e8 = 0, an undecided entry.
    assert delta_of([1e8], [1.0], [-1e8], density=1) == [5e7]


def test_a_slice_is_refused() -> None:
    with pytest.raises(ValueError, match="starts at entry 8"):
        merge("ties", torch.zeros(4), [torch.ones(4)], start=8)


def test_a_task_vector_beyond_float32_is_refused() -> None:
    with pytest.raises(ValueError, match="found 1 that are not"):
        merge("ties", torch.tensor([-3e38, 1.0]), [torch.tensor([3e38, 1.0])])


def test_ties_needs_no_second_vector_to_match_task_arithmetic() -> None:
    zero, model = normal((30,), 0), normal((30,), 1)
    assert same_bits(
        merge("ties", zero, [model], density=1, lambda_=0.3),
        merge("task_arithmetic", zero, [model], lambda_=0.3),
    )


def test_zeros_reach_no_threshold() -> None:
    delta = torch.tensor([0.0, -0.0, 1e-45, -3.0])
    assert reaches(delta, 0).tolist() == [False, False, True, True]
    threshold = int(torch.tensor(3.0).view(torch.int32))
    assert reaches(delta, threshold).tolist() == [False, False, False, True]
    assert reaches(delta, threshold + 1).sum() == 0
