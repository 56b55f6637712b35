import copy
import hashlib
import inspect
import typing
from dataclasses import replace

import pytest

from mergelab.config import Pair, Recipe, load_experiment
from mergelab.config.document import Document
from mergelab.sweeps.grid import PointSpec, expand
from mergelab.sweeps.identity import (
    FIELD_CLASSES,
    FIXED,
    MAPPING,
    experiment_conflicts,
    hash_family,
    point_id,
    stage_key,
)
from mergelab.towers.rules import parse_family

PRINTS = {"ancestor": "a" * 64, "base": "b" * 64, "vlm": "c" * 64}
POINT = PointSpec(
    role="merge",
    method="ties",
    parameters={"density": 0.5, "lambda": 1.0},
    seed=0,
    zero_point="ancestor",
    conventions="paper",
    inputs=("ancestor", "base", "vlm"),
)


def documents(annotation):
    """Yield the kinds of documents inside an annotation such as tuple[Merge, ...] | None."""
    if inspect.isclass(annotation) and issubclass(annotation, Document):
        yield annotation
    for inner in typing.get_args(annotation):
        yield from documents(inner)


def dotted_fields(model, prefix):
    for name, info in model.model_fields.items():
        yield f"{prefix}.{name}"
        for inner in documents(info.annotation):
            yield from dotted_fields(inner, f"{prefix}.{name}")


def all_fields():
    return {*dotted_fields(Recipe, "recipe"), *dotted_fields(Pair, "pair")}


def unclassified(fields):
    return sorted(fields - FIELD_CLASSES.keys())


def test_every_field_of_recipe_and_pair_is_classed():
    missing = unclassified(all_fields())
    assert not missing, (
        f"{', '.join(missing)}: add a line to FIELD_CLASSES in mergelab/sweeps/identity.py. "
        f"identity: it decides the "
        "weights of a point or what a run claims (then put it into point_id, or into FIXED). "
        "stage: it decides what "
        "a stage measures (then put it into the stage that goes into stage_key). runtime: no "
        "number depends on it."
    )


def test_the_check_sees_nested_fields_and_can_fail():
    assert "recipe.merges.sweep" in all_fields()
    assert "recipe.claims.alpha" in all_fields()
    assert "pair.ancestor.revision" in all_fields()
    assert unclassified(all_fields() | {"recipe.sink.new"}) == ["recipe.sink.new"]


def test_no_class_is_kept_for_a_field_that_is_gone():
    assert sorted(FIELD_CLASSES.keys() - all_fields()) == []


def test_what_is_fixed_is_identity():
    for place in FIXED:
        name = place if "." in place else f"recipe.{place}"
        assert FIELD_CLASSES[name] == "identity"


def test_point_id_is_twelve_hex_digits_and_golden():
    # Golden: with another value every run folder made so far would be made anew.
    text = (
        '{"arithmetic":1,"conventions":"paper","fingerprints":{"ancestor":"A","base":"B","vlm":"C"},"method":"ties",'
        '"output_dtype":"auto","parameters":{"density":0.5,"lambda":1},"seed":0,"zero_point":"ancestor"}'
    )
    expected = hashlib.sha256(text.encode()).hexdigest()[:12]
    assert point_id(POINT, {"ancestor": "A", "base": "B", "vlm": "C"}, "auto", 1) == expected
    assert point_id(POINT, PRINTS, "auto", 1) == "df8e0ba8d419"


@pytest.mark.parametrize(
    "changed",
    [
        replace(POINT, parameters={"lambda": 1, "density": 0.50}),
        replace(POINT, parameters={"density": 0.5, "lambda": 1.0}, role="control"),
    ],
    ids=["spelling", "role"],
)
def test_same_weights_have_the_same_id(changed):
    assert point_id(changed, PRINTS, "auto") == point_id(POINT, PRINTS, "auto")


@pytest.mark.parametrize(
    "changed",
    [
        replace(POINT, parameters={"density": 0.5, "lambda": 1.0000000001}),
        replace(POINT, method="dare_ties"),
        replace(POINT, seed=1),
        replace(POINT, seed=None),
        replace(POINT, zero_point="base"),
        replace(POINT, conventions="mergekit"),
        replace(POINT, inputs=("base", "vlm")),
    ],
    ids=["parameter", "method", "seed", "no-seed", "zero-point", "conventions", "inputs"],
)
def test_other_weights_have_another_id(changed):
    assert point_id(changed, PRINTS, "auto") != point_id(POINT, PRINTS, "auto")


@pytest.mark.parametrize("role", PRINTS)
def test_any_changed_input_changes_the_id(role):
    assert point_id(POINT, {**PRINTS, role: "d" * 64}, "auto") != point_id(POINT, PRINTS, "auto")


def test_output_dtype_and_arithmetic_count_for_merges_and_not_for_parents():
    assert point_id(POINT, PRINTS, "float32") != point_id(POINT, PRINTS, "auto")
    assert point_id(POINT, PRINTS, "auto", 1) != point_id(POINT, PRINTS, "auto", 2)
    base = PointSpec(role="base", inputs=("base",))
    assert point_id(base, PRINTS, "float32", 2) == point_id(base, PRINTS, "auto", 1)
    assert point_id(base, {"base": PRINTS["base"]}, "auto") == point_id(base, PRINTS, "auto")


