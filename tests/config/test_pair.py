import typing
from pathlib import Path

import pytest

from mergelab.config import Pair, load_pair, pair_from_folders, resolved
from mergelab.config.pair import Source
from mergelab.errors import RecipeError

ADVICE = "The keys of a pair are name, base, vlm, ancestor, family and protocol."

BAD = {
    "misspelt": (
        "name: x\nbase: a/b\nvlm: c/d\nprotocl: x\n",
        ["protocl: unknown key (did you mean `protocol`?)"],
    ),
    "missing": ("base: a/b\n", ["name: missing, and required", "vlm: missing, and required"]),
    "same": (
        "name: x\nbase: ./a\nvlm: ./a\nancestor: ./b\n",
        ["vlm: is the same model as base (FOLDER/a); there would be nothing to merge"],
    ),
    "revisions": (
        "name: x\nbase: {id: ./a, revision: main}\nvlm: {id: b/c, rev: 3}\nrevision: x\n",
        [
            "vlm.rev: unknown key",
            'revision: belongs to one of the models: base: {id: ..., revision: "x"}',
            'base.revision: only a hub id has revisions, and "./a" is a folder',
        ],
    ),
    "values": (
        "name: x\nbase: package:../x\nvlm: 3\nancestor: ''\nprotocol: paper-instruct\nfamily: ''\n",
        [
            "vlm: expected a folder, a hub id, or {id: ..., revision: ...}, found 3",
            'ancestor: expected some text, found ""',
            'family: expected some text, found ""',
            'protocol: expected bench-v1, paper-instruct-v1 or paper-default-v1, found "paper-instruct" '
            "(did you mean `paper-instruct-v1`?)",
            'base: "package:../x" must name a folder inside the mergelab package',
        ],
    ),
    "family file": (
        "name: x\nbase: a/b\nvlm: c/d\nfamily: mine.yaml\n",
        ["family: no such file: FOLDER/mine.yaml. Give the path of a family file, a family's name, or auto"],
    ),
    "bench-protocol": (
        "name: x\nbase: a/b\nvlm: c/d\nprotocol: bench-v1\n",
        [
            "protocol: bench-v1 grades facts that only the bench pair was taught, and this pair is x; take "
            "paper-instruct-v1"
        ],
    ),
}


@pytest.mark.parametrize(("text", "problems"), BAD.values(), ids=BAD.keys())
def test_bad_pair_is_refused_in_one_message(tmp_path, text, problems):
    path = tmp_path / "p.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as caught:
        load_pair(path)
    heading, *lines, advice = str(caught.value).replace(str(tmp_path), "FOLDER").split("\n")
    assert heading == "FOLDER/p.yaml: this pair is not valid:"
    assert lines == [f"  - {problem}" for problem in problems]
    assert advice == ADVICE


def test_recipe_given_as_pair_says_so(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("name: x\npair: bench\nmethod: ties\n")
    with pytest.raises(RecipeError, match=r"r.yaml: this is a recipe; a pair file \(name, base, vlm"):
        load_pair(path)


def test_folders_are_relative_to_the_pair_file_and_hub_ids_stay(tmp_path):
    (tmp_path / "org" / "local").mkdir(parents=True)
    (tmp_path / "p.yaml").write_text("name: x\nbase: org/local\nvlm: org/hub\nancestor: {id: org/hub, revision: abc}\n")
    pair = load_pair("p.yaml", beside=tmp_path)
    assert pair.base == Source(id=str(tmp_path / "org" / "local"))
    assert (pair.base.is_folder, pair.base.location) == (True, str(tmp_path / "org" / "local"))
    assert (pair.vlm.is_folder, pair.vlm.location) == (False, "org/hub")
    assert pair.ancestor == Source(id="org/hub", revision="abc")
    assert list(pair.sources) == ["ancestor", "base", "vlm"]


@pytest.mark.parametrize("written", ["../up", "./here", "/abs/x", "a/b/c", "~nobody-here/x"])
def test_what_looks_like_a_path_is_a_folder_even_if_it_is_missing(tmp_path, written):
    (tmp_path / "p.yaml").write_text(f"name: x\nbase: {written}\nvlm: org/hub\n")
    pair = load_pair(tmp_path / "p.yaml")
    assert pair.base.location == str((tmp_path / written).resolve())


def test_bench_pair_lies_inside_the_package():
    import mergelab

    pair = load_pair("bench")
    package = Path(mergelab.__file__).parent
    assert {role: Path(source.location) for role, source in pair.sources.items()} == {
        role: package / "bench" / "data" / "pair" / role for role in ("ancestor", "base", "vlm")
    }
    assert pair.is_bench
    assert pair.protocol == "bench-v1"


def test_resolved_pair_loads_back_equal(tmp_path):
    (tmp_path / "p.yaml").write_text("name: x\nbase: ./b\nvlm: {id: org/hub, revision: abc}\n")
    for pair in (load_pair(tmp_path / "p.yaml"), load_pair("bench")):
        assert Pair.model_validate(resolved(pair)) == pair


def test_pair_from_folders_takes_the_current_folder_and_names_itself(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my vlm").mkdir()
    pair = pair_from_folders("org/Base-1B", "my vlm", "./anc")
    assert pair.name == "my-vlm-on-Base-1B"
    assert pair.base.location == "org/Base-1B"
    assert pair.vlm.location == str(tmp_path / "my vlm")
    assert pair.ancestor is not None
    assert pair.ancestor.location == str(tmp_path / "anc")
    assert pair.protocol == "paper-instruct-v1"
    assert pair_from_folders("a/b", "c/d").ancestor is None


def test_pair_from_folders_refuses_one_model_twice():
    with pytest.raises(RecipeError, match="vlm: is the same model as base"):
        pair_from_folders("./x", "x/../x")
    with pytest.raises(RecipeError, match="ancestor: is empty; give a folder or a hub id"):
        pair_from_folders("./x", "./y", "")


def test_unknown_pair_names_the_nearest():
    with pytest.raises(RecipeError, match=r"pair qwen2-vl-7b: no pair has this name \(did you mean `qwen2.5-vl-7b`"):
        load_pair("qwen2-vl-7b")
    with pytest.raises(RecipeError, match=r"pair ./x.yaml: no such file: /"):
        load_pair("./x.yaml")


def test_every_field_says_what_it_means():
    fields = {**Pair.model_fields, **Source.model_fields}
    assert [name for name, info in fields.items() if not info.description] == []


def test_protocols_are_the_ones_that_can_be_graded():
    from mergelab.config.pair import ProtocolName
    from mergelab.evals.protocols import PROTOCOLS

    assert set(typing.get_args(ProtocolName)) == set(PROTOCOLS)


def test_family_is_a_name_or_a_file_beside_the_pair(tmp_path: Path) -> None:
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "mine.yaml").write_text("family: mine\n")
    path = tmp_path / "p.yaml"
    for given, found in (("auto", "auto"), ("molmo2", "molmo2"), ("rules/mine.yaml", f"{tmp_path}/rules/mine.yaml")):
        path.write_text(f"name: x\nbase: a/b\nvlm: c/d\nfamily: {given}\n")
        assert load_pair(path).family == found
