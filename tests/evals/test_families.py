"""Local documents: only the variant that is graded, every one with a member, and each member with its own."""

import json
from pathlib import Path
from typing import Any

import pytest

from mergelab.errors import RecipeError
from mergelab.evals.families import local_splits, read_local
from mergelab.evals.tasks import TASKS

RULER = TASKS["ruler"]
MEMBERS = [{"task": name, "test_split": "test"} for name in ("niah_single_1", "ruler_vt")]


def line(subtask: str, length: int = 4096) -> dict[str, Any]:
    return {"input": "i", "outputs": ["o"], "max_length": length, "gen_prefix": "g", "subtask": subtask}


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def test_documents_of_the_graded_variant_go_to_their_members(tmp_path: Path) -> None:
    data = write(tmp_path / "ruler.jsonl", line("niah_single_1"), line("Ruler VT"), line("ruler_vt", 8192))
    local = read_local(RULER, data, MEMBERS)
    assert [local_splits(RULER, member, local) for member in MEMBERS] == [
        {"test": [line("niah_single_1")]},
        {"test": [line("Ruler VT")]},
    ]
    assert read_local(TASKS["ruler_vt"], data, MEMBERS[1:]).splits == {
        "test": [line("niah_single_1"), line("Ruler VT")]
    }


def test_no_document_of_the_graded_variant_is_refused(tmp_path: Path) -> None:
    data = write(tmp_path / "ruler.jsonl", line("ruler_vt", 8192))
    with pytest.raises(RecipeError, match=r"no document at .* has max_length 4096"):
        read_local(RULER, data, MEMBERS)


def test_documents_without_a_member_are_counted_and_named(tmp_path: Path) -> None:
    lines = [line("ruler_vt"), line("ruler_tv"), line("ruler_tv"), line("other")]
    data = write(tmp_path / "ruler.jsonl", *lines)
    with pytest.raises(
        RecipeError, match=r"3 documents have a subtask .*'ruler_tv' \(did you mean ruler_vt\?\); and 'other'\."
    ):
        read_local(RULER, data, MEMBERS)
