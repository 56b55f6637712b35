"""Local documents: JSONL files read line by line, every fault named with its file and line.

Only reading and checking. Which split a file stands for, and what a task does with it, is decided in
``loading``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mergelab.errors import RecipeError, problem_list

_SHOWN = 5

Document = dict[str, Any]


def read_documents(task: str, path: Path, fields: Mapping[str, type]) -> list[Document]:
    """Read the documents of a JSONL file, one object a line; blank lines are skipped.

    Args:
        task: The task they are for, used in messages.
        path: The file.
        fields: Field -> type that every document must have; further fields are kept.

    Returns:
        The documents in file order, at least one.

    Raises:
        RecipeError: The file is missing, unreadable, empty, or lines are not JSON objects with these fields.
            All faulty lines are counted and the first ones named.
    """
    if not path.is_file():
        raise RecipeError(f"task {task}: expected a JSONL file of documents at {path}, found none. Check evals.data.")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"task {task}: cannot read {path} as UTF-8 text: {error}. Check evals.data.") from error
    documents: list[Document] = []
    problems: list[str] = []
    # Not splitlines(): it also splits at separators that may stand inside a JSON string.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        fault = None
        try:
            document = json.loads(line)
        except json.JSONDecodeError as error:
            fault = f"not JSON: {error.msg} at column {error.colno}"
        else:
            fault = _field_fault(document, fields)
        if fault:
            problems.append(f"line {number}: {fault}")
        else:
            documents.append(document)
    if problems:
        shown = problems[:_SHOWN]
        if len(problems) > _SHOWN:
            shown.append(f"{len(problems) - _SHOWN} more lines")
        raise RecipeError(problem_list(f"task {task}: {path}: {len(problems)} lines are not documents of it.", shown))
    if not documents:
        raise RecipeError(f"task {task}: {path} is empty: expected one JSON object a line, found none.")
    return documents


def _field_fault(document: Any, fields: Mapping[str, type]) -> str | None:
    """Return what is wrong with one parsed line, or None."""
    if not isinstance(document, dict):
        return f"expected a JSON object, found {type(document).__name__}"
    missing = [name for name in fields if name not in document]
    if missing:
        return f"fields missing: {', '.join(missing)} (found {', '.join(sorted(document)) or 'none'})"
    for name, kind in fields.items():
        value = document[name]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            return f"field {name}: expected {kind.__name__}, found {type(value).__name__}"
    return None


def read_splits(task: str, path: Path, fields: Mapping[str, type], eval_split: str) -> dict[str, list[Document]]:
    """Read a file as the split that is graded, or a folder as one split per ``<split>.jsonl``.

    Raises:
        RecipeError: As for ``read_documents``, or a folder lacks the graded split.
    """
    if not path.is_dir():
        return {eval_split: read_documents(task, path, fields)}
    files = {file.stem: file for file in sorted(path.glob("*.jsonl"))}
    if eval_split not in files:
        raise RecipeError(
            f"task {task}: expected {eval_split}.jsonl in {path}, found {', '.join(files) or 'none'}. "
            "Name each file after its split."
        )
    return {split: read_documents(task, file, fields) for split, file in files.items()}


def named_data(folder: Path, task: str) -> Path | None:
    """Return ``folder/TASK.jsonl``, or the folder of splits ``folder/TASK``, or None.

    Raises:
        RecipeError: Both are there.
    """
    found = [path for path in (folder / f"{task}.jsonl", folder / task) if path.exists()]
    if len(found) == 2:
        raise RecipeError(f"task {task}: expected one of {found[0]} and {found[1]}, found both. Keep one.")
    return found[0] if found else None
