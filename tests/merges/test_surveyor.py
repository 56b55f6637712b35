"""TIES over the whole model: streamed counts against the flat vector of the authors' code."""

import math
import random
from collections.abc import Iterator
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from merges import surveyor as surveyor_module
from merges.block import Block, Survey
from merges.methods import merge as merge_block
from merges.parameters import Parameters, Ties, build
from merges.surveyor import Counts, Surveyor, survey_tensor, threshold_value
from merges.ties import kept_mask
from merges.trim import trim_mask
from tests.merges.inputs import ONE, REPEATABLE, TWO, normal
from tests.oracles import merging as oracle

# Few magnitudes: thresholds fall on ties, on zero, and on floats that differ in their lowest bits alone.
ENTRIES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 1.0000001, 0.25, -0.5, 1e-45, 65536.0])
Model = dict[str, list[Tensor]]


def blocks(
    model: Model, roles: tuple[str, ...], size: int, survey: Survey | None = None
) -> Iterator[tuple[Block, list[Tensor]]]:
    for name, tensors in model.items():
        edges = [*range(0, tensors[0].numel(), size), tensors[0].numel()]
        for first, last in pairwise(edges):
            yield Block(name, "mlp", roles, start=first, survey=survey), [t[first:last] for t in tensors]


def surveyed(model: Model, parameters: Parameters, roles: tuple[str, ...], size: int = 10**9) -> Survey:
    surveyor = Surveyor(parameters, roles)
    for _ in range(surveyor.num_passes):
        counts = Counts()
        for place, (zero, *models) in blocks(model, roles, size):
            counts.add(surveyor.count(place, zero, models))
        surveyor.end_pass(counts)
    return surveyor.survey


def merged(model: Model, parameters: Parameters, roles: tuple[str, ...], size: int = 10**9) -> list[float]:
    survey = surveyed(model, parameters, roles, size)
    parts = [
        merge_block(zero, models, parameters, place) for place, (zero, *models) in blocks(model, roles, size, survey)
    ]
    return torch.cat(parts).tolist()


def flat(model: Model, place: int) -> list[float]:
    return [value for tensors in model.values() for value in tensors[place].tolist()]


@st.composite
def whole_models(draw: st.DrawFn, count: int) -> Model:
    sizes = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    return {
        f"w{i}": [
            torch.zeros(size),
            *(torch.tensor(draw(st.lists(ENTRIES, min_size=size, max_size=size))) for _ in range(count)),
        ]
        for i, size in enumerate(sizes)
    }


@given(model=whole_models(2), twentieths=st.integers(1, 20), size=st.integers(1, 9))
@REPEATABLE
def test_official_ties_is_the_flat_vector_of_the_authors(model: Model, twentieths: int, size: int) -> None:
    parameters = build("ties", {"density": twentieths / 20, "lambda": 0.5}, TWO, "official")
    expected = oracle.official_ties(
        flat(model, 0), [flat(model, 1), flat(model, 2)], [1.0, 1.0], 0.5, Fraction(twentieths, 20)
    )
    assert merged(model, parameters, TWO, size) == pytest.approx(expected, rel=1e-6, abs=2e-45)
    assert merged(model, parameters, TWO, size) == merged(model, parameters, TWO)


