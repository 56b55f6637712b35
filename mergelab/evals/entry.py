"""What has to be known of a task: where it is defined, which grader is strict, which lenient, and what to watch.

No torch and no lm-eval at import. The rows are in ``tasks``, those of users in ``task_folder``; building the task is
in ``loading``.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from mergelab.errors import MachineError

Modality = Literal["text", "vision"]
Unparsable = Literal["filter", "empty", "flexible", "guessed", "never"]


@dataclass(frozen=True)
class TaskEntry:
    """One known task.

    Args:
        name: Its lm-eval name.
        modality: Which view of the live model answers it.
        home: Where its YAML is: the installed lm-eval, the bench's package data, or a folder of the user's.
        path: The YAML (or for a group the folder) under that home.
        strict: lm-eval's result key ``metric,filter`` of the demanding grader.
        flexible: The key of its lenient twin, or None if the task has none.
        fields: Field -> type that every local document must have.
        only: Field -> value: documents with another value are of a variant that is not graded, and left out.
        group: The task is a family of subtasks, scored together weighted by size.
        members: Which YAML files of a family's folder are its subtasks; by default those that begin with its name.
        subject: Field of a document that says which subtask of a family it belongs to.
        cluster: Document field that ties documents together (a shared fact, a shared picture).
        unparsable: When no answer could be read out of the text: no filter of the two graders found one
            ("filter"), the text is empty, where graders read all of it ("empty"), the flexible grader gives nothing,
            where it is the share of answers that could be read ("flexible"), the grader drew lots for want of one
            ("guessed"), or never, where no text is written ("never").
        unit: Points that 1 of lm-eval's metric is worth: 100 for shares, 1 for metrics that come in points.
        lowest: Points of the worst answer under the strict grader; below 0 where answers can cost points.
        listed: Field of a local line that lists several documents, for data that holds a picture with its questions.
        needs: What its graders or documents need beside lm-eval: keys of ``resources.NEEDS``.
        shuffled: The task draws the order of its options; we fix that order by the question.
        tokenized: Its documents are made up to a length in tokens, so a tokenizer is needed to make them.
        code: Answers are programs, which are run to grade them.
        pictures: Fields that hold pictures, shown through the vlm's own processor.
        guesses: The grader draws an answer where it reads none; we say so and fix the draw by the question.
        max_gen_toks: New tokens where neither recipe nor protocol names a number; None is the definition's own.
        folder: The user's task folder, for a task from one.
    """

    name: str
    modality: Modality
    home: Literal["lm_eval", "bench", "folder"]
    path: str
    strict: str
    flexible: str | None
    fields: Mapping[str, type] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    group: bool = False
    members: str = ""
    subject: str | None = None
    cluster: str | None = None
    unparsable: Unparsable = "filter"
    unit: float = 100.0
    lowest: float = 0.0
    listed: str | None = None
    needs: tuple[str, ...] = ()
    shuffled: bool = False
    tokenized: bool = False
    code: bool = False
    pictures: tuple[str, ...] = ()
    guesses: bool = False
    max_gen_toks: int | None = None
    folder: Path | None = None


def nearest(name: str, known: list[str]) -> str:
    """Return `` (did you mean X?)`` for the closest known name, or the list of all when none is close."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else f" (known: {', '.join(sorted(known))})"


def task_path(entry: TaskEntry) -> Path:
    """Return the YAML file (for a group: the folder) that defines a task.

    Raises:
        MachineError: lm-eval is not installed, or the file is not where this version of us expects it.
    """
    if entry.home == "bench":
        home = Path(str(files("mergelab"))) / "bench" / "data" / "tasks"
    elif entry.home == "folder":
        assert entry.folder is not None
        home = entry.folder
    else:
        home = lm_eval_tasks()
    path = home / entry.path
    if not path.exists():
        raise MachineError(
            f"task {entry.name}: expected its definition at {path}, found nothing. "
            "Install the lm-eval version that mergelab asks for."
        )
    return path


def lm_eval_tasks() -> Path:
    """Return the folder of the tasks that come with lm-eval, without importing it.

    Raises:
        MachineError: lm-eval is not installed.
    """
    spec = find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise MachineError("lm-eval is not installed. Install mergelab with its dependencies.")
    return Path(next(iter(spec.submodule_search_locations))) / "tasks"
