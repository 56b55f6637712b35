"""Norms and ranks against singular values, and sums against whole tensors."""

import math

import pytest
import torch

from mergelab.sinks.drift import Drift, operator_norm, spread, stable_rank


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(30, 30), (12, 50), (50, 12), (1, 7)])
def test_operator_norm_is_the_largest_singular_value(shape: tuple[int, int]) -> None:
    matrix = random(*shape)
    expected = float(torch.linalg.svdvals(matrix)[0])
    found = operator_norm(matrix, seed=0)
    assert found == pytest.approx(expected, rel=2e-4)
    assert found <= expected * (1 + 1e-6)
    assert operator_norm(matrix, seed=0) == found


def test_norms_of_matrices_known_by_heart() -> None:
    assert operator_norm(torch.diag(torch.tensor([3.0, -7.0, 1.0])), 0) == pytest.approx(7.0)
    assert operator_norm(torch.zeros(3, 4), 0) == 0.0
    assert stable_rank(torch.zeros(3, 4), 0.0) is None
    assert stable_rank(torch.eye(5), operator_norm(torch.eye(5), 0)) == pytest.approx(5.0)
    outer = torch.outer(random(6), random(9, seed=1))
    assert stable_rank(outer, operator_norm(outer, 0)) == pytest.approx(1.0, rel=1e-5)


def test_sums_over_blocks_equal_whole_tensors() -> None:
    before, after = random(8, 6), random(8, 6, seed=1)
    drift = Drift()
    for layer, rows in ((0, slice(0, 3)), (0, slice(3, 4)), (2, slice(4, 8))):
        drift.add(layer, before[rows].flatten(), after[rows].flatten())
    record = drift.record()
    assert record["relative_frobenius"] == pytest.approx(float((after - before).norm() / before.norm()))
    assert record["per_layer"]["2"] == pytest.approx(float((after - before)[4:].norm() / before[4:].norm()))
    assert record["operator_norm"] is None


def test_matrices_give_medians_over_the_layers_read() -> None:
    drift = Drift()
    for layer, factor in ((0, 1.0), (3, 2.0), (4, 5.0)):
        drift.add_matrix(layer, torch.eye(4), (1 + factor) * torch.eye(4), seed=0)
    record = drift.record()
    assert record["sampled_layers"] == [0, 3, 4]
    assert record["operator_norm"] == pytest.approx(1.0)
    assert record["delta_operator_norm"] == pytest.approx(2.0)
    assert record["relative_operator_norm"] == pytest.approx(2.0)
    assert record["stable_rank"] == pytest.approx(4.0)


def test_zero_weights_have_no_relative_change() -> None:
    drift = Drift()
    drift.add(None, torch.zeros(3), torch.ones(3))
    assert drift.record()["relative_frobenius"] is None
    assert math.isclose(drift.moved[None], 3.0)


def test_spread_takes_both_ends() -> None:
    assert spread(list(range(28))) == [0, 4, 8, 12, 15, 19, 23, 27]
    assert spread([3, 5]) == [3, 5]
