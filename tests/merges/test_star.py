import pytest
import torch
from torch import Tensor

from merges.star import truncated
from tests.merges.inputs import merge, normal, same_bits
from tests.oracles.spectral import star as oracle


def merged_delta(*vectors: Tensor, **values: object) -> Tensor:
    return merge("star", torch.zeros_like(vectors[0]), vectors, **values)


def expected(vectors: list[Tensor], eta: float) -> Tensor:
    return torch.from_numpy(oracle([vector.double().numpy() for vector in vectors], eta)).float()


def test_the_worked_example_cuts_to_rank_two_and_rescales() -> None:
    vector = torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0]))
    scaled = torch.diag(torch.tensor([4.0, 3.0, 0.0, 0.0])) * 10 / 7
    torch.testing.assert_close(merged_delta(vector, eta=50), scaled)
    torch.testing.assert_close(merged_delta(vector, torch.zeros(4, 4), eta=50), scaled / 2)


@pytest.mark.parametrize("eta", [1, 40, 80, 99.9])
@pytest.mark.parametrize("shape", [(24, 24), (40, 24), (15, 33), (2, 2), (1, 6), (6, 1)])
def test_matches_the_textbook(shape: tuple[int, int], eta: float) -> None:
    vectors = [normal(shape, seed) for seed in range(2)]
    torch.testing.assert_close(merged_delta(*vectors, eta=eta), expected(vectors, eta), rtol=1e-5, atol=1e-5)


def test_eta_100_is_the_average() -> None:
    one, two = normal((9, 7), 0), normal((9, 7), 1)
    torch.testing.assert_close(merged_delta(one, two, eta=100), (one + two) / 2)


def test_weights_and_lambda() -> None:
    one, two = normal((9, 7), 0), normal((9, 7), 1)
    found = merged_delta(one, two, weights=[2, -0.5], lambda_=0.3)
    torch.testing.assert_close(found, 0.3 * expected([2 * one, -0.5 * two], 40), rtol=1e-5, atol=1e-5)


def test_the_nuclear_norm_stays() -> None:
    matrix = normal((30, 20), 0).double()
    found, before = (torch.linalg.svdvals(m).sum() for m in (truncated(matrix, 40), matrix))
    torch.testing.assert_close(found, before)


@pytest.mark.parametrize("rank", [1, 3])
def test_low_rank_keeps_its_matrix_whole_at_nearly_all_of_the_norm(rank: int) -> None:
    matrix = normal((20, rank), 0) @ normal((rank, 16), 1)
    torch.testing.assert_close(merged_delta(matrix, eta=100), matrix)
    assert int((torch.linalg.svdvals(merged_delta(matrix, eta=99.999)) > 1e-4).sum()) == rank


def test_transposition_goes_through() -> None:
    vector = normal((12, 7), 0)
    torch.testing.assert_close(merged_delta(vector.T), merged_delta(vector).T.contiguous(), rtol=1e-5, atol=1e-5)


def test_a_task_without_change_adds_nothing() -> None:
    zero = torch.full((4, 4), -0.0)
    assert same_bits(merge("star", zero, [zero, zero]), zero)
