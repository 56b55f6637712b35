import pytest
import torch

from tests.merges.inputs import merge, normal, same_bits
from tests.oracles import merging as oracle


def test_three_entries_by_hand() -> None:
    zero = torch.tensor([1.0, 1.0, 1.0])
    models = [torch.tensor([2.0, 1.0, 0.0]), torch.tensor([1.0, 3.0, 3.0])]
    merged = merge("task_arithmetic", zero, models, weights=[2, 0.5], lambda_=0.5)
    assert merged.tolist() == [2.0, 1.5, 0.5]


@pytest.mark.parametrize("weights", [[1, 1], [0.3, -1.7], [0, 2]])
def test_sum_is_that_of_the_oracle(weights: list[float]) -> None:
    zero, *models = (normal((6, 5), seed) for seed in range(3))
    merged = merge("task_arithmetic", zero, models, weights=weights, lambda_=0.7)
    flat = [m.flatten().tolist() for m in models]
    expected = oracle.task_arithmetic(zero.flatten().tolist(), flat, weights, 0.7)
    torch.testing.assert_close(merged.flatten(), torch.tensor(expected), rtol=1e-6, atol=1e-6)


def test_f10_one_vector_and_factor_one_is_the_model_bit_for_bit() -> None:
    zero, model = torch.tensor([1.0, -0.0, 0.0, 3.0]), torch.tensor([2.0**-30, 0.0, -0.0, 3.0])
    assert (zero + (model - zero))[0] == 0, "plain arithmetic loses it"
    assert same_bits(merge("task_arithmetic", zero, [model]), model)
    assert same_bits(merge("task_arithmetic", zero, [model], weights=[4], lambda_=0.25), model)
    assert same_bits(merge("task_arithmetic", zero, [zero, model], weights=[0, 1]), model)


def test_f10_lambda_zero_is_the_zero_point_bit_for_bit() -> None:
    zero, model = torch.tensor([1.0, -0.0, 0.0]), torch.tensor([5.0, 7.0, -0.0])
    assert same_bits(merge("task_arithmetic", zero, [model], lambda_=0), zero)
    assert same_bits(merge("task_arithmetic", zero, [model, model], lambda_=0), zero)


def test_vectors_that_cancel_leave_the_zero_point() -> None:
    zero = torch.tensor([-0.0, 0.5])
    merged = merge("task_arithmetic", zero, [torch.tensor([1.0, 1.5]), torch.tensor([-1.0, -0.5])])
    assert same_bits(merged, zero)


@pytest.mark.parametrize("scale", [0.1, 0.3, 0.9])
def test_f9_bf16_checkpoints_are_rounded_once(scale: float) -> None:
    base = normal((200, 200), 0, 0.02).bfloat16()
    tower = (base.float() + normal((200, 200), 1, 0.001)).bfloat16()
    merged = merge("task_arithmetic", base, [tower], lambda_=scale).bfloat16()
    once = (base.float() + scale * (tower.float() - base.float())).bfloat16()
    assert torch.equal(merged, once)
    in_bf16 = base + scale * (tower - base)
    assert float((in_bf16 != once).float().mean()) > 0.002, "arithmetic in bf16 gives other values"


def test_two_point_mix_equals_linear() -> None:
    base, vlm = normal((50,), 0), normal((50,), 1)
    mix = merge("linear", base, [base, vlm], weights=[0.3, 0.7])
    torch.testing.assert_close(merge("task_arithmetic", base, [vlm], lambda_=0.7), mix)
