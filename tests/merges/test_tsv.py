import math

import numpy as np
import pytest
import torch
from torch import Tensor

from merges.parameters import Tsv
from merges.spectra import leading_triplets, lower_gram
from merges.tsv import inverse_root, merge_matrices, polar_factor, tsv
from tests.merges.inputs import ONE, block, merge, normal, same_bits
from tests.oracles.tsv import polar, tsv_m


def merged_delta(*vectors: Tensor, **values: object) -> Tensor:
    return merge("tsv", torch.zeros_like(vectors[0]), vectors, **values)


def power_law(size: int, seed: int) -> Tensor:
    left, right = (torch.linalg.qr(normal((size, size), seed + i))[0] for i in range(2))
    return left * torch.arange(1, size + 1) ** -0.7 @ right


def test_orthogonal_tasks_by_hand() -> None:
    one, two = torch.diag(torch.tensor([2.0, 1.0, 0.0, 0.0])), torch.diag(torch.tensor([0.0, 0.0, 3.0, 1.0]))
    torch.testing.assert_close(merged_delta(one, two), torch.diag(torch.tensor([2.0, 1.0, 3.0, 1.0])))


def test_overlap_of_equal_tasks_is_sqrt_two_long_and_half_made_up() -> None:
    vector = normal((64, 48), 0)
    left, values, right = torch.linalg.svd(vector, full_matrices=False)
    shared = (left[:, :24] * values[:24]) @ right[:24]
    merged = merged_delta(vector, vector)
    assert float(merged.norm() / shared.norm()) == pytest.approx(math.sqrt(2), abs=1e-4)
    cosine = float((merged * shared).sum() / merged.norm() / shared.norm())
    assert cosine == pytest.approx(math.sqrt(0.5), abs=1e-4)


@pytest.mark.parametrize("noise", [1.0, 0.3, 1e-2, 1e-4])
@pytest.mark.parametrize("shape", [(24, 24), (40, 24), (15, 33), (2, 2), (3, 2), (5, 5)])
def test_two_tasks_match_the_textbook(shape: tuple[int, int], noise: float) -> None:
    one = normal(shape, 0)
    two = one + noise * normal(shape, 1)
    expected = torch.from_numpy(tsv_m([one.double().numpy(), two.double().numpy()])).float()
    torch.testing.assert_close(merged_delta(one, two), expected, rtol=1e-4, atol=1e-4)


def test_real_shapes_of_spectrum_match_the_textbook() -> None:
    one, two = power_law(48, 0), power_law(48, 2)
    two = 0.8 * one + 0.6 * two
    expected = torch.from_numpy(tsv_m([one.double().numpy(), two.double().numpy()])).float()
    torch.testing.assert_close(merged_delta(one, two), expected, rtol=1e-4, atol=1e-5)


def test_three_tasks_match_the_textbook() -> None:
    vectors = [normal((20, 31), seed) for seed in range(3)]
    expected = torch.from_numpy(tsv_m([vector.double().numpy() for vector in vectors])).float()
    torch.testing.assert_close(merged_delta(*vectors), expected, rtol=1e-4, atol=1e-4)


def test_weights_and_lambda_scale_the_task_matrices() -> None:
    one, two = normal((12, 9), 0), normal((12, 9), 1)
    expected = 0.5 * torch.from_numpy(tsv_m([2 * one.double().numpy(), -0.3 * two.double().numpy()])).float()
    actual = merged_delta(one, two, weights=[2, -0.3], lambda_=0.5)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_one_full_rank_task_returns_its_vector() -> None:
    vector = normal((7, 5), 0).double()
    torch.testing.assert_close(merge_matrices([vector]), vector)


@pytest.mark.parametrize("shape", [(12, 7), (7, 12)])
def test_transposition_goes_through(shape: tuple[int, int]) -> None:
    one, two = normal(shape, 0), normal(shape, 1)
    torch.testing.assert_close(merged_delta(one.T, two.T), merged_delta(one, two).T.contiguous(), rtol=1e-5, atol=1e-5)


def test_order_of_tasks_does_not_matter() -> None:
    one, two = normal((12, 7), 0), normal((12, 7), 1)
    torch.testing.assert_close(merged_delta(one, two), merged_delta(two, one), rtol=1e-5, atol=1e-5)


def test_scale_goes_through() -> None:
    one, two = normal((12, 7), 0), normal((12, 7), 1)
    torch.testing.assert_close(merged_delta(8 * one, 8 * two), 8 * merged_delta(one, two), rtol=1e-5, atol=1e-4)


def test_leading_triplets_of_a_steep_spectrum_are_orthonormal() -> None:
    left, right = (torch.linalg.qr(normal((30, 30), i).double())[0] for i in range(2))
    values = 10.0 ** (-torch.arange(30).double() / 2)
    found = leading_triplets(left * values @ right, 12)
    torch.testing.assert_close(found.left.T @ found.left, torch.eye(12).double(), rtol=0, atol=1e-6)
    torch.testing.assert_close(found.values, values[:12], rtol=1e-3, atol=1e-16)


