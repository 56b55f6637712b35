"""Whatever a file says, the answer is a recipe or a RecipeError."""

import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mergelab.config import Claims, Evals, Merge, Pair, Recipe, Sink, load_pair, load_recipe
from mergelab.errors import RecipeError

KEYS = sorted({key for model in (Recipe, Merge, Sink, Evals, Claims, Pair) for key in model.model_fields})
WORDS = [
    *KEYS,
    "lambda",
    "density",
    "weights",
    "ties",
    "tsv",
    "linear",
    "bench",
    "auto",
    "",
    "0",
    "a/b",
    "~",
    "?",
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**64) | st.floats() | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=12,
)
GOOD = {"name": "a", "pair": "bench", "method": "ties"}


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(document=st.dictionaries(st.sampled_from(WORDS), VALUES, max_size=6), complete=st.booleans())
def test_any_document_is_a_recipe_or_refused(tmp_path, document, complete):
    path = tmp_path / "any.yaml"
    path.write_text(json.dumps({**GOOD, **document} if complete else document).replace("Infinity", ".inf"))
    for load in (load_recipe, load_pair):
        try:
            load(path)
        except RecipeError as error:
            assert str(error).startswith(str(path))


@settings(max_examples=100, deadline=None)
@given(
    key=st.lists(st.sampled_from(WORDS).filter(bool), min_size=1, max_size=4).map(".".join),
    value=VALUES,
    recipe=st.sampled_from(["ties", "dare"]),
)
def test_any_override_is_taken_or_refused(key, value, recipe):
    try:
        load_recipe(recipe, {key: value})
    except RecipeError as error:
        assert f"with {key}=" in str(error)
