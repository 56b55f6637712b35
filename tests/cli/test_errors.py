"""Bad input: one clear message on stderr, the exit code of its kind, nothing on stdout, nothing half-written."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from mergelab.cli import main
from tests.builders import IMAGE_TOKEN, WORDS, tiny_llama, tiny_llava


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


def moved_tokens(tmp_path: Path, base: Path) -> Path:
    tokens = [*WORDS, IMAGE_TOKEN]
    tokens[7], tokens[8] = tokens[8], tokens[7]
    return tiny_llava(tmp_path / "moved", seed=2, start=base, tokens=tokens)


def test_vlm_whose_rows_bases_tokenizer_does_not_address(tmp_path: Path, recipe: Path, pair: dict[str, Path]) -> None:
    models = ["--base", pair["base"], "--vlm", moved_tokens(tmp_path, pair["base"])]
    out = tmp_path / "out"
    settings = ["--set", "evals.tasks=[ifeval]", "--set", f"evals.data.ifeval={ifeval(tmp_path)}"]
    assert_refused(mergelab("merge", recipe, *models, "--out", out, "--as", "text"), 4, "other rows of vlm")
    result = mergelab("run", recipe, *models, *settings, "--out", out)
    assert result.exit_code == 4 and "other rows of vlm" in result.stderr
    assert not out.exists()
    assert mergelab("merge", recipe, *models, "--out", out).exit_code == 0


def ifeval(folder: Path) -> Path:
    path = folder / "documents.jsonl"
    row = {"key": 1, "prompt": "red cat", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    path.write_text(json.dumps(row) + "\n")
    return path


def test_config_that_does_not_describe_the_tower(tmp_path: Path, recipe: Path, pair: dict[str, Path]) -> None:
    path = pair["vlm"] / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["num_hidden_layers"] = 3
    path.write_text(json.dumps(config))
    out = tmp_path / "out"
    result = mergelab("merge", recipe, *folders(pair), "--out", out, "--as", "text")
    assert_refused(result, 4, "model.layers.2", "config.json")
    assert not out.exists()


def test_more_sink_layers_than_there_are(tmp_path: Path, recipe: Path, pair: dict[str, Path]) -> None:
    settings = ["--set", "evals.tasks=[ifeval]", "--set", f"evals.data.ifeval={ifeval(tmp_path)}"]
    out = tmp_path / "out"
    result = mergelab("run", recipe, *folders(pair), *settings, "--set", "sink.last_layers=9", "--out", out)
    assert result.exit_code == 3 and "found 9" in result.stderr
    assert not out.exists()


def test_damaged_generation_settings(tmp_path: Path, pair: dict[str, Path]) -> None:
    (pair["base"] / "generation_config.json").write_text("{oops")
    data = ["--tasks", "ifeval", "--data", f"ifeval={ifeval(tmp_path)}", "--device", "cpu"]
    assert_refused(mergelab("eval", pair["base"], *data), 5, "generation_config.json")


def test_eval_of_a_missing_model_looks_for_no_data(tmp_path: Path) -> None:
    assert_refused(mergelab("eval", tmp_path / "absent" / "model"), 5, "absent")


def test_eval_of_packed_weights(tmp_path: Path, pair: dict[str, Path]) -> None:
    path = pair["base"] / "model.safetensors"
    tensors = {name: t.to(torch.uint8) if t.ndim == 2 else t for name, t in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    data = ["--tasks", "ifeval", "--data", f"ifeval={ifeval(tmp_path)}", "--device", "cpu"]
    assert_refused(mergelab("eval", pair["base"], *data), 4, "U8")


def test_output_below_a_file(tmp_path: Path, recipe: Path, pair: dict[str, Path]) -> None:
    (tmp_path / "file").write_text("mine")
    assert_refused(mergelab("merge", recipe, *folders(pair), "--out", tmp_path / "file" / "out"), 6, "file")
    assert mergelab("eval", pair["base"], "--samples", tmp_path / "file").exit_code == 2


def test_bench_data_that_is_no_json(tmp_path: Path, recipe: Path) -> None:
    data = tmp_path / "bad.jsonl"
    data.write_text("{oops\n")
    result = mergelab("run", recipe, "--set", f"evals.data.bench_image={data}", "--out", tmp_path / "out")
    assert result.exit_code == 3, result.output
    assert "bad.jsonl" in result.stderr and not (tmp_path / "out").exists()


def test_running_out_of_memory_is_the_machines_fault(monkeypatch: pytest.MonkeyPatch, pair: dict[str, Path]) -> None:
    def allocate(*arguments: object) -> None:
        raise torch.OutOfMemoryError("tried to allocate 40 GiB")

    monkeypatch.setattr("mergelab.sweeps.single.measure_sink", lambda *arguments, **options: allocate())
    assert_refused(mergelab("sink", pair["vlm"], "--device", "cpu"), 6, "40 GiB", "out of memory")


def test_full_disk_is_the_machines_fault() -> None:
    code = "import sys; from mergelab.cli import main; main(['methods'])"
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 6, done.stderr
    assert "No space left" in done.stderr and "Traceback" not in done.stderr


def test_tower_of_original_llava_code_has_a_sink_and_no_eyes(tmp_path: Path) -> None:
    """transformers has no class for model_type llava_llama: text is measured, pictures are refused."""
    vlm = tiny_llama(tmp_path / "vlm", seed=2)
    weights = vlm / "model.safetensors"
    save_file(load_file(weights) | {"model.mm_projector.0.weight": torch.ones(16, 16)}, weights)
    config = vlm / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "llava_llama"}))
    plain = tiny_llama(tmp_path / "plain", seed=2)
    result = mergelab("sink", vlm, plain, "--json", "--device", "cpu")
    assert result.exit_code == 0, result.output
    first, second = json.loads(result.stdout)
    assert first["sink_strength"] == second["sink_strength"]
    blind = mergelab("eval", vlm, "--protocol", "bench-v1", "--device", "cpu")
    assert_refused(blind, 3, "without a class in transformers", "bench_image")
