"""The whole line on a tiny pair with real IFEval grading: records, resume, kill, refusals."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from mergelab.cli import main
from mergelab.records import PointFolder, Run, read_run
from mergelab.sweeps.ledger import owned
from tests.builders import tiny_llama, tiny_llava

PROMPTS = ["what is the colour of a cat ?", "red blue green ?", "one two three", "a dog : answer .", "two cat"]
CHECK = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}


@dataclass
class Setup:
    """A tiny pair and a recipe on disk, run by the command a user types."""

    root: Path
    recipe: Path
    settings: list[str] = field(default_factory=list)

    def arguments(self, out: Path, *more: str) -> list[str]:
        pair = ["--base", self.root / "base", "--vlm", self.root / "vlm", "--ancestor", self.root / "ancestor"]
        return ["run", *map(str, [self.recipe, *pair, "--out", out, "--device", "cpu", "--no-cache"]), *more]

    def run(self, out: Path, *more: str) -> Result:
        return CliRunner().invoke(main, self.arguments(out, *more))


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    root = tmp_path_factory.mktemp("pair")
    ancestor = tiny_llama(root / "ancestor", seed=0)
    base = tiny_llama(root / "base", seed=1, start=ancestor, noise=1.0)
    tiny_llava(root / "vlm", seed=2, start=base, noise=1.0)
    data = root / "ifeval.jsonl"
    rows = [{"key": number, "prompt": prompt, **CHECK} for number, prompt in enumerate(PROMPTS)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = root / "recipe.yaml"
    recipe.write_text(
        "name: tiny\npair: bench\ncontrol_seeds: [0]\nmerges:\n"
        "  - {method: task_arithmetic, sweep: {lambda: [0.0, 0.5]}}\n"
        "  - {method: dare_linear, parameters: {drop_rate: 0.5}}\n"
        f"evals: {{tasks: [ifeval], data: {{ifeval: {data}}}, max_gen_toks: {{ifeval: 6}}, batch_size: 2}}\n"
    )
    return Setup(root, recipe)


@pytest.fixture(scope="module")
def finished(setup: Setup, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    out = tmp_path_factory.mktemp("runs") / "whole"
    result = setup.run(out)
    assert result.exit_code == 0, (result.output, result.exception)
    return out, result


def point(run: Run, role: str, method: str = "", **parameters: Any) -> PointFolder:
    found = [
        p
        for p in run.points
        if p.role == role
        and p.point["method"] == method
        and parameters.items() <= {k.strip("_"): v for k, v in p.point["parameters"].items()}.items()
    ]
    assert len(found) == 1, (role, method, parameters)
    return found[0]


def what_counts(folder: PointFolder) -> dict[str, Any]:
    """Return a point without seconds and memory."""
    volatile = ("seconds", "peak_memory_bytes", "samples_sha256")
    stages = {"merge": folder.merge, "sink": folder.sink, "ifeval": folder.tasks["ifeval"].metrics}
    kept = {n: {k: v for k, v in (s or {}).items() if k not in volatile} for n, s in stages.items()}
    return {"point": folder.point, "samples": folder.tasks["ifeval"].samples, **kept}


def test_every_point_has_every_stage(finished: tuple[Path, Result]) -> None:
    run = read_run(finished[0])
    assert [p.role for p in run.points] == [*("ancestor", "base", "vlm"), *["control"] * 3, *["merge"] * 3]
    for folder in run.points:
        assert folder.sink is not None and folder.sink["num_prompts"] == 15
        assert len(folder.tasks["ifeval"].samples) == len(PROMPTS)
        assert (folder.merge is None) == (folder.role in ("ancestor", "base", "vlm"))


def test_models_and_points_are_announced_before_the_table(setup: Setup, finished: tuple[Path, Result]) -> None:
    _, result = finished
    for words in ("9 points (3 parents, 3 controls, 3 merges) on cpu", "n = 5, up to 6 new tokens", "about"):
        assert words in result.stderr
    assert "of 3 merges restore text" in result.stdout


def test_copy_of_the_vlm_reproduces_its_weights_sink_and_answers(finished: tuple[Path, Result]) -> None:
    run = read_run(finished[0])
    copied, vlm = point(run, "control", "copy", of="vlm"), point(run, "vlm")
    assert copied.point["weights_hash"] == vlm.point["weights_hash"]
    assert copied.sink is not None and vlm.sink is not None
    assert copied.sink["sink_strength"] == vlm.sink["sink_strength"]
    assert copied.tasks["ifeval"].samples == vlm.tasks["ifeval"].samples
    base = point(run, "base")
    assert base.point["weights_hash"] != vlm.point["weights_hash"]
    assert base.tasks["ifeval"].samples != vlm.tasks["ifeval"].samples, "the pair must differ for this to mean much"


def test_finished_run_stands_on_the_panel(finished: tuple[Path, Result]) -> None:
    result = CliRunner().invoke(main, ["screen", "--add", str(finished[0]), "--json"])
    assert result.exit_code == 0, result.output
    added = json.loads(result.stdout)["panel"][-1]
    run = read_run(finished[0])
    base, vlm = (point(run, role) for role in ("base", "vlm"))
    assert base.sink is not None
    assert added["sink_strength"] == base.sink["sink_strength_bf16"]
    strict = [100 * sum(line["strict"] for line in p.tasks["ifeval"].samples) / len(PROMPTS) for p in (base, vlm)]
    assert added["deltas"] == {"ifeval": pytest.approx(strict[1] - strict[0])}
    assert (added["base"], added["vlm"]) == ("base", "vlm")


def test_distinct_points_have_distinct_weights(finished: tuple[Path, Result]) -> None:
    run = read_run(finished[0])
    hashes = [p.point["weights_hash"] for p in run.points if p.role in ("merge", "control")]
    assert len(set(hashes)) == len(hashes)


def test_merge_record_counts_kept_and_changed_entries(finished: tuple[Path, Result]) -> None:
    run = read_run(finished[0])
    dare = point(run, "merge", "dare_linear").merge
    assert dare is not None
    assert dare["asked_share"] == pytest.approx(0.5, abs=0.01)
    assert dare["kept_share"] == pytest.approx(0.5, abs=0.03)
    nothing = point(run, "merge", "task_arithmetic", **{"lambda": 0}).merge
    assert nothing is not None and nothing["changed_share"]["ancestor"] == 0


def test_second_start_finds_all_done_and_prints_the_same_table(setup: Setup, finished: tuple[Path, Result]) -> None:
    out, first = finished
    before = {path: path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file() and path.name != ".lock"}
    again = setup.run(out)
    assert again.exit_code == 0
    assert "finished before" in again.stderr
    assert again.stdout == first.stdout
    after = {path: path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file() and path.name != ".lock"}
    assert after == before


def test_killed_run_continues_to_the_same_records(setup: Setup, finished: tuple[Path, Result], tmp_path: Path) -> None:
    out = tmp_path / "killed"
    script = "import sys; from mergelab.cli import main; main(sys.argv[1:])"
    with subprocess.Popen(
        [sys.executable, "-c", script, *setup.arguments(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("[2/"):
                process.send_signal(signal.SIGKILL)
                break
    assert process.returncode == -signal.SIGKILL
    assert len(read_run(out).points) < 9
    result = setup.run(out)
    assert result.exit_code == 0, result.output
    expected = {p.point_id: what_counts(p) for p in read_run(finished[0]).points}
    found = {p.point_id: what_counts(p) for p in read_run(out).points}
    assert found == expected


def test_lost_stage_alone_is_done_again(setup: Setup, finished: tuple[Path, Result], tmp_path: Path) -> None:
    out = tmp_path / "copy"
    subprocess.run(["cp", "-r", finished[0], out], check=True)
    lost = point(read_run(out), "merge", "dare_linear")
    metrics = out / "points" / lost.point_id / "tasks" / "ifeval" / "metrics.json"
    sink = metrics.parents[2] / "sink.json"
    sink_before = sink.read_bytes()
    metrics.unlink()
    result = setup.run(out)
    assert result.exit_code == 0
    assert result.stderr.count("[") == 1, result.stderr
    assert sink.read_bytes() == sink_before
    assert what_counts(point(read_run(out), "merge", "dare_linear")) == what_counts(lost)


def test_more_values_extend_a_run(setup: Setup, finished: tuple[Path, Result], tmp_path: Path) -> None:
    out = tmp_path / "copy"
    subprocess.run(["cp", "-r", finished[0], out], check=True)
    result = setup.run(out, "--set", "merges.0.sweep.lambda=[0.0, 0.5, 0.7]")
    assert result.exit_code == 0
    assert len(read_run(out).points) == 10
    assert result.stderr.count("[") == 1


@pytest.mark.parametrize(
    "setting", ["claims.margin=3.5", "claims.alpha=0.1", "output_dtype=bfloat16", "zero_point=base"]
)
def test_another_experiment_is_refused_in_the_folder(setup: Setup, finished: tuple[Path, Result], setting: str) -> None:
    result = setup.run(finished[0], "--set", setting)
    assert result.exit_code == 8, result.output
    assert setting.partition("=")[0].split(".")[-1] in result.stderr


def test_ancestry_is_on_record(finished: tuple[Path, Result]) -> None:
    ancestry = read_run(finished[0]).experiment["ancestry"]
    assert ancestry["verdict"] == "cousin" and ancestry["accepted_unrelated"] is False
    assert ancestry["projection"] == pytest.approx(1, abs=0.1)


def test_run_of_unrelated_models_needs_the_flag(setup: Setup, tmp_path: Path) -> None:
    vlm = tiny_llava(tmp_path / "vlm", seed=9)
    command = setup.arguments(tmp_path / "run")
    command[command.index("--vlm") + 1] = str(vlm)
    refused = CliRunner().invoke(main, command)
    assert refused.exit_code == 4 and "--accept-unrelated" in refused.stderr
    assert not (tmp_path / "run").exists()
    accepted = CliRunner().invoke(main, [*command, "--accept-unrelated"])
    assert accepted.exit_code == 0, accepted.output
    assert "--accept-unrelated was given" in " ".join(accepted.stdout.split())
    assert read_run(tmp_path / "run").experiment["ancestry"]["accepted_unrelated"] is True


def test_folder_in_use_names_its_owner(setup: Setup, finished: tuple[Path, Result]) -> None:
    with owned(finished[0]):
        result = setup.run(finished[0])
    assert result.exit_code == 8
    assert f"process {os.getpid()}" in result.stderr


def test_weights_that_come_out_differently_fail_the_point(
    setup: Setup, finished: tuple[Path, Result], tmp_path: Path
) -> None:
    out = tmp_path / "copy"
    subprocess.run(["cp", "-r", finished[0], out], check=True)
    other = point(read_run(out), "merge", "dare_linear").point_id
    merge = out / "points" / other / "merge.json"
    merge.write_text(json.dumps({**json.loads(merge.read_text()), "weights_hash": "0" * 64}))
    (merge.parent / "sink.json").unlink()
    result = setup.run(out)
    assert result.exit_code == 7
    assert other in result.stderr and "1 of 9 points failed" in result.stderr
    told_at_once = result.stderr.index("dare_linear drop_rate 0.5 lambda 1 failed: ")
    assert told_at_once < result.stderr.index("1 of 9 points failed")


def test_experiment_that_is_not_whole_is_named(setup: Setup, finished: tuple[Path, Result], tmp_path: Path) -> None:
    out = tmp_path / "copy"
    subprocess.run(["cp", "-r", finished[0], out], check=True)
    path = out / "experiment.json"
    experiment = json.loads(path.read_text())
    del experiment["fingerprints"]
    path.write_text(json.dumps(experiment))
    result = setup.run(out)
    assert result.exit_code == 5
    assert "experiment.json" in result.stderr and "fingerprints" in result.stderr


def test_kept_weights_are_checkpoints_of_the_points(setup: Setup, tmp_path: Path) -> None:
    out = tmp_path / "kept"
    result = setup.run(out, "--set", "keep_weights=always", "--set", "controls=[]", "--limit", "2")
    assert result.exit_code == 0, result.output
    for folder in read_run(out).points:
        weights = out / "points" / folder.point_id / "weights"
        assert weights.is_dir() == (folder.role == "merge")
        if weights.is_dir():
            assert (weights / "config.json").is_file() and (weights / "model.safetensors").is_file()
            assert json.loads((weights / "mergelab.json").read_text())["point_id"] == folder.point_id


def test_points_whose_answers_had_another_budget_leave_the_table(
    setup: Setup, finished: tuple[Path, Result], tmp_path: Path
) -> None:
    out = tmp_path / "copy"
    subprocess.run(["cp", "-r", finished[0], out], check=True)
    result = setup.run(out, "--set", "merges.0.sweep.lambda=[0.7]", "--set", "evals.max_gen_toks.ifeval=3")
    assert result.exit_code == 0, result.output
    assert len(read_run(out).points) == 8
    assert {p.point["parameters"].get("lambda") for p in read_run(out).points if p.role == "merge"} == {0.7, 1.0}


def test_sink_in_bfloat16_is_that_of_a_model_loaded_in_bfloat16(setup: Setup, tmp_path: Path) -> None:
    out = tmp_path / "bfloat16"
    folder = tiny_llama(tmp_path / "long", seed=0, hidden_size=64, num_hidden_layers=4)
    tiny_llama(tmp_path / "other", seed=1, start=folder, hidden_size=64, num_hidden_layers=4)
    pair = ["--base", folder, "--vlm", tmp_path / "other", "--out", out, "--device", "cpu"]
    settings = ["--set", "sink.dtype=bfloat16", "--set", "controls=[]", "--limit", "1"]
    result = CliRunner().invoke(main, ["run", *map(str, [setup.recipe, *pair]), *settings])
    assert result.exit_code == 0, result.output
    alone = CliRunner().invoke(main, ["sink", str(folder), "--dtype", "bfloat16", "--json", "--device", "cpu"])
    assert alone.exit_code == 0, alone.output
    sink = point(read_run(out), "base").sink
    assert sink is not None
    assert sink["sink_strength"] == json.loads(alone.stdout)[0]["sink_strength"]


def test_changed_config_of_the_vlm_is_not_taken_for_the_old_one(setup: Setup, tmp_path: Path) -> None:
    root = tmp_path / "pair"
    shutil.copytree(setup.root, root)
    changed = Setup(root, setup.recipe)
    few = ["--limit", "2", "--set", "controls=[]"]
    assert changed.run(tmp_path / "out", *few).exit_code == 0
    config = root / "vlm" / "config.json"
    value = json.loads(config.read_text())
    value["text_config"]["rms_norm_eps"] = 0.5
    config.write_text(json.dumps(value))
    again = changed.run(tmp_path / "out", *few)
    assert again.exit_code == 0, again.output
    assert again.stderr.count("] ") == 4, "vlm and three merges, not base and ancestor"


def test_tower_of_original_llava_code_is_streamed_in(tmp_path: Path) -> None:
    """transformers has no class for model_type llava_llama; its tower alone can still be graded."""
    base = tiny_llama(tmp_path / "base", seed=1)
    tiny_llama(tmp_path / "vlm", seed=2, start=base, noise=0.5)
    weights = tmp_path / "vlm" / "model.safetensors"
    tensors = load_file(weights) | {"model.mm_projector.0.weight": torch.ones(16, 16)}
    save_file(tensors, weights, metadata={"format": "pt"})
    config = tmp_path / "vlm" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "llava_llama"}))
    data = tmp_path / "ifeval.jsonl"
    data.write_text(json.dumps({"key": 0, "prompt": "a cat ?", **CHECK}) + "\n")
    arguments = ["run", "task_arithmetic", "--base", base, "--vlm", tmp_path / "vlm", "--out", tmp_path / "out"]
    for setting in ("evals.tasks=[ifeval]", f"evals.data.ifeval={data}", "evals.max_gen_toks.ifeval=4"):
        arguments += ["--set", setting]
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    run = read_run(tmp_path / "out")
    vlm, copied = point(run, "vlm"), point(run, "control", "copy", of="vlm")
    assert vlm.point["weights_hash"] == copied.point["weights_hash"]
    assert vlm.point["weights_hash"] != point(run, "base").point["weights_hash"]
