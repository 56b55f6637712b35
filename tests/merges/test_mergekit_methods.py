"""The table of mergekit's methods: that it is true of the installed mergekit, and what it refuses."""

import warnings
from importlib.metadata import version
from typing import Any

import pytest

from merges.mergekit_methods import MERGEKIT, VERSION, build_mergekit, mergekit_inputs
from merges.parameters import ByMergekit, ParameterErrors, build, canonical, describe

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from mergekit import merge_methods

TWO = ("base", "vlm")
ONE = ("vlm",)
WANTED: dict[str, dict[str, Any]] = {"slerp": {"t": 0.5}, "nearswap": {"t": 0.1}}


def wanted(name: str) -> dict[str, Any]:
    """Return values for what a method cannot be without."""
    return {slot.name: WANTED.get(name, {}).get(slot.name, 1.0) for slot in MERGEKIT[name].slots if slot.required}


def problems(method: str, values: dict[str, Any], vectors: tuple[str, ...] = TWO) -> list[str]:
    with pytest.raises(ParameterErrors) as caught:
        build(method, values, vectors)
    return caught.value.problems


def test_version_and_set_of_methods_are_those_installed() -> None:
    assert version("mergekit") == VERSION
    assert sorted(MERGEKIT) == sorted(method.spec.name for method in merge_methods.registered_methods())
    assert len(MERGEKIT) == 20


@pytest.mark.parametrize("name", sorted(MERGEKIT))
def test_table_is_the_specification_of_mergekit(name: str) -> None:
    ours, theirs = MERGEKIT[name], merge_methods.get(name).spec
    contract = theirs.contract
    assert ours.base == contract.base.value
    assert (ours.min_inputs, ours.max_inputs) == (contract.min_inputs, contract.max_inputs)
    assert (ours.min_others, ours.max_others) == (contract.min_non_base, contract.max_non_base)
    types = {"number": float, "flag": bool, "whole number": int}
    scopes = {"all": "shared", "model": "input", "vector": "non_base"}
    expected = {
        parameter.name: (
            parameter.value_type,
            parameter.scope.value,
            parameter.required,
            None if parameter.required else parameter.default,
        )
        for parameter in theirs.parameters
    }
    found = {
        slot.name: (
            (float | None) if slot.optional else types[slot.bounds.type_name],
            scopes[slot.per],
            slot.required,
            slot.default,
        )
        for slot in ours.slots
    }
    assert found == expected


@pytest.mark.parametrize("name", sorted(MERGEKIT))
@pytest.mark.parametrize("zero_point", ["ancestor", "base"])
def test_inputs_that_are_accepted_are_those_that_mergekit_accepts(name: str, zero_point: str) -> None:
    vectors, zero = mergekit_inputs(name, zero_point)
    ids = [*((zero,) if zero else ()), *vectors]
    if zero == "base":
        assert "base" not in vectors
    method = merge_methods.get(name)
    try:
        method.validate_inputs(
            [f"{position} {role}" for position, role in enumerate(ids)], f"0 {zero}" if zero else None
        )
    except ValueError:
        (problem,) = problems(f"mergekit:{name}", wanted(name), vectors)
        assert problem.startswith(f"method: mergekit:{name} takes ")
    else:
        assert isinstance(build(f"mergekit:{name}", wanted(name), vectors), ByMergekit)


def test_methods_that_do_not_fit_say_what_would() -> None:
    assert problems("mergekit:model_stock", {}, ONE) == [
        "method: mergekit:model_stock takes at least 3 models, found 2 (the zero point and vlm); take a zero point "
        "ancestor, which makes three"
    ]
    assert problems("mergekit:slerp", {"t": 0.5}, TWO) == [
        "method: mergekit:slerp takes exactly 2 models, found 3 (the zero point and base and vlm); write zero_point: "
        "base, which makes base and vlm the two"
    ]


