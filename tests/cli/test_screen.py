"""``mergelab screen``: the panel, the check of the paper, and where models fall."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mergelab.cli import main
from mergelab.cli.screen import _placed, _sentence
from mergelab.report import panel
from tests.builders import tiny_llama


def mergelab(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "what is the colour of a cat ?"}\n{"prompt": "one two three"}\n')
    return path


def test_panel_alone() -> None:
    result = mergelab("screen")
    assert result.exit_code == 0
    assert "six main pairs have four distinct S" in " ".join(result.stdout.split())
    assert all(entry.vlm in result.stdout for entry in panel.load_panel())
    assert max(len(line) for line in result.stdout.splitlines()) <= 100


def test_panel_as_json() -> None:
    found = json.loads(mergelab("screen", "--json").stdout)
    assert len(found["panel"]) == 17
    assert found["models"] == []
    assert found["panel"][0]["source"].startswith("arXiv 2609.00746")


def test_verify_prints_checks() -> None:
    result = mergelab("screen", "--verify", "--json")
    assert result.exit_code == 0
    checks = json.loads(result.stdout)
    assert len(checks) == 47
    assert all(check["ok"] is True and {"quantity", "paper", "recomputed"} <= check.keys() for check in checks)


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_verify_fails_on_a_table_that_does_not_say_what_the_paper_says(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for path in (resources.files("mergelab.report") / "data").iterdir():
        text = path.read_text("utf-8")
        (data / path.name).write_text(text.replace("-0.21,,,-22.7", "-0.21,,,-2.27"))
    monkeypatch.setattr(panel.resources, "files", lambda _package: tmp_path)
    result = mergelab("screen", "--verify", *more)
    assert result.exit_code == 5
    assert "spearman, 17 pairs, sink_strength ifeval" in result.stderr
    assert result.stdout, "the table says which figures do not agree"
    if more:
        assert [check["quantity"] for check in json.loads(result.stdout) if not check["ok"]] == [
            "spearman, 17 pairs, sink_strength ifeval"
        ]


def test_model_is_placed(tmp_path: Path, prompts: Path) -> None:
    model = tiny_llama(tmp_path / "mine")
    result = mergelab("screen", model, "--prompts", prompts, "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    (found,) = json.loads(result.stdout)["models"]
    assert found["dtype"] == "bfloat16"
    assert found["prediction"]["sink_strength"] == found["sink_strength_bf16"]
    # Random weights attend evenly: S is far below the panel.
    assert found["prediction"]["is_extrapolation"] is True
    printed = " ".join(mergelab("screen", model, "--prompts", prompts, "--device", "cpu").stdout.split())
    assert "mine: S" in printed
    assert "this is extrapolation" in printed
    assert "Longer prompts lower S" in printed


@pytest.mark.parametrize(("rounded", "words"), [(1.25, "S 1.25 (bf16 read-out)"), (None, "S 6.00 (float32 read-out,")])
def test_sentence_says_which_read_out_was_placed(rounded: float | None, words: str) -> None:
    record = {"model": "mine", "sink_strength": 6.0, "sink_strength_bf16": rounded}
    assert words in _sentence(_placed(record, list(panel.load_panel())))


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    assert mergelab("screen", "--verify", tmp_path).exit_code == 2
    result = mergelab("screen", "--add", tmp_path)
    assert (result.exit_code, result.stdout) == (5, "")
    assert "experiment.json" in result.stderr
    assert mergelab("screen", tmp_path / "absent" / "model").exit_code == 5
