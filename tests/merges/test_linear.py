import pytest
import torch

from merges.linear import linear
from merges.parameters import Linear
from tests.merges.inputs import TWO, block, merge, normal, same_bits
from tests.oracles import merging as oracle

ZERO = torch.zeros(0)


def average(base: torch.Tensor, vlm: torch.Tensor, **values: object) -> torch.Tensor:
    return merge("linear", base, [base, vlm], **values)


def test_three_entries_by_hand() -> None:
    merged = average(torch.tensor([1.0, 2.0, -4.0]), torch.tensor([3.0, 2.0, 0.0]), weights=[0.25, 0.75])
    assert merged.tolist() == [2.5, 2.0, -1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_average_is_that_of_the_oracle(dtype: torch.dtype) -> None:
    base, vlm = normal((5, 7), 0).to(dtype), normal((5, 7), 1).to(dtype)
    merged = average(base, vlm, weights=[0.3, 0.9], normalize=True)
    expected = oracle.linear([base.flatten().tolist(), vlm.flatten().tolist()], [0.3, 0.9])
    torch.testing.assert_close(merged.flatten(), torch.tensor(expected), rtol=1e-6, atol=1e-6)


def test_a_single_weight_of_one_copies_the_model() -> None:
    base, vlm = torch.tensor([-0.0, 1.0]), torch.tensor([5.0, 2.0**-30])
    assert same_bits(average(base, vlm, weights=[1, 0]), base)
    assert same_bits(average(base, vlm, weights=[0, 1]), vlm)


def test_entries_equal_in_all_models_keep_their_bits() -> None:
    base = normal((1000,), 0)
    vlm = torch.where(torch.arange(1000) % 2 == 0, base, normal((1000,), 1))
    merged = average(base, vlm, weights=[0.3, 0.7])
    assert same_bits(merged[::2], base[::2])
    assert not same_bits((base * 0.3 + base * 0.7)[::2], base[::2])


def test_zero_point_is_not_read() -> None:
    models = [torch.ones(3), torch.zeros(3)]
    half = Linear(weights={"base": 0.5, "vlm": 0.5})
    assert same_bits(linear(None, models, half, block(TWO)), linear(ZERO, models, half, block(TWO)))


def test_weights_of_other_models_are_refused() -> None:
    third = Linear(weights={"base": 0.5, "vlm": 0.25, "ancestor": 0.25})
    with pytest.raises(ValueError, match=r"found 0\.75"):
        linear(None, [torch.ones(1), torch.ones(1)], third, block(TWO))
    with pytest.raises(ValueError, match="no weight for vlm"):
        linear(None, [torch.ones(1), torch.ones(1)], Linear(weights={"base": 1.0}), block(TWO))
