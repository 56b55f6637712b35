"""Local documents of a task: read once, and shared out among the members of a family by subject."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergelab.errors import RecipeError
from mergelab.evals.documents import Document, read_splits
from mergelab.evals.entry import TaskEntry, nearest


@dataclass(frozen=True)
class Local:
    """Documents of a task on disk: where they were read from, and what was read, by split."""

    path: Path
    splits: Mapping[str, list[Document]]


def read_local(entry: TaskEntry, data: Path, configs: Sequence[Mapping[str, Any]]) -> Local:
    """Read ``evals.data`` once for all members of a family.

    Args:
        entry: The task's row.
        data: A JSONL file, or a folder of splits.
        configs: The definition of the task, or of every member.

    Raises:
        RecipeError: The documents cannot be read, none of them is of the variant that is graded, or some have a
            subject that no member is for.
    """
    graded = graded_split(configs[0])
    splits = read_splits(entry.name, data, entry.fields, graded)
    for name, value in entry.only.items():
        splits[graded] = [document for document in splits[graded] if document[name] == value]
        if not splits[graded]:
            raise RecipeError(f"task {entry.name}: no document at {data} has {name} {value}, which is what is graded.")
    if entry.subject is not None:
        _check_subjects(entry, entry.subject, data, splits[graded], [subtask_name(config) for config in configs])
    return Local(data, splits)


def _check_subjects(
    entry: TaskEntry, subject: str, data: Path, documents: Sequence[Document], members: Sequence[str]
) -> None:
    """Refuse local documents of a family that none of its members would take."""
    known = {_words(member) for member in members}
    unknown = Counter(str(document[subject]) for document in documents if _words(document[subject]) not in known)
    if unknown:
        first, *others = unknown
        more = f"; and {', '.join(map(repr, others[:4]))}" if others else ""
        raise RecipeError(
            f"task {entry.name}: {data}: {unknown.total()} documents have a {subject} that the task does not know: "
            f"{first!r}{nearest(first, list(members))}{more}."
        )


def local_splits(entry: TaskEntry, config: Mapping[str, Any], local: Local) -> dict[str, list[Document]]:
    """Return split -> documents of ``evals.data``; members of a family take those of their subject."""
    if not entry.subject:
        return dict(local.splits)
    member = _words(subtask_name(config))
    return {
        split: [document for document in documents if _words(document[entry.subject]) == member]
        for split, documents in local.splits.items()
    }


def graded_split(config: Mapping[str, Any]) -> str:
    """Return the name of the split that a task grades."""
    return str(config.get("test_split") or config["validation_split"])


def subtask_name(config: Any) -> str:
    """Return what documents call the subtask of a family that a definition is of."""
    return str(config.get("dataset_name") or config.get("task_alias") or config["task"])


def _words(name: str) -> str:
    """Return a subject's name as both spellings share it: ``computer_science`` and ``computer science``."""
    return name.replace("_", " ").lower()