def test_parents_with_equal_files_and_copies_are_different_points():
    equal = dict.fromkeys(PRINTS, "e" * 64)
    ids = {point_id(PointSpec(role=role, inputs=(role,)), equal, "auto") for role in ("ancestor", "base", "vlm")}
    copies = {
        point_id(
            PointSpec(role="control", method="copy", parameters={"of": of}, inputs=("base", "vlm")),
            equal,
            "auto",
        )
        for of in ("base", "vlm")
    }
    assert len(ids | copies) == 5


def test_missing_fingerprint_is_not_passed_over():
    with pytest.raises(KeyError, match="ancestor"):
        point_id(POINT, {"base": "b", "vlm": "c"}, "auto")


@pytest.mark.parametrize("name", ("dare", "iso_c", "linear", "slerp", "star", "task_arithmetic", "ties", "tsv"))
def test_points_of_a_run_have_distinct_ids(name):
    experiment = load_experiment(name, {"seeds": [0, 1]})
    points = expand(experiment.recipe, experiment.pair)
    assert len({point_id(point, PRINTS, "auto") for point in points}) == len(points)


def test_more_grid_values_keep_the_ids_of_the_old_points():
    def ids(overrides):
        experiment = load_experiment("ties", overrides)
        return {point_id(point, PRINTS, "auto") for point in expand(experiment.recipe, experiment.pair)}

    assert ids({}) < ids({"sweep.lambda": [0.5, 0.7, 1.0], "evals.limit": 3, "name": "other", "claims.margin": 5})


def test_stage_key_depends_on_weights_and_on_everything_in_the_stage():
    key = stage_key("w", {"limit": 10, "dtype": "auto"})
    assert key == stage_key("w", {"dtype": "auto", "limit": 10.0})
    assert key != stage_key("v", {"limit": 10, "dtype": "auto"})
    assert key != stage_key("w", {"limit": 11, "dtype": "auto"})
    assert key != stage_key("w", {"limit": 10})


EXPERIMENT = {
    "zero_point": "ancestor",
    "conventions": "paper",
    "fingerprints": PRINTS,
    "pair": {"name": "p", "family": "auto"},
    "recipe": {
        "name": "a",
        "output_dtype": "auto",
        "sweep": {"lambda": [0.5]},
        "evals": {"tasks": "auto", "limit": None},
        "claims": {"margin": 2.0, "alpha": 0.05, "primary": "auto", "correction": "holm"},
    },
}


def changed(place, value):
    experiment = copy.deepcopy(EXPERIMENT)
    inner = experiment
    *parents, last = place.split(".")
    for part in parents:
        inner = inner[part]
    inner[last] = value
    return experiment


@pytest.mark.parametrize(
    ("place", "value", "problem"),
    [
        ("recipe.claims.margin", 3, "claims.margin: the folder has 2.0, this run asks for 3"),
        ("recipe.claims.alpha", 0.1, "claims.alpha: the folder has 0.05, this run asks for 0.1"),
        ("recipe.claims.primary", ["x"], 'claims.primary: the folder has "auto", this run asks for ["x"]'),
        (
            "recipe.claims.correction",
            "none",
            'claims.correction: the folder has "holm", this run asks for "none"',
        ),
        (
            "recipe.output_dtype",
            "float32",
            'output_dtype: the folder has "auto", this run asks for "float32"',
        ),
        ("zero_point", "base", 'zero_point: the folder has "ancestor", this run asks for "base"'),
        ("conventions", "peft", 'conventions: the folder has "paper", this run asks for "peft"'),
        (
            "fingerprints.mapping",
            "e" * 64,
            "family: the folder was made with the rules of mergelab, this run has eeeeeeeeeeee",
        ),
        (
            "fingerprints.vlm",
            "d" * 64,
            "vlm: the folder was made with weights cccccccccccc, this run has weights dddddddddddd",
        ),
        (
            "fingerprints",
            {"base": PRINTS["base"], "vlm": PRINTS["vlm"]},
            "ancestor: the folder was made with weights aaaaaaaaaaaa, this run has none",
        ),
    ],
)
def test_what_may_not_change_in_a_run_folder_is_named(place, value, problem):
    assert experiment_conflicts(EXPERIMENT, changed(place, value)) == [problem]


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("recipe.sweep", {"lambda": [0.5, 1.0]}),
        ("recipe.evals.tasks", ["a", "b"]),
        ("recipe.evals.limit", 10),
        ("recipe.name", "b"),
        ("pair.name", "q"),
        ("recipe.claims.margin", 2),
    ],
)
def test_what_extends_a_run_is_no_conflict(place, value):
    assert experiment_conflicts(EXPERIMENT, changed(place, value)) == []


def test_mapping_of_the_vlm_is_part_of_what_reads_the_vlm():
    prints = PRINTS | {MAPPING: "e" * 64}
    assert point_id(POINT, prints, "auto") != point_id(POINT, PRINTS, "auto")
    assert point_id(POINT, prints, "auto") != point_id(POINT, PRINTS | {MAPPING: "f" * 64}, "auto")
    without = replace(POINT, inputs=("ancestor", "base"))
    assert point_id(without, prints, "auto") == point_id(without, PRINTS, "auto")


def test_family_is_hashed_by_what_it_does():
    document = {"family": "x", "detect": {"keys_all": ["a"]}, "rename": [["a", "b"]]}
    same = {**document, "family": "y", "covers": "z", "detect": {"keys_all": ["c"]}, "notes": ["n"]}
    other = {**document, "rename": [["a", "c"]]}
    hashes = [hash_family(parse_family(content, "w")) for content in (document, same, other)]
    assert hashes[0] == hashes[1] != hashes[2]
