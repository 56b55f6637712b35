"""The vlm graded twice: what differs is counted, shown, and names its documents."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mergelab.cli import main
from mergelab.evals.suite import EvalSuite, TaskResult
from mergelab.records import PointFolder, read_run
from tests.builders import tiny_llama, tiny_llava


@pytest.fixture
def root(tmp_path: Path) -> Path:
    base = tiny_llama(tmp_path / "base", seed=1)
    tiny_llava(tmp_path / "vlm", seed=2, start=base, noise=1.0)
    row = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    lines = [{"key": n, "prompt": prompt, **row} for n, prompt in enumerate(["a cat ?", "red blue", "one", "two"])]
    (tmp_path / "ifeval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "recipe.yaml").write_text(
        "name: tiny\npair: bench\ncontrols: []\nmethod: task_arithmetic\n"
        "evals: {tasks: [ifeval], data: {ifeval: ifeval.jsonl}, max_gen_toks: {ifeval: 6}}\n"
    )
    return tmp_path


def call(root: Path, *settings: str) -> Result:
    options = [part for setting in settings for part in ("--set", setting)]
    parents = ["--base", str(root / "base"), "--vlm", str(root / "vlm"), "--out", str(root / "run")]
    result = CliRunner().invoke(main, ["run", str(root / "recipe.yaml"), *parents, "--device", "cpu", *options])
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def vlm(root: Path) -> PointFolder:
    return next(point for point in read_run(root / "run").points if point.role == "vlm")


def test_second_grading_is_added_to_a_finished_run_and_done_once(root: Path) -> None:
    first = call(root)
    assert vlm(root).replicate is None and "noise floor" not in first.stdout
    result = call(root, "evals.replicate=true")
    assert result.stderr.count("] ") == 1, "the vlm alone"
    assert len(read_run(root / "run").points) == 3
    assert "noise floor: vlm graded twice on ifeval: 0 of 4 answers differ" in " ".join(result.stdout.split())
    replicate = vlm(root).replicate
    assert replicate is not None and replicate["tasks"]["ifeval"]["differing"] == []
    assert "finished before" in call(root, "evals.replicate=true").stderr
    assert all(point.replicate is None for point in read_run(root / "run").points if point.role != "vlm")


def test_what_differs_is_counted_and_named(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call(root)
    real = EvalSuite.evaluate

    def unsteady(self: EvalSuite, *given: Any, **settings: Any) -> TaskResult:
        result = real(self, *given, **settings)
        samples = [dict(sample) for sample in result.samples]
        samples[1]["response"] += "?"
        samples[2] |= {"response": "else", "strict": 1 - samples[2]["strict"]}
        return dataclasses.replace(result, samples=samples)

    monkeypatch.setattr(EvalSuite, "evaluate", unsteady)
    result = call(root, "evals.replicate=true")
    point = vlm(root)
    assert point.replicate is not None
    found = point.replicate["tasks"]["ifeval"]
    assert (found["n"], found["different_answers"], found["strict_discordant"], found["flexible_discordant"]) == (
        *(4, 2),
        *(1, 0),
    )
    assert [one["doc_id"] for one in found["differing"]] == [1, 2]
    old = point.tasks["ifeval"].samples[2]["strict"]
    assert found["differing"][1]["strict"] == [old, 1 - old]
    said = "2 of 4 answers differ, 1 strict verdicts (25.0 %), 0 flexible verdicts (0.0 %)."
    assert said in " ".join(result.stdout.split())
    assert said in (root / "run" / "report" / "table.md").read_text()


def test_replicate_of_answers_asked_otherwise_is_not_shown(root: Path) -> None:
    call(root, "evals.replicate=true")
    assert "noise floor" not in call(root, "evals.max_gen_toks.ifeval=3").stdout


def test_table_says_how_fast_a_task_went(root: Path) -> None:
    call(root)
    table = (root / "run" / "report" / "table.md").read_text()
    assert "Seconds a point: median " in table and "Tokens per second: median " in table