@pytest.mark.parametrize("shape", [(5, 3), (300, 64), (310, 257), (70, 300)])
def test_lower_gram_has_the_lower_triangle(shape: tuple[int, int]) -> None:
    matrix = normal(shape, 0).double()
    torch.testing.assert_close(lower_gram(matrix).tril(), (matrix.T @ matrix).tril())


@pytest.mark.parametrize("shape", [(150, 210), (210, 150)])
def test_matrices_of_several_strips_match_the_textbook(shape: tuple[int, int]) -> None:
    one = normal(shape, 0)
    two = one + 0.5 * normal(shape, 1)
    expected = torch.from_numpy(tsv_m([one.double().numpy(), two.double().numpy()]))
    torch.testing.assert_close(merge_matrices([one.double(), two.double()]), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_inverse_root_of_the_gram_matrix(num_blocks: int) -> None:
    blocks = [torch.linalg.qr(normal((30, 6), seed).double())[0] for seed in range(num_blocks)]
    joined = torch.cat(blocks, dim=1)
    root = inverse_root(blocks)
    assert root is not None
    torch.testing.assert_close(root @ (joined.T @ joined) @ root, torch.eye(6 * num_blocks).double())
    assert inverse_root([*blocks, blocks[0]]) is None, "columns that coincide have no inverse root"


def test_null_directions_take_no_part() -> None:
    # Of a rank 1 task the textbook adds 11 arbitrary columns, which turn the other task.
    low, full = torch.outer(normal((24,), 0), normal((24,), 1)), normal((24, 24), 2)
    assert leading_triplets(low.double(), 12).values.numel() == 1
    merged = merge_matrices([low.double(), full.double()])
    part = leading_triplets(full.double(), 12)
    one = leading_triplets(low.double(), 1)
    values = torch.cat((one.values, part.values)).numpy()
    left, right = (
        polar(np.hstack([a.numpy(), b.numpy()])) for a, b in ((one.left, part.left), (one.right, part.right))
    )
    torch.testing.assert_close(merged, torch.from_numpy(left @ np.diag(values) @ right.T))


def test_a_task_without_change_leaves_the_truncated_other() -> None:
    vector = normal((10, 10), 0)
    part = leading_triplets(vector.double(), 5)
    expected = ((part.left * part.values) @ part.right.T).float()
    torch.testing.assert_close(merged_delta(torch.zeros(10, 10), vector), expected, rtol=1e-5, atol=1e-5)
    zero = torch.full((10, 10), -0.0)
    assert same_bits(merge("tsv", zero, [zero, zero]), zero)


@pytest.mark.parametrize("gap", [1.0, 1e-2, 1e-3, 1e-5, 0.0])
def test_polar_factor_has_orthonormal_columns_however_close_the_blocks(gap: float) -> None:
    one = torch.linalg.qr(normal((30, 8), 0).double())[0]
    two = torch.linalg.qr(one + gap * normal((30, 8), 1).double())[0]
    factor = polar_factor([one, two])
    torch.testing.assert_close(factor.T @ factor, torch.eye(16).double(), rtol=0, atol=1e-7)
    if gap >= 1e-3:
        expected = torch.from_numpy(polar(torch.cat((one, two), dim=1).numpy()))
        torch.testing.assert_close(factor, expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("embedding", (9, 6)),
        ("head", (9, 6)),
        ("norm", (6,)),
        ("bias", (6,)),
        ("other", (6,)),
        ("mlp", (1, 6)),
    ],
)
def test_what_is_no_map_gets_the_mean(kind: str, shape: tuple[int, ...]) -> None:
    zero, one, two = (normal(shape, seed) for seed in range(3))
    merged = merge("tsv", zero, [one, two], kind=kind, weights=[1, 0.5], lambda_=0.5)
    torch.testing.assert_close(merged, zero + 0.5 * ((one - zero) + 0.5 * (two - zero)) / 2)


@pytest.mark.parametrize("kind", ["attention", "mlp", "other"])
def test_matrices_do_not_get_the_mean(kind: str) -> None:
    one, two = normal((9, 6), 0), normal((9, 6), 1)
    merged = merged_delta(one, two, kind=kind)
    assert float((merged - (one + two) / 2).norm()) > 0.5
    torch.testing.assert_close(merged, merge_matrices([one.double(), two.double()]).float())


def test_stacks_are_merged_slice_by_slice() -> None:
    zero, one, two = (normal((3, 8, 6), seed) for seed in range(3))
    merged = merge("tsv", zero, [one, two], kind="mlp")
    for expert in range(3):
        alone = merge("tsv", zero[expert], [one[expert], two[expert]], kind="mlp")
        assert same_bits(merged[expert], alone)


def test_one_task_vector_is_refused() -> None:
    with pytest.raises(ValueError, match="1 task vector it is task arithmetic"):
        tsv(torch.zeros(3, 3), [torch.ones(3, 3)], Tsv(), block(ONE))
    with pytest.raises(ValueError, match="starts at entry 9"):
        merge("tsv", torch.zeros(3, 3), [torch.ones(3, 3)] * 2, start=9)
