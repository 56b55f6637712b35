"""A user's run as a row of the panel."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mergelab import records
from mergelab.errors import DamagedFileError
from mergelab.report.panel import run_entry
from tests.report import run_folders
from tests.report.run_folders import PointMaker, scores, write_run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run_folders, "TEXT", "ifeval")
    points = [PointMaker("base", text=scores(80, 20)), PointMaker("vlm", text=scores(70, 30))]
    folder = tmp_path / "run"
    write_run(folder, points, primary=["ifeval"])
    return folder


def give_sink(folder: Path, strength: float | None) -> None:
    value = {"key": "s", "sink_strength": 1.31, "sink_strength_bf16": strength, "dtype": "bfloat16"}
    records.write_stage(folder, "base", "sink", value)


def test_run_becomes_a_row(run: Path) -> None:
    give_sink(run, 1.296875)
    experiment = json.loads((run / "experiment.json").read_text())
    experiment["pair"] = {"base": {"id": "Qwen/Qwen2.5-7B-Instruct", "revision": "abc"}, "vlm": "/models/mine"}
    (run / "experiment.json").write_text(json.dumps(experiment))
    entry = run_entry(run)
    assert entry.sink_strength == 1.296875
    assert entry.deltas == {"ifeval": -10.0}
    assert (entry.base, entry.vlm) == ("Qwen2.5-7B-Instruct", "mine")
    assert entry.panel is None
    assert "100 prompts" in entry.notes


def test_run_without_named_models_still_names_them(run: Path) -> None:
    give_sink(run, 1.25)
    assert run_entry(run).base == "base of run"


def test_what_a_run_lacks_is_named(run: Path, tmp_path: Path) -> None:
    with pytest.raises(DamagedFileError, match="bfloat16 read-out of Sink Strength"):
        run_entry(run)  # its sink has no bfloat16 read-out
    give_sink(run, 1.0)
    records.remove_task(run, "vlm", "ifeval")
    with pytest.raises(DamagedFileError, match=r"lacks ifeval of base and vlm \(graded: ifeval\)"):
        run_entry(run)
    with pytest.raises(DamagedFileError, match="found nothing"):
        run_entry(tmp_path / "nowhere")
