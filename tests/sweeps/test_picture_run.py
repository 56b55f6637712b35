"""Picture tasks in a sweep: the copies repeat their parents, a merge differs, doctor and regrade know them."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mergelab import records
from mergelab.cli import main
from mergelab.report.pairing import count_different_answers
from tests.evals.picture_models import chart_documents, mmmu_documents, seeing_llava, tiny_base
from tests.evals.result_files import write_chartqa
from tests.evals.scripted import write_jsonl

RECIPE = """
name: pictures
pair: bench
controls: [endpoints]
merges:
  - {method: linear, parameters: {weights: {base: 0.7, vlm: 0.3}}}
evals:
  protocol: paper-instruct-v1
  tasks: [boolq, chartqa, mmmu_val]
  data: {boolq: boolq.jsonl, chartqa: data/chartqa.jsonl, mmmu_val: data/mmmu.jsonl}
  max_gen_toks: {chartqa: 6, mmmu_val: 6}
"""


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pictures")
    tiny_base(root / "base", seeing_llava(root / "vlm", seed=6))
    chart_documents(root / "data")
    mmmu_documents(root / "data")
    write_jsonl(root / "boolq.jsonl", [{"passage": "a cat", "question": "red", "label": 1}] * 2)
    (root / "recipe.yaml").write_text(RECIPE)
    return root


def models(home: Path) -> list[object]:
    return ["--base", home / "base", "--vlm", home / "vlm"]


@pytest.fixture(scope="module")
def finished(home: Path) -> Path:
    result = call("run", home / "recipe.yaml", *models(home), "--out", home / "run", "--device", "cpu")
    assert result.exit_code == 0, (result.output, result.exception)
    return home / "run"


def point(run: records.Run, role: str, of: str | None = None) -> records.PointFolder:
    return next(
        one
        for one in run.points
        if one.role == role and (of is None or (one.point["parameters"] or {}).get("of") == of)
    )


def test_copy_of_vlm_repeats_it_and_a_merge_differs(finished: Path) -> None:
    run = records.read_run(finished)
    vlm, copied, merged = point(run, "vlm"), point(run, "control", "vlm"), point(run, "merge")
    blind = point(run, "control", "base")
    for task in ("chartqa", "mmmu_val"):
        own = vlm.tasks[task].samples
        assert count_different_answers(own, copied.tasks[task].samples) == 0
        assert [line["strict"] for line in own] == [line["strict"] for line in copied.tasks[task].samples]
    for other in (merged, blind):
        assert count_different_answers(vlm.tasks["chartqa"].samples, other.tasks["chartqa"].samples) > 0
    assert vlm.tasks["chartqa"].metrics["strict"] > 0
    assert "chartqa" not in point(run, "base").tasks
    assert {len(one.tasks["chartqa"].samples) for one in run.points if one.role != "base"} == {12}


def test_the_same_command_does_nothing_more_and_regrading_changes_nothing(home: Path, finished: Path) -> None:
    files = sorted(finished.glob("points/*/tasks/*/samples.jsonl"))
    before = [(path, path.stat().st_mtime_ns, path.read_bytes()) for path in files]
    result = call("run", home / "recipe.yaml", *models(home), "--out", finished, "--device", "cpu")
    assert result.exit_code == 0, result.output
    result = call("regrade", finished, "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    found = json.loads(result.stdout)
    assert {one["task"] for one in found} == {"chartqa", "mmmu_val"}
    assert not any(one["rewritten"] for one in found), "draws included"
    assert [(path, path.stat().st_mtime_ns, path.read_bytes()) for path in files] == before


def test_another_processor_is_another_question(home: Path, finished: Path, tmp_path: Path) -> None:
    other = tmp_path / "vlm"
    shutil.copytree(home / "vlm", other)
    settings = json.loads((other / "processor_config.json").read_text())
    settings["image_processor"]["image_mean"] = [0.1, 0.1, 0.1]
    (other / "processor_config.json").write_text(json.dumps(settings))
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    before = {path: path.read_bytes() for path in folder.glob("points/*/tasks/*/metrics.json")}
    arguments = ["--base", home / "base", "--vlm", other, "--out", folder, "--device", "cpu"]
    result = call("run", home / "recipe.yaml", *arguments)
    assert result.exit_code == 0, result.output
    changed = {path.parent.name for path, content in before.items() if path.read_bytes() != content}
    assert changed == {"chartqa", "mmmu_val"}


def test_a_written_merge_answers_like_its_point(home: Path, finished: Path, tmp_path: Path) -> None:
    run = records.read_run(finished)
    merged = point(run, "merge")
    arguments = ["--point", merged.point_id, "--out", tmp_path / "merged", "--as", "vlm", "--device", "cpu"]
    result = call("merge", home / "recipe.yaml", *models(home), *arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    assert (tmp_path / "merged" / "processor_config.json").is_file()
    asked = [
        "--tasks",
        "chartqa",
        "--data",
        f"chartqa={home / 'data' / 'chartqa.jsonl'}",
        "--max-gen-toks",
        "chartqa=6",
    ]
    result = call("eval", tmp_path / "merged", *asked, "--samples", tmp_path / "samples", "--device", "cpu")
    assert result.exit_code == 0, (result.output, result.exception)
    lines = [json.loads(line) for line in (tmp_path / "samples" / "chartqa.jsonl").read_text().splitlines()]
    assert lines == [dict(line) for line in merged.tasks["chartqa"].samples]


def test_doctor_names_a_missing_processor_before_any_merge(home: Path, tmp_path: Path) -> None:
    result = call("doctor", home / "recipe.yaml", *models(home), "--json")
    checks = {check["what"]: check for check in json.loads(result.stdout)}
    assert checks["processor vlm"]["ok"] and checks["reader of pictures"]["found"].startswith("pillow "), checks
    assert result.exit_code == 0, result.output
    bare = tmp_path / "vlm"
    shutil.copytree(home / "vlm", bare)
    (bare / "processor_config.json").unlink()
    arguments = ["--base", home / "base", "--vlm", bare]
    result = call("doctor", home / "recipe.yaml", *arguments, "--json")
    checks = {check["what"]: check for check in json.loads(result.stdout)}
    assert not checks["processor vlm"]["ok"] and "preprocessor_config.json" in checks["processor vlm"]["found"]
    assert result.exit_code == 5
    result = call("run", home / "recipe.yaml", *arguments, "--out", tmp_path / "run", "--device", "cpu")
    assert result.exit_code == 5 and "its processor cannot be loaded" in result.output
    assert not list(tmp_path.glob("run/points/*"))


def test_imported_results_outlive_the_run_and_are_not_regraded(home: Path, finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    file = write_chartqa(tmp_path / "20260806_samples_chartqa.jsonl", [True, False, True, True])
    assert call("import-samples", folder, file, "--task", "chartqa", "--point", "vlm").exit_code == 3
    for given in ("vlm", point(records.read_run(folder), "merge").point_id[:6]):
        result = call("import-samples", folder, file, "--task", "chartqa_lmms", "--point", given)
        assert result.exit_code == 0, (result.output, result.exception)
    before = (folder / "experiment.json").read_bytes()
    result = call("run", home / "recipe.yaml", *models(home), "--out", folder, "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert (folder / "experiment.json").read_bytes() == before
    tasks = [task["task"] for task in records.read_run(folder).experiment["tasks"]]
    assert tasks == ["boolq", "chartqa", "mmmu_val", "chartqa_lmms"]
    assert {one["task"] for one in json.loads(call("regrade", folder, "--json").stdout)} == {"chartqa", "mmmu_val"}
