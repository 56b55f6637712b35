"""Values against mergekit on float32 tensors in memory: where conventions agree, and with `mergekit`."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from merges.dare import dare_mask
from tests.merges.inputs import TWO, block, merge, normal

with warnings.catch_warnings():
    # mergekit's own dependencies deprecate themselves at import; nothing of ours is involved.
    warnings.simplefilter("ignore", DeprecationWarning)
    from mergekit import merge_methods


def by_mergekit(method: str, inputs: list[Tensor], base: bool = True, **parameters: Any) -> Tensor:
    result: Tensor = merge_methods.merge_tensors(inputs, method, parameters=parameters, base_index=0 if base else None)
    return result


def inputs(seed: int = 0) -> list[Tensor]:
    return [normal((57, 43), seed + i) for i in range(3)]


@pytest.mark.parametrize("weights", [[0.5, 0.5], [0.2, 0.8], [1.3, 0.9]])
def test_linear(weights: list[float]) -> None:
    zero, *models = inputs()
    expected = by_mergekit("linear", models, base=False, weight=weights)
    actual = merge("linear", zero, models, "mergekit", weights=weights)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("weights", [[1.0, 1.0], [0.5, 2.0], [-0.3, 1.0]])
@pytest.mark.parametrize("conventions", ["paper", "mergekit"])
def test_task_arithmetic(weights: list[float], conventions: str) -> None:
    zero, *models = inputs()
    expected = by_mergekit("task_arithmetic", [zero, *models], weight=weights, **{"lambda": 0.7})
    actual = merge("task_arithmetic", zero, models, conventions, weights=weights, lambda_=0.7)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("density", [0.1, 0.2, 0.5, 1.0])
def test_ties_of_the_paper_with_equal_weights(density: float) -> None:
    zero, *models = inputs()
    expected = by_mergekit("ties", [zero, *models], weight=1.0, density=density, **{"lambda": 0.7})
    actual = merge("ties", zero, models, density=density, lambda_=0.7)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("weights", [[1.0, 1.0], [1.6, 0.2], [0.0, 1.0]])
def test_ties_with_conventions_of_mergekit(weights: list[float]) -> None:
    zero, *models = inputs()
    expected = by_mergekit("ties", [zero, *models], weight=weights, density=0.3, **{"lambda": 0.7})
    values: dict[str, Any] = {"density": 0.3, "weights": weights, "lambda_": 0.7}
    actual = merge("ties", zero, models, "mergekit", **values)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    if weights == [1.6, 0.2]:
        paper = merge("ties", zero, models, **values)
        assert float((paper - expected).abs().max()) > 0.1, "the conventions differ on these weights"


def test_ties_zero_sum_with_conventions_of_mergekit() -> None:
    zero, models = torch.zeros(2), [torch.tensor([1.0, 2.0]), torch.tensor([-1.0, 2.0])]
    expected = by_mergekit("ties", [zero, *models], weight=1.0)
    assert merge("ties", zero, models, "mergekit").tolist() == expected.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("t", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("noise", [10.0, 0.5, 1e-3])
def test_slerp(t: float, noise: float) -> None:
    first, other, _ = inputs()
    models = [first, first + noise * other]
    expected = by_mergekit("slerp", models, t=t)
    actual = merge("slerp", first, models, "mergekit", t=t)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def test_slerp_of_one_dimension_and_opposite_models() -> None:
    for one, two in (([3.0, 0.0, 4.0], [0.0, 2.0, 0.0]), ([1.0, 2.0], [-1.0, -2.0])):
        models = [torch.tensor(one), torch.tensor(two)]
        torch.testing.assert_close(
            merge("slerp", models[0], models, "mergekit", t=0.3), by_mergekit("slerp", models, t=0.3)
        )


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
@pytest.mark.parametrize("weights", [[1.0, 1.0], [-0.4, 1.7]])
def test_dare_with_conventions_of_mergekit_on_the_same_masks(
    method: str, weights: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    zero, *models = inputs()
    masks = iter([dare_mask(role, 0.6, block(TWO), zero).float() for role in TWO])
    monkeypatch.setattr(torch, "bernoulli", lambda _: next(masks))
    expected = by_mergekit(method, [zero, *models], weight=weights, density=0.4, **{"lambda": 0.7})
    actual = merge(method, zero, models, "mergekit", drop_rate=0.6, weights=weights, lambda_=0.7)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
