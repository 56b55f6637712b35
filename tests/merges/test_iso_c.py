import pytest
import torch
from torch import Tensor

from merges.iso_c import flattened
from tests.merges.inputs import merge, normal, same_bits
from tests.oracles.spectral import iso_c as oracle


def merged_delta(*vectors: Tensor, **values: object) -> Tensor:
    return merge("iso_c", torch.zeros_like(vectors[0]), vectors, **values)


def expected(vectors: list[Tensor]) -> Tensor:
    return torch.from_numpy(oracle([vector.double().numpy() for vector in vectors])).float()


def test_the_worked_example_is_flat_and_not_the_vector() -> None:
    found = merged_delta(torch.diag(torch.tensor([3.0, 1.0])))
    torch.testing.assert_close(found, torch.diag(torch.tensor([2.0, 2.0])))


@pytest.mark.parametrize("shape", [(24, 24), (40, 24), (15, 33), (2, 2), (1, 6)])
def test_matches_the_textbook(shape: tuple[int, int]) -> None:
    vectors = [normal(shape, seed) for seed in range(3)]
    torch.testing.assert_close(merged_delta(*vectors), expected(vectors), rtol=1e-5, atol=1e-5)


def test_weights_and_lambda() -> None:
    one, two = normal((9, 7), 0), normal((9, 7), 1)
    found = merged_delta(one, two, weights=[2, -0.5], lambda_=0.3)
    torch.testing.assert_close(found, 0.3 * expected([2 * one, -0.5 * two]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("power", [2, 4, 6])
def test_steep_spectra_are_flat_afterwards(power: int) -> None:
    left, right = (torch.linalg.qr(normal((20, 20), i).double())[0] for i in range(2))
    values = 10.0 ** -torch.linspace(0, power, 20).double()
    found = torch.linalg.svdvals(flattened(left * values @ right))
    torch.testing.assert_close(found, torch.full((20,), float(values.mean())).double(), rtol=1e-6, atol=0)


def test_null_directions_get_nothing() -> None:
    matrix = torch.zeros(6, 6)
    matrix[0, 0], matrix[1, 1] = 4.0, 2.0
    assert merged_delta(matrix).diagonal().tolist() == pytest.approx([1.0, 1.0, 0, 0, 0, 0])
    low = normal((12, 2), 0) @ normal((2, 9), 1)
    values = torch.linalg.svdvals(merged_delta(low))
    assert values[:2].tolist() == pytest.approx([float(torch.linalg.svdvals(low).mean())] * 2, rel=1e-4)
    assert float(values[2]) < 1e-5


def test_transposition_goes_through() -> None:
    vector = normal((12, 7), 0)
    torch.testing.assert_close(merged_delta(vector.T), merged_delta(vector).T.contiguous(), rtol=1e-5, atol=1e-5)


def test_vectors_that_cancel_add_nothing() -> None:
    zero, one = torch.full((4, 4), -0.0), normal((4, 4), 0)
    assert same_bits(merge("iso_c", zero, [one, one], weights=[1, -1]), zero)
