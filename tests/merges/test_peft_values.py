"""Values against the merge utilities of peft on task vectors in memory, with the conventions `peft`."""

import warnings

import pytest
import torch
from torch import Tensor

from merges.dare import dare_mask
from tests.merges.inputs import TWO, block, merge, normal

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from peft.utils import merge_utils

ZERO = torch.zeros(57, 43)


def vectors() -> list[Tensor]:
    return [normal((57, 43), seed) for seed in range(2)]


@pytest.mark.parametrize("weights", [[1.0, 1.0], [0.5, 2.0], [-0.3, 1.0]])
@pytest.mark.parametrize(("elect", "name"), [("raw", "total"), ("count", "frequency")])
def test_ties(weights: list[float], elect: str, name: str) -> None:
    expected = merge_utils.ties(vectors(), torch.tensor(weights), 0.3, name)
    actual = merge("ties", ZERO, vectors(), "peft", density=0.3, weights=weights, elect=elect)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
    if weights != [1.0, 1.0]:
        assert not torch.allclose(merge("ties", ZERO, vectors(), density=0.3), expected)


def test_ties_may_keep_nothing_of_a_tiny_tensor() -> None:
    tiny = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 1.0])]
    expected = merge_utils.ties(tiny, torch.ones(2), 0.4)
    assert merge("ties", torch.zeros(2), tiny, "peft", density=0.4).tolist() == expected.tolist() == [0.0, 0.0]
    assert merge("ties", torch.zeros(2), tiny, density=0.4).tolist() == [3.0, 2.0]


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
def test_dare_on_the_same_masks(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    masks = iter([dare_mask(role, 0.6, block(TWO), ZERO).float() for role in TWO])
    monkeypatch.setattr(torch, "bernoulli", lambda _: next(masks))
    expected = getattr(merge_utils, method)(vectors(), torch.tensor([0.5, 2.0]), 0.4)
    actual = merge(method, ZERO, vectors(), "peft", drop_rate=0.6, weights=[0.5, 2.0])
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_task_arithmetic() -> None:
    expected = merge_utils.task_arithmetic(vectors(), torch.tensor([0.5, 2.0]))
    torch.testing.assert_close(merge("task_arithmetic", ZERO, vectors(), "peft", weights=[0.5, 2.0]), expected)
