"""Family files: all that is wrong with one comes at once, and what is right survives a round trip."""

from pathlib import Path

import pytest
import yaml

from mergelab.errors import RecipeError
from mergelab.towers.rules import FOLDER, Family, find_family, holds, parse_family, shipped_families


@pytest.mark.parametrize("family", shipped_families(), ids=lambda family: family.family)
def test_shipped_family_survives_its_own_yaml(family: Family) -> None:
    assert parse_family(yaml.safe_load(family.to_yaml()), "again") == family


def test_shipped_families_say_what_they_cover_and_are_named_as_their_files() -> None:
    for family in shipped_families():
        assert family.covers
        assert find_family(family.family) is family


def test_all_problems_come_at_once() -> None:
    document = {
        "famly": "x",
        "detect": {"keys_al": ["a"], "keys_all": ["("]},
        "rename": [["a", "b"], 3, {"pattern": "x", "replacment": "y"}],
        "split": [{"match": "a", "into": ["x"], "sizes": ["q"]}, {"match": "a", "into": ["x", "y"], "sizes": ["w", 1]}],
        "experts": [{"match": "a", "into": []}],
    }
    with pytest.raises(RecipeError) as caught:
        parse_family(document, "mine.yaml")
    message = str(caught.value)
    for text in (
        "mine.yaml: this family is not valid:",
        "family: missing, and required",
        'detect.keys_all.0: expected a regular expression, found "("',
        "detect.keys_al: unknown key (did you mean `keys_all`?)",
        "rename.1: expected a mapping, found 3",
        "rename.2.replacment: unknown key (did you mean `replacement`?)",
        'split.0.into: expected a list of at least 2, found ["x"]',
        "split.1: sizes: expected q, kv or a number, found w",
        "experts.0.into: expected a list of at least 1",
        "famly: unknown key (did you mean `family`?)",
    ):
        assert text in message


def test_replacement_that_names_a_missing_group_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"rename\.0: replacement .*invalid group reference"):
        parse_family({"family": "x", "detect": {"keys_all": ["a"]}, "rename": [["a(b)", "\\2"]]}, "w")


def test_family_that_recognises_nothing_is_refused() -> None:
    with pytest.raises(RecipeError, match="needs keys_all or model_type"):
        parse_family({"family": "x", "detect": {}}, "w")


def test_blocks_of_renames_are_flattened_with_their_condition() -> None:
    block = {"when": {"norm_after": True}, "rename": [["a", "b"], ["c", "d"]]}
    family = parse_family({"family": "x", "detect": {"keys_all": ["a"]}, "rename": [["e", "f"], block]}, "w")
    assert [(r.pattern.pattern, r.replacement, r.when) for r in family.rename] == [
        ("e", "f", {}), ("a", "b", {"norm_after": True}), ("c", "d", {"norm_after": True}),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "expected"), [({"norm_after": False}, True), ({}, True), ({"norm_after": True}, False)]
)
def test_absent_field_counts_as_false(config: dict[str, bool], expected: bool) -> None:
    assert holds({"norm_after": False}, config) is expected
    assert holds({"norm_after": True}, config) is not expected


def test_family_is_found_by_name_or_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(find_family("molmo2").to_yaml())
    assert find_family(str(path)) == find_family("molmo2")
    with pytest.raises(RecipeError, match=r"family internlm: no family has this name \(did you mean `internlm2`\?\)"):
        find_family("internlm")


def test_example_of_the_readme_is_a_family_with_every_key() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8").split("```yaml\n")[1].split("```")[0]
    text = text.replace("[...]", "[]").replace("{...}", "{}")
    document = yaml.safe_load(text)
    assert parse_family(document, "README").split[2].grouped
    assert document.keys() == Family.model_fields.keys()
