import math

import pytest
import torch

from merges.parameters import Slerp
from merges.slerp import slerp
from tests.merges.inputs import ONE, block, merge, normal, same_bits
from tests.oracles import merging as oracle


def between(first: list[float], second: list[float], **values: object) -> list[float]:
    one, two = torch.tensor(first), torch.tensor(second)
    return merge("slerp", torch.zeros_like(one), [one, two], **values).tolist()


def test_the_worked_example() -> None:
    assert between([1.0, 0.0], [0.0, 1.0]) == pytest.approx([math.sqrt(0.5)] * 2)
    assert between([2.0, 0.0], [0.0, 1.0], t=1 / 3) == pytest.approx([2 * math.sqrt(0.75), 0.5])


@pytest.mark.parametrize("t", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("noise", [10.0, 1.0, 0.1])
def test_matches_the_formula(t: float, noise: float) -> None:
    one = normal((7, 5), 0)
    two = one + noise * normal((7, 5), 1)
    expected = torch.tensor(oracle.slerp(one.flatten().tolist(), two.flatten().tolist(), t)).view(7, 5)
    torch.testing.assert_close(merge("slerp", one, [one, two], t=t), expected, rtol=1e-6, atol=1e-6)


def test_ends_return_the_models_bit_for_bit() -> None:
    one, two = torch.tensor([1.0, -0.0, 3.0]), torch.tensor([2.0**-30, 0.0, -0.0])
    assert same_bits(merge("slerp", one, [one, two], t=0), one)
    assert same_bits(merge("slerp", one, [one, two], t=1), two)


def test_near_parallel_models_go_straight_and_equal_entries_stay() -> None:
    one = normal((50,), 0)
    two = one.clone()
    two[::2] += 1e-3
    found = merge("slerp", one, [one, two], t=0.25)
    assert same_bits(found[1::2], one[1::2])
    torch.testing.assert_close(found, torch.lerp(one, two, 0.25))
    bent = merge("slerp", one, [one, two], t=0.25, lerp_above=1)
    assert not torch.equal(bent, found)
    assert between([1.0, 0.0], [-2.0, 0.0]) == [-0.5, 0.0], "opposite models have no great circle of their own"


@pytest.mark.parametrize(("second", "merged"), [([1.0, 0.0], [1.0, 0.0]), ([-2.0, 0.0], [-0.5, 0.0])])
def test_parallel_models_go_straight_whatever_is_asked(second: list[float], merged: list[float]) -> None:
    assert between([1.0, 0.0], second, lerp_above=1) == merged


@pytest.mark.parametrize("empty", [0.0, 1e-12])
def test_a_model_without_a_direction_goes_straight(empty: float) -> None:
    assert between([empty, 0.0], [0.0, 4.0], t=0.25) == pytest.approx([0.75 * empty, 1.0])


def test_norms_that_overflow_float32_are_no_trouble() -> None:
    assert between([3e38, 0.0], [0.0, 3e38]) == pytest.approx([3e38 * math.sqrt(0.5)] * 2)


def test_the_way_back_is_the_same_way() -> None:
    one, two = normal((8, 8), 0), normal((8, 8), 1)
    forth, back = merge("slerp", one, [one, two], t=0.3), merge("slerp", one, [two, one], t=0.7)
    torch.testing.assert_close(forth, back)


def test_two_whole_models_are_needed() -> None:
    with pytest.raises(ValueError, match="found 1 models"):
        slerp(None, [torch.ones(3)], Slerp(), block(ONE))
    with pytest.raises(ValueError, match="starts at entry 3"):
        merge("slerp", torch.ones(3), [torch.ones(3)] * 2, start=3)
