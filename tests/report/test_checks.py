"""What the report says of the merges themselves, from their records."""

import json
from pathlib import Path
from typing import Any

import pytest

from mergelab.records import Run, read_run
from mergelab.report.checks import notes
from mergelab.report.rows import rows
from tests.report.run_folders import PointMaker, scores, write_run

TEXT = scores(30, 30)


def run_with(folder: Path, *merges: dict[str, Any], method: str = "tsv", values: dict[str, Any] | None = None) -> Run:
    points = [PointMaker("base", text=TEXT), PointMaker("vlm", text=scores(10, 50))]
    points += [
        PointMaker(
            "merge",
            text=scores(20 + number, 40 - number),
            method=method,
            parameters={"lambda": number, **(values or {})},
            merge=m,
        )
        for number, m in enumerate(merges)
    ]
    return write_run(folder, points, primary=["bench_format"])


def said(run: Run, start: str) -> list[str]:
    return [line for line in notes(run, rows(run)) if line.startswith(start)]


def vectors(cosine: float | None, outside: float | None = None) -> dict[str, Any]:
    return {
        "task_vector_cosine": cosine,
        "outside_span_share": outside,
        "vectors": ["base", "vlm"] if cosine is not None else ["vlm"],
        "zero": "ancestor",
    }


@pytest.mark.parametrize(
    ("method", "values", "words"),
    [
        ("task_arithmetic", {}, "Added up (task_arithmetic), lambda 1 counts the change they share twice"),
        ("tsv", {}, "Added up (tsv), lambda 1"),
        ("dare_ties", {"divisor": "none"}, "Added up (dare_ties), lambda 1"),
        ("mergekit:della_linear", {"normalize": False}, "Added up (mergekit:della_linear), lambda 1"),
        ("ties", {"divisor": "weights"}, "Averaged (ties), lambda 1 counts it once, and a smaller one stays nearer to"),
        ("star", {}, "Averaged (star), lambda 1"),
        ("mergekit:ties", {"normalize": True}, "Averaged (mergekit:ties), lambda 1"),
    ],
)
def test_shared_change_is_explained_once(tmp_path: Path, method: str, values: dict[str, Any], words: str) -> None:
    run = run_with(tmp_path, vectors(0.84), vectors(0.84), method=method, values=values)
    (line,) = said(run, "shared change: ")
    assert f"base and vlm from ancestor have cosine 0.84. {words}" in line
    assert line.count("lambda 1 counts") == 1


def test_shared_change_says_nothing_of_lambda_where_there_is_none(tmp_path: Path) -> None:
    (point,) = [PointMaker("merge", text=scores(20, 40), method="mergekit:sce", parameters={}, merge=vectors(0.84))]
    parents = [PointMaker("base", text=TEXT), PointMaker("vlm", text=scores(10, 50))]
    (line,) = said(write_run(tmp_path, [*parents, point], primary=["bench_format"]), "shared change: ")
    assert line.endswith("have cosine 0.84.")


@pytest.mark.parametrize("cosine", [0.3, 0.1, -0.5, None])
def test_vectors_that_share_little_are_not_mentioned(tmp_path: Path, cosine: float | None) -> None:
    assert said(run_with(tmp_path, vectors(cosine), method="ties"), "shared change: ") == []


def test_made_up_part_of_tsv_is_a_warning_with_share_and_cosine(tmp_path: Path) -> None:
    (line,) = said(run_with(tmp_path, vectors(0.8, 0.67), vectors(0.8, 0.7)), "WARNING: ")
    assert "67 to 70 % of the norm of what tsv merged lies outside both task vectors (their cosine is 0.80)" in line
    assert "tsv lambda=0, tsv lambda=1: singular directions that overlap are turned apart" in line


def test_part_of_iso_c_outside_the_plane_has_a_reason_of_its_own(tmp_path: Path) -> None:
    (line,) = said(run_with(tmp_path, vectors(0.8, 0.67), method="iso_c"), "WARNING: ")
    assert "of what iso_c merged lies outside" in line and "get the same weight" in line and "turned" not in line


@pytest.mark.parametrize(("method", "share"), [("tsv", 0.2), ("tsv", None), ("ties", 0.7)])
def test_other_merges_have_no_such_warning(tmp_path: Path, method: str, share: float | None) -> None:
    assert said(run_with(tmp_path, vectors(0.1, share), method=method), "WARNING: ") == []


def test_what_was_announced_stands_in_the_report(tmp_path: Path) -> None:
    run_with(tmp_path, vectors(0.1))
    path = tmp_path / "experiment.json"
    line = "nothing is dropped: ties {} only elects signs."
    path.write_text(json.dumps({**json.loads(path.read_text()), "announced": [line]}))
    assert said(read_run(tmp_path), "nothing is dropped") == [line]


def test_overruled_ancestry_is_said(tmp_path: Path) -> None:
    run = run_with(tmp_path, vectors(None))
    assert not said(run, "--accept-unrelated")
    path = tmp_path / "experiment.json"
    ancestry = {"verdict": "unrelated", "reason": "nothing in common", "projection": None}
    for accepted, lines in ((False, []), (True, ["--accept-unrelated was given, unrelated: nothing in common."])):
        changed = {**run.experiment, "ancestry": {**ancestry, "accepted_unrelated": accepted}}
        path.write_text(json.dumps(changed))
        assert said(read_run(tmp_path), "--accept-unrelated") == lines
