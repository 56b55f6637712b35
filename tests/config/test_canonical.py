import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergelab.config import canonical_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"a": 0.5}, {"a": 0.50}),
        ({"a": 1}, {"a": 1.0}),
        ([0], [-0.0]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ((1, 2), [1, 2]),
        ([1e2], [100]),
    ],
    ids=["decimals", "whole", "minus-zero", "order", "tuple", "exponent"],
)
def test_equal_values_have_one_spelling(one, other):
    assert canonical_json(one) == canonical_json(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [(True, 1), (None, 0), ("1", 1), (0.1, 0.1 + 2**-56), ([1, 2], [2, 1])],
    ids=["flag", "null", "text", "last-bit", "order"],
)
def test_different_values_have_different_spellings(one, other):
    assert canonical_json(one) != canonical_json(other)


@given(VALUES)
def test_reading_the_text_back_gives_an_equal_value(value):
    assert json.loads(canonical_json(value)) == value


@pytest.mark.parametrize("value", [float("nan"), [float("inf")]])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(ValueError, match="not a number that JSON can say"):
        canonical_json(value)


def test_other_types_are_refused():
    with pytest.raises(TypeError, match="set has no canonical JSON"):
        canonical_json({1})
    with pytest.raises(TypeError, match="key 1 is not text"):
        canonical_json({1: 2})
