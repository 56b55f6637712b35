"""Bad input: one clear message on stderr, the exit code of its kind, nothing on stdout, nothing half-written."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mergelab.cli import main
from tests.builders import tiny_llama, tiny_llava


@pytest.fixture
def pair(tmp_path: Path) -> dict[str, Path]:
    base = tiny_llama(tmp_path / "base", seed=1)
    return {"base": base, "vlm": tiny_llava(tmp_path / "vlm", seed=2, start=base)}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text("name: mine\npair: bench\nmethod: task_arithmetic\nparameters: {lambda: 0.5}\n")
    return path


def mergelab(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def assert_refused(result: Result, code: int, *words: str) -> None:
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    for word in words:
        assert word in result.stderr
    assert "Traceback" not in result.stderr


def folders(pair: dict[str, Path]) -> list[object]:
    return ["--base", pair["base"], "--vlm", pair["vlm"]]


VERBS = ["run", "merge", "plan"]


def out_of(verb: str, tmp_path: Path) -> list[object]:
    return [] if verb == "plan" else ["--out", tmp_path / "out"]


@pytest.mark.parametrize("verb", VERBS)
def test_missing_recipe(verb: str, tmp_path: Path) -> None:
    assert_refused(mergelab(verb, tmp_path / "nowhere.yaml", *out_of(verb, tmp_path)), 3, "nowhere.yaml")


@pytest.mark.parametrize("verb", VERBS)
def test_missing_model(verb: str, tmp_path: Path, recipe: Path, pair: dict[str, Path]) -> None:
    result = mergelab(
        verb, recipe, "--base", pair["base"], "--vlm", tmp_path / "absent" / "vlm", *out_of(verb, tmp_path)
    )
    assert_refused(result, 5, "absent")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("verb", VERBS)
def test_vlm_that_does_not_belong_to_the_base(verb: str, tmp_path: Path, recipe: Path) -> None:
    base = tiny_llama(tmp_path / "wide", hidden_size=32)
    vlm = tiny_llava(tmp_path / "vlm")
    result = mergelab(verb, recipe, "--base", base, "--vlm", vlm, *out_of(verb, tmp_path))
    assert_refused(result, 4, "model.layers.0.mlp.up_proj.weight", "(24, 32)", "(24, 16)")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("verb", ["run", "merge"])
def test_vlm_of_the_same_shapes_that_does_not_come_from_the_base(verb: str, tmp_path: Path, recipe: Path) -> None:
    base, vlm = tiny_llama(tmp_path / "base", seed=5), tiny_llava(tmp_path / "vlm", seed=6)
    result = mergelab(verb, recipe, "--base", base, "--vlm", vlm, "--out", tmp_path / "out")
    assert_refused(result, 4, "nothing in common", str(base))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("verb", VERBS)
def test_truncated_shard(verb: str, tmp_path: Path, recipe: Path, pair: dict[str, Path]) -> None:
    shard = pair["vlm"] / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-7])
    result = mergelab(verb, recipe, *folders(pair), *out_of(verb, tmp_path))
    assert_refused(result, 5, "model.safetensors", "vlm")
    assert not (tmp_path / "out").exists()


def test_output_folder_that_holds_something_else(tmp_path: Path, recipe: Path, pair: dict[str, Path]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("mine")
    for verb in ("run", "merge"):
        assert_refused(mergelab(verb, recipe, *folders(pair), "--out", out), 8, "thesis.tex")
    assert [path.name for path in out.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["ifeval.jsonl"]),
        ('{"key": 1, "prompt": "x"}\n', ["ifeval.jsonl", "instruction_id_list"]),
        ("{not json}\n", ["ifeval.jsonl", "line 1"]),
    ],
    ids=["empty", "fields-missing", "no-json"],
)
def test_bad_task_file(tmp_path: Path, recipe: Path, pair: dict[str, Path], content: str, words: list[str]) -> None:
    data = tmp_path / "ifeval.jsonl"
    data.write_text(content)
    settings = ["--set", "evals.tasks=[ifeval]", "--set", f"evals.data.ifeval={data}"]
    result = mergelab("run", recipe, *folders(pair), *settings, "--out", tmp_path / "out")
    assert result.exit_code == 3, result.output
    assert result.stdout == ""
    for word in words:
        assert word in result.stderr
    assert not (tmp_path / "out").exists()


def test_misspelt_parameter_names_the_nearest(recipe: Path) -> None:
    result = mergelab("plan", recipe, "--set", "parameters={lamda: 0.5}")
    assert_refused(result, 3, "lamda", "lambda")


def test_options_that_exclude_each_other(recipe: Path, pair: dict[str, Path]) -> None:
    assert mergelab("plan", recipe, "--base", pair["base"]).exit_code == 2
    assert mergelab("plan", recipe, *folders(pair), "--pair", "bench").exit_code == 2


def test_report_of_a_folder_that_is_no_run(tmp_path: Path) -> None:
    assert_refused(mergelab("report", tmp_path), 5, "experiment.json")


def test_unknown_device_is_named(tmp_path: Path, recipe: Path, pair: dict[str, Path]) -> None:
    result = mergelab("merge", recipe, *folders(pair), "--out", tmp_path / "out", "--device", "abacus")
    assert_refused(result, 6, "abacus")
    assert not (tmp_path / "out").exists()


def test_unknown_point_lists_those_there_are(tmp_path: Path, recipe: Path, pair: dict[str, Path]) -> None:
    result = mergelab("merge", recipe, *folders(pair), "--out", tmp_path / "out", "--point", "feedbeef0000")
    assert_refused(result, 3, "feedbeef0000", "task_arithmetic")


def test_merge_writes_and_says_where(tmp_path: Path, recipe: Path, pair: dict[str, Path]) -> None:
    out = tmp_path / "out"
    result = mergelab("merge", recipe, *folders(pair), "--out", out, "--as", "text", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["parameters"]["lambda"] == 0.5
    assert json.loads((out / "mergelab.json").read_text())["as"] == "text"
    assert (out / "model.safetensors").is_file()


def test_sink_of_a_tower_and_of_a_text_model(pair: dict[str, Path]) -> None:
    result = mergelab("sink", pair["vlm"], pair["base"], "--json", "--device", "cpu")
    assert result.exit_code == 0, result.output
    records = json.loads(result.stdout)
    assert {record["model"] for record in records} == {str(path) for path in pair.values()}
    wanted = "model sink_strength sink_strength_bf16 dtype last_layers num_prompts num_rows position0_share"
    assert set(wanted.split()) <= records[0].keys()
    assert records[0]["sink_strength"] >= records[1]["sink_strength"]
