from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mergelab import records
from mergelab.errors import DamagedFileError, OutputFolderError
from tests.report.run_folders import TEXT, PointMaker, samples, scores, write_run


@pytest.fixture
def folder(tmp_path):
    target = tmp_path / "run"
    write_run(target, [PointMaker("base", text=scores(3, 2)), PointMaker("vlm", text=scores(1, 4))])
    return target


def task_folder(folder, point="base"):
    return folder / "points" / point / "tasks" / TEXT


def metrics(**changes):
    return {"key": "k", "task": TEXT, "modality": "text", "protocol": "bench-v1", "n": 5, **changes}


def test_what_is_written_is_read_back(folder):
    run = records.read_run(folder)
    assert [point.point_id for point in run.points] == ["base", "vlm"]
    assert [point.role for point in run.points] == ["base", "vlm"]
    base = run.points[0]
    assert base.merge is None and base.sink["sink_strength"] == 1.0
    assert base.tasks[TEXT].samples == tuple(samples(scores(3, 2), author="base"))
    assert base.tasks[TEXT].metrics["num_samples"] == 5
    assert run.experiment["format"] == 1 and run.missing == () and run.unlisted == ()


@pytest.mark.parametrize("response", ["two\nlines", "line\u2028separator", "\ud800 alone", "\x00", "日本"])
def test_any_answer_survives(folder, response):
    lines = samples(scores(1, 0))
    lines[0]["response"] = response
    records.write_task(folder, "base", TEXT, metrics(), lines)
    assert records.read_run(folder).points[0].tasks[TEXT].samples[0]["response"] == response


def test_points_that_have_not_begun_are_missing_and_dropped_ones_unlisted(tmp_path):
    points = [PointMaker("base", text=scores(1, 1)), PointMaker("vlm", text=scores(1, 1))]
    run = write_run(tmp_path / "run", points, missing=["merge-later"])
    assert run.missing == ("merge-later",)
    experiment = {**run.experiment, "points": ["vlm"]}
    records.write_experiment(tmp_path / "run", experiment)
    again = records.read_run(tmp_path / "run")
    assert [point.point_id for point in again.points] == ["vlm"] and again.unlisted == ("base",)


def test_a_stage_is_done_when_it_carries_its_key(folder):
    assert records.read_stage_key(folder, "base", "sink") == "s"
    assert records.read_stage_key(folder, "base", "merge") is None
    assert records.read_task_key(folder, "base", TEXT) == "t"
    assert records.read_task_key(folder, "base", "other") is None
    (folder / "points/base/sink.json").write_text("{}")
    assert records.read_stage_key(folder, "base", "sink") is None
    assert records.read_run(folder).points[0].sink is None


@pytest.mark.parametrize("left", ["samples.jsonl", "metrics.json"])
def test_a_task_with_one_of_its_two_files_is_not_done(folder, left):
    for path in task_folder(folder).iterdir():
        if path.name != left:
            path.unlink()
    assert records.read_task_key(folder, "base", TEXT) is None


def test_a_kill_between_the_two_files_of_a_task_leaves_it_not_done(folder, monkeypatch):
    def killed(path, value):
        raise KeyboardInterrupt

    monkeypatch.setattr("mergelab.atomic.write_json", killed)
    with pytest.raises(KeyboardInterrupt):
        records.write_task(folder, "base", TEXT, metrics(key="new"), samples(scores(5, 0)))
    assert records.read_task_key(folder, "base", TEXT) is None
    assert TEXT not in records.read_run(folder).points[0].tasks


def edit_json(path, **changes):
    value = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: entry for name, entry in value.items() if entry is not ...}))


def tear_samples(folder):
    path = task_folder(folder) / "samples.jsonl"
    path.write_bytes(path.read_bytes()[:-20])


def drop_a_line(folder):
    path = task_folder(folder) / "samples.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def edit_line(folder, number, **changes):
    path = task_folder(folder) / "samples.jsonl"
    lines = path.read_text().splitlines()
    value = {**json.loads(lines[number]), **changes}
    lines[number] = json.dumps({name: entry for name, entry in value.items() if entry is not ...})
    path.write_text("\n".join(lines) + "\n")


