"""Results of other harnesses in a run folder: one table with our own, refused where they do not pair."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mergelab import records
from mergelab.cli import main
from mergelab.report.rows import rows
from mergelab.report.table import write_report
from tests.evals.result_files import (
    QUESTIONS,
    TARGETS,
    lmms_line,
    table_rows,
    write_lines,
    write_results_beside,
    write_table,
)
from tests.report.run_folders import PointMaker, scores, write_run

TASK = "chartqa_lmms"
N = 240


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with text alone, finished."""

    def text(right: int) -> list[float]:
        return scores(right, 600 - right)

    points = [
        PointMaker("base", text=text(570), weights="base"),
        PointMaker("vlm", text=text(200), weights="vlm"),
        PointMaker("control", text=text(570), method="copy", parameters={"of": "base"}, weights="base", author="base"),
        PointMaker("control", text=text(200), method="copy", parameters={"of": "vlm"}, weights="vlm", author="vlm"),
        PointMaker("merge", text=text(570), method="ties", parameters={"lambda": 0.5}),
        PointMaker("merge", text=text(569), method="ties", parameters={"lambda": 1.0}),
    ]
    write_run(tmp_path / "run", points, primary=("bench_format",))
    return tmp_path / "run"


def lines(right: int, wrong: str = "no idea", n: int = N) -> list[dict[str, Any]]:
    """Lines of lmms-eval, four questions over and over, of which the last ones are answered wrongly."""
    found = []
    for place in range(n):
        line = lmms_line(
            place % 4, TARGETS[place % 4] if place < right else wrong, relaxed_overall=float(place < right)
        )
        found.append({**line, "doc_id": place, "input": f"{place}: {QUESTIONS[place % 4]}"})
    return found


def call(folder: Path, file: Path, point: str, *more: str, task: str = TASK) -> Result:
    return CliRunner().invoke(main, ["import-samples", str(folder), str(file), "--task", task, "--point", point, *more])


def give(folder: Path, point: str, found: list[dict[str, Any]], *more: str) -> Result:
    path = folder.parent / point.replace(".", "_") / "20260806_102223_samples_chartqa.jsonl"
    return call(folder, write_lines(path, found), point, *more)


def ok(result: Result) -> None:
    assert result.exit_code == 0, (result.output, result.exception)


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file() and p.name != ".lock"}


def test_text_and_pictures_stand_in_one_table(folder: Path) -> None:
    ok(give(folder, "vlm", lines(220)))
    ok(give(folder, "control-copy-ofbase", lines(30, "blind")))
    ok(give(folder, "control-copy-ofvlm", lines(220)))
    ok(give(folder, "merge-ties-lambda0.5", lines(220, "merged")))
    ok(give(folder, "merge-ties-lambda1.0", lines(100, "other")))
    run = records.read_run(folder)
    found = {row.point_id: row for row in rows(run) if row.task == TASK}
    assert found["vlm"].strict == pytest.approx(100 * 220 / 240, abs=1e-3)
    assert {point_id: row.verdict for point_id, row in found.items()} == {
        "vlm": "",
        "control-copy-ofbase": "lost",
        "control-copy-ofvlm": "retained",
        "merge-ties-lambda0.5": "retained",
        "merge-ties-lambda1.0": "lost",
    }
    assert found["merge-ties-lambda0.5"].overall == "restored"
    assert found["merge-ties-lambda1.0"].overall == "restored, pictures lost"
    result = CliRunner().invoke(main, ["report", str(folder)])
    ok(result)
    assert f"pictures: {TASK}, n = 240" in result.stdout
    assert "2 of 2 merges restore text, 1 of them keep pictures." in result.stdout
    assert f"control passed: the copy of vlm repeats vlm on all 240 documents of {TASK}" in result.stdout
    assert f"{TASK} is imported, graded by lmms-eval" in " ".join(result.stdout.split())
    with write_report(run).csv.open() as file:
        line = next(row for row in csv.DictReader(file) if row["task"] == TASK and row["role"] == "merge")
    assert (line["modality"], line["reference"], line["protocol"], line["truncated"]) == (
        "vision",
        "vlm",
        "lmms-eval",
        "",
    )


def test_provenance_is_in_the_record(folder: Path) -> None:
    path = write_lines(folder.parent / "logs" / "20260806_102223_samples_chartqa.jsonl", lines(200))
    write_results_beside(path)
    ok(call(folder, path, "vlm", "--json"))
    metrics = records.read_run(folder).points[1].tasks[TASK].metrics
    assert metrics["protocol"] == "lmms-eval 0.7.2 (75571cfe)"
    told = metrics["imported"]
    assert told["file"] == path.name and len(told["file_sha256"]) == 64
    assert told["results_file"] == "20260806_102223_results.json" and told["model_args"] == "pretrained=merged"