def test_one_number_stands_for_every_model_and_makes_the_same_point() -> None:
    one = build("mergekit:ties", {"weight": 1, "density": 0.5}, TWO)
    each = build("mergekit:ties", {"weight": {"vlm": 1.0, "base": 1}, "density": {"base": 0.5, "vlm": 0.5}}, TWO)
    assert canonical(one) == canonical(each)
    assert canonical(one)["weight"] == {"base": 1.0, "vlm": 1.0}
    assert canonical(one)["normalize"] is True and canonical(one)["lambda"] == 1.0
    again = build("mergekit:ties", canonical(one), TWO)
    assert canonical(again) == canonical(one)


def test_everything_that_is_wrong_is_said_at_once() -> None:
    found = problems(
        "mergekit:della",
        {
            "weights": 1,
            "density": [0.1, 0.9],
            "lambda": {"base": 1},
            "normalize": 1,
            "epsilon": {"vlm": 0.1, "tower": 2},
        },
    )
    assert found == [
        "weights: mergekit:della has no such parameter; did you mean weight? known: weight, density, epsilon, lambda, "
        "normalize, rescale, int8_mask",
        "weight: missing, and mergekit has no default for it, any finite number or one per model",
        "density: a list over layers (mergekit's gradient) is not possible here; give one value, or one per model by "
        "role",
        "epsilon: there is no tower among the merged models (base, vlm)",
        "epsilon: no value for base; name all of base, vlm",
        "lambda: is one value for all models, found one per model",
        "normalize: expected true or false, found 1",
    ]


@pytest.mark.parametrize(
    ("name", "values", "vectors", "words"),
    [
        ("ties", {"weight": 0.3}, ONE, "cancels in mergekit:ties with normalize, found 0.3"),
        ("della", {"weight": -1.0}, ONE, "cancels in mergekit:della"),
        ("ties", {"weight": {"base": 1, "vlm": -1}}, TWO, "sum to 0 and cannot be normalized"),
        ("nuslerp", {"weight": {"base": 1, "vlm": -1}}, TWO, "sum to 0"),
        ("linear", {"weight": {"base": 1, "vlm": -1}}, TWO, "sum to 0"),
        ("task_arithmetic", {"weight": 1, "density": 0.5}, TWO, "does not use it: nothing is trimmed"),
        ("task_arithmetic", {"weight": 1, "rescale": True}, TWO, "does not use it"),
        ("della", {"weight": 1, "density": 0.9}, TWO, "density 0.9 -/+ epsilon 0.15 leaves (0, 1) for base"),
        ("ties", {"weight": 1, "density": 0}, TWO, "density: expected in (0, 1], found 0"),
        ("karcher", {"max_iter": 2.5}, TWO, "max_iter: expected a whole number of at least 1, found 2.5"),
        ("karcher", {"max_iter": True}, TWO, "max_iter: expected a whole number"),
        ("ties", {"weight": float("inf")}, TWO, "weight: expected any finite number"),
        ("ties", {"weight": True}, TWO, "weight: expected a number"),
        ("nuslerp", {"weight": 1, "nuslerp_row_wise": True}, TWO, "no effect on flattened tensors"),
        ("dela", {}, TWO, "did you mean `mergekit:della`?"),
    ],
)
def test_what_makes_no_sense_is_refused(
    name: str, values: dict[str, Any], vectors: tuple[str, ...], words: str
) -> None:
    assert any(words in problem for problem in problems(f"mergekit:{name}", values, vectors))


@pytest.mark.parametrize(
    ("name", "values"), [("della_linear", {"weight": 0.3}), ("ties", {"weight": 0.3, "normalize": False})]
)
def test_weight_of_one_vector_counts_without_normalize(name: str, values: dict[str, Any]) -> None:
    assert build(f"mergekit:{name}", values, ONE).values["weight"] == {"vlm": 0.3}  # type: ignore[union-attr]


def test_scale_of_passthrough_may_be_null() -> None:
    assert build_mergekit("mergekit:passthrough", {}, ONE).values == {"scale": {"vlm": None}}
    assert build_mergekit("mergekit:passthrough", {"scale": 2}, ONE).values == {"scale": {"vlm": 2.0}}


@pytest.mark.parametrize("name", sorted(MERGEKIT))
def test_every_method_describes_its_parameters(name: str) -> None:
    assert [info.name for info in describe(f"mergekit:{name}")] == [slot.name for slot in MERGEKIT[name].slots]
