"""Local documents of a task: read once, and shared out among the members of a family by subject."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergelab.errors import RecipeError
from mergelab.evals.documents import Document, read_splits
from mergelab.evals.tasks import TaskEntry


@dataclass(frozen=True)
class Local:
    """Documents of a task on disk: where they were read from, and what was read, by split."""

    path: Path
    splits: Mapping[str, list[Document]]


def read_local(entry: TaskEntry, data: Path, configs: Sequence[Mapping[str, Any]]) -> Local:
    """Read ``evals.data`` once for all members of a family.

    Args:
        entry: The task's row in ``TASKS``.
        data: A JSONL file, or a folder of splits.
        configs: The definition of the task, or of every member.

    Raises:
        RecipeError: The documents cannot be read, or have a subject that no member is for.
    """
    local = Local(data, read_splits(entry.name, data, entry.fields, graded_split(configs[0])))
    if entry.subject is not None:
        known = {_words(_member(config)): _member(config) for config in configs}
        graded = local.splits[graded_split(configs[0])]
        unknown = sorted(
            {str(document[entry.subject]) for document in graded if _words(document[entry.subject]) not in known}
        )
        if unknown:
            raise RecipeError(
                f"task {entry.name}: {data}: no subtask for the {entry.subject} {', '.join(unknown[:5])} "
                f"({len(unknown)} unknown). Known are {', '.join(sorted(known.values()))}."
            )
    return local


def local_splits(entry: TaskEntry, config: Mapping[str, Any], local: Local) -> dict[str, list[Document]]:
    """Return split -> documents of ``evals.data``; members of a family take those of their subject."""
    if not entry.subject:
        return dict(local.splits)
    member = _words(_member(config))
    return {
        split: [document for document in documents if _words(document[entry.subject]) == member]
        for split, documents in local.splits.items()
    }


def graded_split(config: Mapping[str, Any]) -> str:
    """Return the name of the split that a task grades."""
    return str(config.get("test_split") or config["validation_split"])


def _words(name: str) -> str:
    """Return a subject's name as both spellings share it: ``computer_science`` and ``computer science``."""
    return name.replace("_", " ").lower()


def _member(config: Mapping[str, Any]) -> str:
    return str(config.get("dataset_name") or config["task_alias"])
