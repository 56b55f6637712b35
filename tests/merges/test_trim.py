import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from merges import trim
from merges.trim import kept_count, trim_counts, trim_mask
from tests.merges.inputs import REPEATABLE, normal
from tests.oracles.merging import trim as oracle_trim

# Few distinct magnitudes, so that the threshold is often shared, and every special number a delta can have.
VALUES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 1e-45, -1e-45, 1.0000001, 3.4e38, 65535.0, 65536.0])


def expected_mask(delta: Tensor, density: Fraction) -> Tensor:
    return torch.tensor(oracle_trim(delta.flatten().tolist(), density)).view(delta.shape) != 0


@pytest.mark.parametrize(
    ("num_entries", "density", "count"),
    [
        (100, 0.29, 29),
        (300, 1 / 3, 100),
        (10, 0.2, 2),
        (10, 0.29, 2),
        (4, 0.1, 1),
        (1, 0.1, 1),
        (0, 0.5, 0),
        (7, 1.0, 7),
        (7, 0.999, 6),
        (10**9, 0.7, 7 * 10**8),
    ],
)
def test_count_is_the_floor_that_was_meant(num_entries: int, density: float, count: int) -> None:
    assert kept_count(num_entries, density) == count


def test_the_plain_floor_loses_an_entry() -> None:
    assert int(0.29 * 100) == 28


@given(st.integers(0, 10**9), st.integers(1, 1000))
@REPEATABLE
def test_count_is_the_floor_of_the_written_decimal(num_entries: int, thousandths: int) -> None:
    exact = math.floor(Fraction(thousandths, 1000) * num_entries)
    assert kept_count(num_entries, thousandths / 1000, "floor") == exact


@pytest.mark.parametrize("density", [0.0, -0.5, 1.0000001, math.nan])
def test_f8_density_outside_its_range_is_refused(density: float) -> None:
    with pytest.raises(ValueError, match=f"found {density}"):
        trim_mask(torch.ones(3), density)


@given(st.lists(VALUES, min_size=1, max_size=40), st.integers(1, 20))
@REPEATABLE
def test_mask_is_that_of_the_oracle(values: list[float], twentieths: int) -> None:
    delta = torch.tensor(values)
    mask = trim_mask(delta, twentieths / 20)
    assert torch.equal(mask, expected_mask(delta, Fraction(twentieths, 20)))
    asked, kept = trim_counts(delta, twentieths / 20)
    assert kept == int(mask.sum()) <= asked


@pytest.mark.parametrize("density", [0.001, 0.2, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("kind", ["normal", "bf16 ties", "mostly zero", "one bucket"])
def test_mask_is_that_of_a_stable_sort(kind: str, density: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trim, "CPU_CHUNK", 1000)
    fresh = normal((101, 97), 0)
    delta = {
        "normal": fresh,
        "bf16 ties": (fresh * 0.02).bfloat16().float() - (normal((101, 97), 1) * 0.02).bfloat16().float(),
        "mostly zero": torch.where(fresh > 1.5, fresh, 0.0),
        "one bucket": 1 + fresh.sigmoid() * 1e-3,
    }[kind]
    order = torch.sort(delta.abs().flatten(), descending=True, stable=True).indices
    expected = torch.zeros(delta.numel(), dtype=torch.bool)
    expected[order[: kept_count(delta.numel(), density)]] = True
    assert torch.equal(trim_mask(delta, density), expected.view(delta.shape) & (delta != 0))


def test_ties_at_the_threshold_go_to_the_lowest_index() -> None:
    assert trim_mask(torch.tensor([[1.0, -2.0], [2.0, 2.0]]), 0.5).tolist() == [[False, True], [True, False]]


def test_zeros_are_never_kept() -> None:
    delta = torch.tensor([0.0, 3.0, -0.0, 0.0])
    assert trim_mask(delta, 1.0).tolist() == [False, True, False, False]
    assert trim_counts(delta, 0.5) == (2, 1)
    assert trim_mask(torch.zeros(5), 0.2).sum() == 0


@pytest.mark.parametrize("shape", [(1,), (4,), (), (0, 8)])
def test_f4_tiny_tensors_keep_one_entry(shape: tuple[int, ...]) -> None:
    mask = trim_mask(torch.ones(shape), 0.1)
    assert mask.shape == shape
    assert int(mask.sum()) == min(1, mask.numel())
    assert int(trim_mask(torch.ones(shape), 0.1, "floor").sum()) == 0


def test_layout_does_not_matter() -> None:
    delta = normal((6, 5), 3)
    assert torch.equal(trim_mask(delta.T.contiguous().T, 0.3), trim_mask(delta, 0.3))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_has_no_magnitude_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="found 1 that are not"):
        trim_mask(torch.tensor([1.0, bad, 2.0]), 0.5)
    with pytest.raises(ValueError, match="float64"):
        trim_mask(torch.ones(3, dtype=torch.float64), 0.5)


@pytest.mark.gpu
def test_a_gpu_keeps_the_same_entries() -> None:
    delta = normal((1000, 301), 0).bfloat16().float()
    assert torch.equal(trim_mask(delta.cuda(), 0.2).cpu(), trim_mask(delta, 0.2))
