import math

import pytest
import torch
from torch import Tensor

from merges.dare import dare_mask, rescale_factor
from tests.merges.inputs import ONE, TWO, block, merge, normal, same_bits
from tests.oracles import merging as oracle


def mask_of(role: str, like: Tensor, drop_rate: float, seed: int = 0) -> Tensor:
    return dare_mask(role, drop_rate, block(TWO, seed=seed), like)


def test_f5_outlier_rescales_by_density_and_l1_does_not() -> None:
    delta, kept = torch.tensor([100.0, 1.0, 1.0, 1.0]), torch.tensor([False, True, False, True])
    for rescale, survivors in (("inverse", 2.0), ("l1", 51.5), ("none", 1.0)):
        scaled = torch.where(kept, delta * rescale_factor(rescale, 0.5, delta, kept), 0.0)
        assert scaled.tolist() == [0.0, survivors, 0.0, survivors]


@pytest.mark.parametrize(("rescale", "is_unbiased"), [("inverse", True), ("l1", False)])
def test_f5_expectation_over_masks_is_the_delta(rescale: str, is_unbiased: bool) -> None:
    delta, num_seeds = torch.tensor([100.0, 1.0, 1.0, 1.0]), 10_000
    zero, total = torch.zeros(4), torch.zeros(4, dtype=torch.float64)
    for seed in range(num_seeds):
        kept = dare_mask("vlm", 0.5, block(ONE, seed=seed), zero)
        total += torch.where(kept, delta * rescale_factor(rescale, 0.5, delta, kept), 0.0)
    mean = total / num_seeds
    # Var(m / d) = (1 - d) / d = 1 at d = .5, so one standard error is delta / sqrt(num_seeds).
    inside = (mean - delta).abs() <= 3 * delta / math.sqrt(num_seeds)
    assert bool(inside.all()) == is_unbiased
    if rescale == "l1":
        torch.testing.assert_close(mean, torch.tensor([50.7, 15.3, 15.3, 15.3]).double(), rtol=0.05, atol=0)


@pytest.mark.parametrize("rescale", ["inverse", "l1", "none"])
@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
def test_merge_is_that_of_the_oracle(method: str, rescale: str) -> None:
    zero, *models = (normal((8, 9), seed) for seed in range(3))
    weights = [0.5, 2.0]
    flat = [m.flatten().tolist() for m in models]
    start = zero.flatten().tolist()
    thinned = [
        oracle.drop(oracle.subtract(model, start), mask_of(role, zero, 0.6).flatten().tolist(), 0.6, rescale)
        for role, model in zip(TWO, flat, strict=True)
    ]
    if method == "dare_ties":
        delta = oracle.agreeing_mean(thinned, weights)
    else:
        delta = [sum(w * t for w, t in zip(weights, entry, strict=True)) for entry in zip(*thinned, strict=True)]
    merged = merge(method, zero, models, drop_rate=0.6, weights=weights, lambda_=0.8, rescale=rescale)
    expected = torch.tensor(oracle.add(start, delta, 0.8)).view(8, 9)
    torch.testing.assert_close(merged, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
def test_one_vector_drops_to_the_zero_point_and_rescales_the_rest(method: str) -> None:
    zero, model = normal((400,), 0), normal((400,), 1)
    kept = mask_of("vlm", zero, 0.5)
    merged = merge(method, zero, [model], drop_rate=0.5)
    assert 150 < int(kept.sum()) < 250
    assert same_bits(merged[~kept], zero[~kept])
    torch.testing.assert_close(merged[kept], (zero + 2 * (model - zero))[kept])
    # Half of twice the delta is the model itself, bit for bit.
    assert same_bits(merge(method, zero, [model], drop_rate=0.5, lambda_=0.5)[kept], model[kept])


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
def test_f10_drop_rate_zero_is_the_model_bit_for_bit(method: str) -> None:
    zero, model = torch.tensor([1.0, -0.0, 0.0]), torch.tensor([2.0**-30, 0.0, -0.0])
    assert same_bits(merge(method, zero, [model], drop_rate=0), model)
    assert same_bits(merge(method, zero, [model], drop_rate=0, lambda_=0), zero)


def test_drop_rate_zero_is_task_arithmetic() -> None:
    zero, *models = (normal((40,), seed) for seed in range(3))
    assert same_bits(
        merge("dare_linear", zero, models, drop_rate=0, weights=[0.3, 0.6], lambda_=0.9),
        merge("task_arithmetic", zero, models, weights=[0.3, 0.6], lambda_=0.9),
    )


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
def test_f6_fp16_sums_do_not_overflow(method: str) -> None:
    base = torch.zeros(400, 400, dtype=torch.float16)
    for rescale, survivors in (("inverse", {0.0, 2.0}), ("l1", None)):
        merged = merge(method, base, [base + 1], drop_rate=0.5, rescale=rescale)
        assert torch.isfinite(merged.half()).all()
        assert survivors is None or set(merged.unique().tolist()) == survivors
    tiny = torch.full((4,), 6e-8, dtype=torch.float16)
    assert torch.isfinite(merge(method, torch.zeros_like(tiny), [tiny], drop_rate=0.9, rescale="l1")).all()


def test_f7_masks_depend_on_seed_model_and_name_alone() -> None:
    zero, model = torch.zeros(5000), torch.ones(5000)
    one = merge("dare_linear", zero, [model], drop_rate=0.5)
    assert same_bits(one, merge("dare_linear", zero, [model], drop_rate=0.5))
    assert same_bits(one, merge("dare_linear", zero, [model.double()], drop_rate=0.5))
    assert not same_bits(one, merge("dare_linear", zero, [model], drop_rate=0.5, seed=1))
    assert not same_bits(one, merge("dare_linear", zero, [model], drop_rate=0.5, name="v"))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert same_bits(one, merge("dare_linear", zero, [model], drop_rate=0.5))
    finally:
        torch.set_num_threads(threads)


def test_both_models_get_their_own_mask_and_both_methods_the_same() -> None:
    zero, model = torch.zeros(2000), torch.ones(2000)
    both = merge("dare_linear", zero, [model, model], drop_rate=0.5)
    assert set(both.unique().tolist()) == {0.0, 2.0, 4.0}
    assert torch.equal(both != 0, merge("dare_ties", zero, [model, model], drop_rate=0.5) != 0)


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
def test_a_slice_with_l1_is_refused(method: str) -> None:
    with pytest.raises(ValueError, match="starts at entry 3"):
        merge(method, torch.zeros(3), [torch.ones(3)], rescale="l1", start=3)