@given(model=whole_models(1), twentieths=st.integers(1, 20))
@REPEATABLE
def test_one_vector_keeps_what_reaches_the_threshold_of_the_model(model: Model, twentieths: int) -> None:
    parameters = build("ties", {"density": twentieths / 20}, ONE, "official")
    kept = oracle.official_trim(flat(model, 1), Fraction(twentieths, 20))
    assert merged(model, parameters, ONE, 3) == kept
    survey = surveyed(model, parameters, ONE)
    assert survey.num_entries == len(kept)
    assert survey.asked["vlm"] == min(len(kept), twentieths * len(kept) // 20 + 1)
    magnitudes = sorted((abs(value) for value in flat(model, 1)), reverse=True)
    assert threshold_value(survey.thresholds["vlm"]) == pytest.approx(magnitudes[survey.asked["vlm"] - 1], abs=0)


@pytest.mark.parametrize("density", [0.001, 0.2, 0.5, 1.0])
def test_a_large_model_in_any_order_and_block_size(density: float) -> None:
    model = {
        f"w{i}": [normal((size,), 3 * i), normal((size,), 3 * i + 1), normal((size,), 3 * i + 2)]
        for i, size in enumerate((3001, 7, 1999))
    }
    parameters = build("ties", {"density": density}, TWO, "official")
    survey = surveyed(model, parameters, TWO)
    names = list(model)
    random.Random(0).shuffle(names)
    assert surveyed({name: model[name] for name in names}, parameters, TWO, 100) == survey
    for place, role in enumerate(TWO, 1):
        delta = torch.cat([tensors[place] - tensors[0] for tensors in model.values()]).abs()
        rank = min(delta.numel(), int(density * delta.numel()) + 1)
        assert threshold_value(survey.thresholds[role]) == float(delta.sort(descending=True).values[rank - 1])


def test_f3_model_scope_keeps_none_of_a_small_tensor() -> None:
    large, small = torch.arange(1, 65) * 1e-3, torch.full((4,), 1e-6)
    model = {"a": [torch.zeros(64), large], "b": [torch.zeros(4), small]}
    found = merged(model, build("ties", {}, ONE, "official"), ONE)
    assert sum(value != 0 for value in found[:64]) == 14, "floor(.2 * 68) + 1"
    assert found[64:] == [0.0] * 4


@pytest.mark.parametrize(
    ("others", "expected"), [([1.0, 1.0, -1.0], 1.0), ([-1.0, -1.0, 1.0], -1.0), ([1.0, -1.0], 0.0)]
)
def test_f2_a_zero_sum_takes_the_sign_of_the_whole_model(others: list[float], expected: float) -> None:
    model = {
        "tie": [torch.zeros(1), torch.tensor([1.0]), torch.tensor([-1.0])],
        "rest": [torch.zeros(len(others)), torch.tensor(others), torch.tensor(others)],
    }
    for method in ("ties", "dare_ties"):
        values = {"density": 1} if method == "ties" else {"drop_rate": 0}
        assert merged(model, build(method, values, TWO, "official"), TWO)[0] == expected
        assert merged(model, build(method, values, TWO), TWO)[0] == 0.0


def test_excluded_tensors_are_not_counted() -> None:
    model = {"w": [torch.zeros(4), torch.tensor([1.0, 2.0, 3.0, 4.0])]}
    surveyor = Surveyor(build("ties", {"exclude": ["norm"], "density": 0.5}, ONE, "official"), ONE)
    for _ in range(surveyor.num_passes):
        counts = surveyor.count(Block("n", "norm", ONE), torch.zeros(9), [torch.full((9,), 100.0)])
        for place, (zero, *models) in blocks(model, ONE, 4):
            counts.add(surveyor.count(place, zero, models))
        surveyor.end_pass(counts)
    assert surveyor.survey.num_entries == 4
    assert threshold_value(surveyor.survey.thresholds["vlm"]) == 2.0


def test_methods_that_need_no_survey_take_no_pass() -> None:
    assert Surveyor(build("ties", {}, TWO), TWO).num_passes == 0
    assert Surveyor(build("tsv", {}, TWO), TWO).num_passes == 0
    assert Surveyor(build("ties", {}, TWO, "official"), TWO).num_passes == 3
    assert Surveyor(build("ties", {}, ONE, "official"), ONE).num_passes == 2
    assert Surveyor(build("dare_ties", {}, TWO, "official"), TWO).num_passes == 1


TIED = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 1e-45, 1.0000001, 3.4e38])


@given(
    entries=st.lists(TIED, min_size=1, max_size=40),
    twentieths=st.integers(1, 20),
    size=st.integers(1, 40),
    rule=st.sampled_from(["at_least_one", "floor", "threshold"]),
    waiting=st.sampled_from([1, 1 << 20]),
)
@REPEATABLE
def test_slices_of_a_surveyed_tensor_keep_what_the_whole_tensor_keeps(
    entries: list[float], twentieths: int, size: int, rule: str, waiting: int
) -> None:
    delta = torch.tensor(entries)
    parameters = build("ties", {"density": twentieths / 20, "kept_count": rule}, ONE)
    assert isinstance(parameters, Ties)
    starts = range(0, delta.numel(), size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(surveyor_module, "WAITING_ENTRIES", waiting)
        survey = survey_tensor(
            parameters, delta.numel(), lambda: ((start, {"vlm": delta[start : start + size]}) for start in starts)
        )
    masks = [
        kept_mask(delta[start : start + size], "vlm", parameters, Block("w", "mlp", ONE, start=start, survey=survey))
        for start in starts
    ]
    assert torch.equal(torch.cat(masks), trim_mask(delta, parameters.density, rule))


def test_a_surveyed_tensor_that_is_not_finite_is_refused_by_its_model() -> None:
    parameters = build("ties", {}, ONE)
    assert isinstance(parameters, Ties)
    with pytest.raises(ValueError, match="task vector of vlm: expected finite entries, found 1"):
        survey_tensor(parameters, 2, lambda: iter([(0, {"vlm": torch.tensor([1.0, math.inf])})]))
