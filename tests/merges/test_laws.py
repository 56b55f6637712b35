"""What every method answers to, whatever the sizes, types and numbers."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from merges.methods import METHODS
from merges.parameters import PARAMETERS, build
from tests.merges.inputs import REPEATABLE, TWO, block, merge, normal, same_bits

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SHAPES = st.sampled_from([(0,), (1,), (2,), (3,), (), (0, 8), (1, 1), (4, 4), (3, 5), (2, 3, 4)])
NUMBERS = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 2.0**-24, -3.75, 100.0])
MODEL_METHODS = ("linear", "slerp")
VECTOR_METHODS = [name for name in PARAMETERS if name not in MODEL_METHODS]
SCALED_METHODS = [name for name in VECTOR_METHODS if name != "gaussian"]


@st.composite
def tensors(draw: st.DrawFn, count: int) -> list[Tensor]:
    shape, dtype = draw(SHAPES), draw(DTYPES)
    size = math.prod(shape)
    rows = draw(st.lists(st.lists(NUMBERS, min_size=size, max_size=size), min_size=count, max_size=count))
    return [torch.tensor(row, dtype=torch.float32).to(dtype).view(shape) for row in rows]


def defaults(method: str) -> dict[str, object]:
    return {"weights": [0.5, 0.5]} if method == "linear" else {}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_parameters_and_a_function_of_its_name(method: str) -> None:
    assert METHODS[method].__name__ == method
    assert set(METHODS) == set(PARAMETERS)


@pytest.mark.parametrize("method", METHODS)
@given(inputs=tensors(3))
@REPEATABLE
def test_result_is_float32_of_the_same_shape_and_inputs_are_untouched(method: str, inputs: list[Tensor]) -> None:
    before = [tensor.clone() for tensor in inputs]
    merged = merge(method, inputs[0], inputs[1:], **defaults(method))
    assert merged.dtype == torch.float32
    assert merged.shape == inputs[0].shape
    assert torch.isfinite(merged).all()
    for tensor, copy in zip(inputs, before, strict=True):
        assert same_bits(tensor.float(), copy.float())
        assert merged.numel() == 0 or merged.data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("method", METHODS)
@given(inputs=tensors(1), num_models=st.integers(1, 2))
@REPEATABLE
def test_no_change_returns_the_zero_point_bit_for_bit(method: str, inputs: list[Tensor], num_models: int) -> None:
    if num_models == 1 and method in ("tsv", *MODEL_METHODS):
        return
    zero = inputs[0]
    assert same_bits(merge(method, zero, [zero] * num_models, **defaults(method)), zero.float())


@pytest.mark.parametrize("method", SCALED_METHODS)
@given(inputs=tensors(3), num_models=st.integers(1, 2))
@REPEATABLE
def test_lambda_zero_returns_the_zero_point_bit_for_bit(method: str, inputs: list[Tensor], num_models: int) -> None:
    if num_models == 1 and method == "tsv":
        return
    zero, *models = inputs
    assert same_bits(merge(method, zero, models[:num_models], lambda_=0), zero.float())


@pytest.mark.parametrize(
    ("method", "identity"),
    [
        ("task_arithmetic", {}),
        ("ties", {"density": 1}),
        ("dare_linear", {"drop_rate": 0}),
        ("dare_ties", {"drop_rate": 0}),
    ],
)
@given(inputs=tensors(2))
@REPEATABLE
def test_one_whole_vector_returns_the_model_bit_for_bit(
    method: str, identity: dict[str, object], inputs: list[Tensor]
) -> None:
    assert same_bits(merge(method, inputs[0], inputs[1:], **identity), inputs[1].float())


@pytest.mark.parametrize("method", [name for name in METHODS if PARAMETERS[name].scope != "tensor" and name != "ties"])
@given(inputs=tensors(3), cut=st.floats(0, 1))
@REPEATABLE
def test_any_slicing_gives_the_same_entries(method: str, inputs: list[Tensor], cut: float) -> None:
    flat = [tensor.flatten() for tensor in inputs]
    whole = merge(method, flat[0], flat[1:], **defaults(method))
    middle = round(cut * whole.numel())
    parts = [
        merge(method, *split_at(flat, first, last), start=first, **defaults(method))
        for first, last in ((0, middle), (middle, whole.numel()))
    ]
    assert same_bits(torch.cat(parts), whole)


def split_at(tensors: list[Tensor], first: int, last: int) -> tuple[Tensor, list[Tensor]]:
    zero, *models = (tensor[first:last] for tensor in tensors)
    return zero, models


@pytest.mark.parametrize("method", ["linear", "task_arithmetic", "dare_linear", "dare_ties"])
def test_any_slicing_of_a_large_tensor_gives_the_same_entries(method: str) -> None:
    flat = [normal((10_007,), seed) for seed in range(3)]
    whole = merge(method, flat[0], flat[1:], **defaults(method))
    edges = [0, 1, 64, 4099, 10_000, 10_007]
    parts = [
        merge(method, *split_at(flat, first, last), start=first, **defaults(method)) for first, last in pairwise(edges)
    ]
    assert same_bits(torch.cat(parts), whole)


@pytest.mark.parametrize("method", SCALED_METHODS)
def test_order_of_the_models_is_irrelevant_up_to_rounding(method: str) -> None:
    zero, one, two = (normal((12, 9), seed) for seed in range(3))
    parameters = build(method, {"weights": {"base": 0.5, "vlm": 2}}, TWO)
    forth = METHODS[method](zero, [one, two], parameters, block(("base", "vlm")))
    back = METHODS[method](zero, [two, one], parameters, block(("vlm", "base")))
    torch.testing.assert_close(forth, back, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", SCALED_METHODS)
def test_scaling_the_vectors_scales_the_change(method: str) -> None:
    one, two = (normal((12, 9), seed) for seed in range(2))
    zero = torch.zeros(12, 9)
    torch.testing.assert_close(
        merge(method, zero, [4 * one, 4 * two]), 4 * merge(method, zero, [one, two]), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("method", METHODS)
def test_views_and_layouts_do_not_matter(method: str) -> None:
    inputs = [normal((9, 12), seed) for seed in range(3)]
    turned = [tensor.T.contiguous().T for tensor in inputs]
    assert not turned[0].is_contiguous()
    expected = merge(method, inputs[0], inputs[1:], **defaults(method))
    assert same_bits(merge(method, turned[0], turned[1:], **defaults(method)), expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_nan_and_infinity_are_refused_and_named(method: str, place: int, bad: float) -> None:
    if method in MODEL_METHODS and place == 0:
        return
    inputs = [torch.ones(2, 3) for _ in range(3)]
    inputs[place][1, 2] = bad
    role = ("zero point", "base", "vlm")[place]
    with pytest.raises(ValueError, match=f"{role}: expected finite float32 numbers, found 1 NaN"):
        merge(method, inputs[0], inputs[1:], **defaults(method))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.complex64])
@pytest.mark.parametrize("method", METHODS)
def test_f19_other_types_are_refused(method: str, dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"found {dtype}"):
        merge(method, torch.ones(2), [torch.ones(2), torch.ones(2).to(dtype)], **defaults(method))


@pytest.mark.parametrize("method", METHODS)
def test_tensors_that_do_not_fit_are_refused(method: str) -> None:
    with pytest.raises(ValueError, match=r"vlm: expected shape \(2,\), found \(3,\)"):
        merge(method, torch.ones(2), [torch.ones(2), torch.ones(3)], **defaults(method))
    parameters = build(method, {"normalize": True} if method == "linear" else {}, TWO)
    with pytest.raises(ValueError, match="found 1"):
        METHODS[method](torch.ones(2), [torch.ones(2)], parameters, block(TWO))
    if method not in MODEL_METHODS:
        with pytest.raises(ValueError, match="a zero point is needed"):
            METHODS[method](None, [torch.ones(2)] * 2, parameters, block(TWO))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(1,), (4,), (), (0, 8)])
def test_f4_tiny_and_empty_tensors_give_a_result(method: str, shape: tuple[int, ...]) -> None:
    values = defaults(method) | ({"density": 0.1} if method == "ties" else {})
    merged = merge(method, torch.zeros(shape), [torch.ones(shape)] * 2, **values)
    assert merged.shape == shape
    assert torch.isfinite(merged).all()
    if method == "ties":
        assert int(merged.count_nonzero()) == min(1, merged.numel())