def test_other_documents_are_refused_and_the_first_is_named(folder: Path) -> None:
    ok(give(folder, "vlm", lines(220)))
    before = everything(folder)
    other = lines(220)
    other[7] = {**other[7], "target": "8"}
    other[9] = {**other[9], "input": "something else"}
    result = give(folder, "merge-ties-lambda0.5", other)
    assert result.exit_code == 3 and "document 7 has another target there" in result.output
    assert "does not pair with vlm" in result.output
    result = give(folder, "merge-ties-lambda0.5", lines(100, n=100))
    assert result.exit_code == 3 and "its document 100 is missing here (100 of 240 documents)" in result.output
    assert everything(folder) == before


def test_another_tool_or_score_is_refused(folder: Path) -> None:
    ok(give(folder, "vlm", lines(220)))
    table = write_table(folder.parent / "a_result.xlsx", table_rows([True, False, True, True]))
    result = call(folder, table, "merge-ties-lambda0.5")
    assert result.exit_code == 3
    for said in ("tool lmms-eval, this file with VLMEvalKit", "strict score relaxed_overall, this file with hit"):
        assert said in result.output


def test_all_problems_come_at_once(folder: Path) -> None:
    result = call(folder, folder / "nothing.jsonl", "nobody", task="bench_format")
    assert result.exit_code == 3
    for said in ("--point nobody: no such point", "the run grades this task itself", "found none"):
        assert said in result.output
    assert "merge-ties-lambda0.5" in result.output, "the points there are"


def test_a_text_model_sends_one_to_its_copy_in_the_vlm(folder: Path) -> None:
    result = give(folder, "base", lines(10))
    assert result.exit_code == 3 and "mergelab merge --point control-copy-ofbase --as vlm" in result.output


def test_results_are_replaced_only_on_request(folder: Path) -> None:
    ok(give(folder, "vlm", lines(220)))
    result = give(folder, "vlm", lines(220))
    assert result.exit_code == 3 and "(this very file)" in result.output and "--replace" in result.output
    ok(give(folder, "vlm", lines(210), "--replace"))
    assert records.read_run(folder).points[1].tasks[TASK].metrics["strict"] == pytest.approx(87.5)


def test_one_file_for_two_models_is_doubted(folder: Path) -> None:
    ok(give(folder, "vlm", lines(220)))
    copied = give(folder, "control-copy-ofvlm", lines(220))
    ok(copied)
    assert "whose weights are others" not in copied.output
    merged = give(folder, "merge-ties-lambda0.5", lines(220))
    ok(merged)
    assert "is also what vlm has, whose weights are others" in merged.output


def test_clusters_widen_the_interval(folder: Path) -> None:
    def clustered(right: int) -> list[dict[str, Any]]:
        return [{**line, "picture": f"p{place // 8}"} for place, line in enumerate(lines(right))]

    ok(give(folder, "vlm", clustered(220), "--cluster", "picture"))
    ok(give(folder, "merge-ties-lambda0.5", clustered(180), "--cluster", "picture"))
    ok(call(folder, write_lines(folder.parent / "v.jsonl", lines(220)), "vlm", task="plain"))
    ok(call(folder, write_lines(folder.parent / "m.jsonl", lines(180)), "merge-ties-lambda0.5", task="plain"))
    found = {(row.task, row.role): row for row in rows(records.read_run(folder)) if row.modality == "vision"}
    wide, narrow = (found[task, "merge"] for task in (TASK, "plain"))
    assert wide.delta_vlm == narrow.delta_vlm
    assert wide.delta_vlm_high - wide.delta_vlm_low > 1.5 * (narrow.delta_vlm_high - narrow.delta_vlm_low)
    assert wide.mde > 1.5 * narrow.mde


def test_table_results_pair_across_kinds_of_file(folder: Path) -> None:
    ok(call(folder, write_table(folder.parent / "a_result.xlsx", table_rows([True, True, False, True])), "vlm"))
    other = write_table(folder.parent / "b_result.tsv", table_rows([True, False, False, True]))
    ok(call(folder, other, "merge-ties-lambda0.5"))
    found = {row.role: row for row in rows(records.read_run(folder)) if row.task == TASK}
    assert (found["vlm"].strict, found["merge"].strict, found["merge"].delta_vlm) == (75.0, 50.0, -25.0)
    assert (
        json.loads((folder / "points/vlm/tasks" / TASK / "samples.jsonl").read_text().splitlines()[0])["doc_id"] == 100
    )