def replace_text(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        pytest.param(tear_samples, ["samples.jsonl, line 5", "torn"], id="torn line"),
        pytest.param(drop_a_line, ["samples.jsonl", "expected 5 lines", "found 4"], id="truncated"),
        pytest.param(lambda f: edit_line(f, 2, response="x"), ["samples.jsonl", "samples_sha256"], id="edited"),
        pytest.param(lambda f: edit_line(f, 2, doc_id=0), ["line 3", "document 0", "line 1"], id="doubled"),
        pytest.param(lambda f: edit_line(f, 1, strict=57), ["line 2", "strict", "57"], id="score out of range"),
        pytest.param(lambda f: edit_line(f, 1, doc_hash=...), ["line 2", "doc_hash"], id="no hash"),
        pytest.param(
            lambda f: replace_text(task_folder(f) / "samples.jsonl", '"strict": 1.0', '"strict": NaN'),
            ["line 1", "NaN"],
            id="nan",
        ),
        pytest.param(
            lambda f: (task_folder(f) / "samples.jsonl").unlink(),
            ["samples.jsonl", "no file"],
            id="no samples",
        ),
        pytest.param(
            lambda f: edit_json(task_folder(f) / "metrics.json", protocol=...),
            ["metrics.json", "protocol"],
            id="metrics",
        ),
        pytest.param(
            lambda f: edit_json(task_folder(f) / "metrics.json", task="ifeval"),
            ["metrics.json", "ifeval"],
            id="task",
        ),
        pytest.param(
            lambda f: (f / "points/base/sink.json").write_text('{\n"key": "s",\n'),
            ["sink.json, line 3"],
            id="torn json",
        ),
        pytest.param(lambda f: (f / "points/base/sink.json").write_text("[]"), ["sink.json", "list"], id="no object"),
        pytest.param(lambda f: (f / "points/base/sink.json").write_bytes(b"\xff\xfe"), ["sink.json"], id="not text"),
        pytest.param(
            lambda f: edit_json(f / "points/base/point.json", format=2),
            ["point.json", "expected 1, found 2"],
            id="format",
        ),
        pytest.param(lambda f: edit_json(f / "points/base/point.json", role="king"), ["point.json", "king"], id="role"),
        pytest.param(
            lambda f: edit_json(f / "points/base/point.json", point_id="x"), ["point.json", "'x'"], id="moved"
        ),
        pytest.param(
            lambda f: edit_json(f / "experiment.json", format=99),
            ["experiment.json", "found 99"],
            id="newer format",
        ),
        pytest.param(
            lambda f: edit_json(f / "experiment.json", format=...),
            ["experiment.json", "None"],
            id="foreign json",
        ),
        pytest.param(
            lambda f: edit_json(f / "experiment.json", points=["../base"]),
            ["experiment.json", "points"],
            id="outside",
        ),
        pytest.param(
            lambda f: edit_json(f / "experiment.json", claims={"margin": "2"}),
            ["experiment.json", "claims"],
            id="claims",
        ),
        pytest.param(lambda f: (f / "experiment.json").unlink(), ["no experiment.json"], id="foreign folder"),
    ],
)
def test_damage_is_named_with_file_and_line(folder, damage, words):
    records.read_run(folder)
    damage(folder)
    with pytest.raises(DamagedFileError) as caught:
        records.read_run(folder)
    assert [word for word in words if word not in str(caught.value)] == []
    assert caught.value.exit_code == 5


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DamagedFileError, match="nothing-here"):
        records.read_run(tmp_path / "nothing-here")


@pytest.mark.parametrize(
    "write",
    [
        pytest.param(lambda f: records.write_experiment(f, {"points": []}), id="experiment"),
        pytest.param(lambda f: records.write_point(f, {"point_id": "x"}), id="point"),
        pytest.param(
            lambda f: records.write_point(f, {"point_id": "../x", "role": "merge", "method": "m", "parameters": {}}),
            id="point id",
        ),
        pytest.param(lambda f: records.write_stage(f, "x", "sink", {"sink_strength": 1}), id="no key"),
        pytest.param(lambda f: records.write_stage(f, "x", "stink", {"key": "k"}), id="stage"),
        pytest.param(lambda f: records.write_stage(f, "a/b", "sink", {"key": "k"}), id="stage id"),
        pytest.param(lambda f: records.write_task(f, "x", TEXT, {"task": TEXT}, []), id="task key"),
        pytest.param(lambda f: records.write_task(f, "x", TEXT, metrics(), [{"doc_id": 1}]), id="sample"),
        pytest.param(lambda f: records.write_task(f, "x", "other", metrics(), []), id="task name"),
        pytest.param(
            lambda f: records.write_stage(f, "x", "sink", {"key": "k", "sink_strength": float("inf")}),
            id="infinity",
        ),
    ],
)
def test_writers_refuse_what_readers_would(tmp_path, write):
    with pytest.raises(ValueError, match=r"."):
        write(tmp_path / "run")
    assert not list((tmp_path / "run").rglob("*.json*"))


def test_foreign_folders_are_refused_and_own_ones_are_not(tmp_path, folder):
    records.refuse_foreign_folder(folder)
    records.refuse_foreign_folder(tmp_path / "new")
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked" / ".lock").touch()
    records.refuse_foreign_folder(tmp_path / "locked")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").touch()
    with pytest.raises(OutputFolderError, match=r"cat\.jpg"):
        records.refuse_foreign_folder(tmp_path / "photos")
    with pytest.raises(OutputFolderError, match="found a file"):
        records.refuse_foreign_folder(tmp_path / "photos" / "cat.jpg")


NO_TORCH = "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"


@pytest.mark.parametrize(
    ("imports", "code"),
    [
        ("import mergelab.records, mergelab.report.table, mergelab.report.terminal", 0),
        pytest.param("sys.modules['torch'] = sys", 1, id="the check can fail"),
    ],
)
def test_records_and_reports_load_no_torch(imports, code):
    assert subprocess.run([sys.executable, "-c", f"import sys; {imports}; {NO_TORCH}"], check=False).returncode == code
