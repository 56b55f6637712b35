"""The plane of two task vectors: the cosine and the share outside it, against a dense least-squares fit."""

import math
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mergelab.engine.geometry import ExactSum, Plane
from tests.merges.inputs import REPEATABLE, merge, normal


def plane_of(first: torch.Tensor, second: torch.Tensor, merged: torch.Tensor, blocks: int = 3) -> Plane:
    plane = Plane()
    for parts in zip(*(t.reshape(-1).chunk(blocks) for t in (first, second, merged)), strict=True):
        plane.add(*parts)
    return plane


def by_least_squares(first: torch.Tensor, second: torch.Tensor, merged: torch.Tensor) -> float:
    basis = torch.stack((first.reshape(-1), second.reshape(-1)), dim=1).double()
    target = merged.reshape(-1).double()
    fit = basis @ torch.linalg.lstsq(basis, target[:, None], driver="gelsd").solution
    return float((target - fit[:, 0]).norm() / target.norm())


@pytest.mark.parametrize("overlap", [0.0, 0.5, 0.99])
def test_share_is_that_of_a_least_squares_fit(overlap: float) -> None:
    first, noise, merged = normal((40, 30), 0), normal((40, 30), 1), normal((40, 30), 2)
    second = overlap * first + (1 - overlap) * noise
    merged = merged + first - 2 * second
    plane = plane_of(first, second, merged)
    assert plane.outside_share() == pytest.approx(by_least_squares(first, second, merged), abs=1e-4)
    expected = torch.nn.functional.cosine_similarity(first.view(-1), second.view(-1), dim=0)
    assert plane.cosine() == pytest.approx(float(expected), abs=1e-5)


def test_combination_of_the_vectors_lies_in_the_plane() -> None:
    first, second = normal((40, 30), 0), normal((40, 30), 1)
    share = plane_of(first, second, 0.3 * first - 2 * second).outside_share()
    assert share is not None and share < 2e-3


def test_hand_computed() -> None:
    e1, e2, e3 = torch.eye(3)
    assert plane_of(e1, e2, e3).outside_share() == 1
    assert plane_of(e1, e2, 3 * e1 + 4 * e3).outside_share() == pytest.approx(0.8)
    assert plane_of(e1, e1 + e2, e2).outside_share() == 0


def test_parallel_and_missing_vectors_span_a_line() -> None:
    e1, e2, _ = torch.eye(3)
    zero = torch.zeros(3)
    assert plane_of(e1, 2 * e1, e2 + e1).outside_share() == pytest.approx(math.sqrt(0.5))
    assert plane_of(zero, e1, e2 + e1).outside_share() == pytest.approx(math.sqrt(0.5))
    assert plane_of(zero, zero, e1).outside_share() == 1
    assert plane_of(e1, e2, zero).outside_share() is None
    assert plane_of(e1, zero, e1).cosine() is None
    assert Plane().outside_share() is None


def test_rounding_between_parallel_vectors_is_no_direction() -> None:
    products = {"aa": 1.0, "ab": 1.0, "bb": 1.0 + 1e-15, "am": 0.5, "bm": 0.50001, "mm": 1.0}
    plane = Plane(**{name: ExactSum(value) for name, value in products.items()})
    assert plane.outside_share() == pytest.approx(math.sqrt(0.75))


def test_overlap_trap_of_tsv_is_seen() -> None:
    """Two nearly equal Gaussian task vectors: half of the energy of TSV-M is made up."""
    zero, tau = torch.zeros(64, 48), normal((64, 48), 3)
    other = tau + 0.01 * normal((64, 48), 4)
    merged = merge("tsv", zero, [tau, other])
    plane = plane_of(tau, other, merged)
    cosine, share = plane.cosine(), plane.outside_share()
    assert cosine is not None and cosine > 0.99
    assert share is not None and share > 0.6
    averaged = merge("task_arithmetic", zero, [tau, other], lambda_=0.5)
    inside = plane_of(tau, other, averaged).outside_share()
    assert inside is not None and inside < 2e-3


@given(st.lists(st.floats(-1e30, 1e30), max_size=30), st.randoms(use_true_random=False), st.integers(0, 30))
@REPEATABLE
def test_a_sum_is_exact_in_any_order_and_grouping(terms: list[float], random: Random, cut: int) -> None:
    shuffled = list(terms)
    random.shuffle(shuffled)
    first, second = ExactSum(), ExactSum()
    for term in shuffled[:cut]:
        first.add(term)
    for term in shuffled[cut:]:
        second.add(term)
    first.add_sum(second)
    assert first.value() == math.fsum(terms)
