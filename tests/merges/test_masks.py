"""The fast ways of a CPU give the bits of torch's own functions, on every kind of number and layout."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from merges import masks
from merges.vectors import add_delta
from tests.merges.inputs import REPEATABLE, normal, same_bits

NUMBERS = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 3.4e38, math.inf, -math.inf, math.nan])
PAIRS = st.lists(st.tuples(NUMBERS, NUMBERS, st.booleans()), max_size=70)


@given(PAIRS)
@REPEATABLE
def test_every_function_is_the_word_of_torch(pairs: list[tuple[float, float, bool]]) -> None:
    one, other = (torch.tensor([pair[place] for pair in pairs], dtype=torch.float32) for place in (0, 1))
    mask = torch.tensor([pair[2] for pair in pairs], dtype=torch.bool)
    assert torch.equal(masks.differs(one, other), one != other)
    for number in (0.0, 1.0):
        assert torch.equal(masks.is_above(one, number), one > number)
        assert torch.equal(masks.is_below(one, number), one < number)
        assert torch.equal(masks.is_equal(one, number), one == number)
        assert torch.equal(masks.reaches_bound(one, number), one >= number)
    assert masks.count(mask) == int(mask.sum())
    assert masks.places(mask).tolist() == mask.nonzero().flatten().tolist()
    assert same_bits(masks.masked(one, mask), torch.where(mask, one, 0.0))
    assert same_bits(masks.chosen(mask, one, other), torch.where(mask, one, other))
    assert masks.has_negative_zero(one) == any(x == 0 and math.copysign(1, x) < 0 for x in one.tolist())
    assert masks.is_finite(one) == bool(torch.isfinite(one).all())


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (6, 5)])
def test_any_shape_will_do(shape: tuple[int, ...]) -> None:
    one, other = normal(shape, 0), normal(shape, 1)
    mask = masks.is_above(one, 0.0)
    assert mask.shape == masks.differs(one, other).shape == shape
    assert same_bits(masks.chosen(mask, one, other), torch.where(one > 0, one, other))
    assert same_bits(masks.masked(one, mask), torch.where(one > 0, one, 0.0))


def test_other_strides_will_do() -> None:
    one, other = normal((6, 5), 0).T, normal((5, 6), 1)
    mask = masks.is_above(one, 0.0)
    assert torch.equal(mask, one > 0)
    assert same_bits(masks.chosen(mask, one, other), torch.where(one > 0, one, other))
    assert same_bits(masks.masked(one, mask), torch.where(one > 0, one, 0.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_finite_numbers_whose_sum_is_not_are_finite(dtype: torch.dtype) -> None:
    largest = torch.full((40,), torch.finfo(dtype).max, dtype=dtype)
    assert masks.is_finite(largest)
    assert not masks.is_finite(torch.cat((largest, torch.tensor([math.nan], dtype=dtype))))
    assert not masks.is_finite(torch.cat((largest, torch.tensor([-math.inf], dtype=dtype))))


def test_a_delta_of_nothing_keeps_every_zero_as_it_is() -> None:
    zero = torch.tensor([0.0, -0.0, 1.0, -0.0])
    for nothing in (0.0, -0.0):
        assert same_bits(add_delta(zero, torch.full((4,), nothing)), zero)
    assert same_bits(add_delta(zero, torch.tensor([1.0, 2.0, 0.0, 0.0])), torch.tensor([1.0, 2.0, 1.0, -0.0]))
