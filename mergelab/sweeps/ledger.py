"""The run folder while a run owns it: one owner at a time, one experiment, and what is already done."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mergelab import atomic, records
from mergelab.errors import DamagedFileError, MachineError, OutputFolderError, problem_list
from mergelab.sweeps.identity import experiment_conflicts

LOCK = ".lock"


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Hold the run folder for this process; the lock goes with the process, however it ends.

    Raises:
        OutputFolderError: The folder holds something else, or another process works in it (named).
        MachineError: The folder cannot be made or written, or its file system has no locks.
    """
    records.refuse_foreign_folder(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise MachineError(f"{folder}: cannot be written: {error.strerror}. Give another --out.") from error
    try:
        if owner := atomic.lock(handle, folder):
            raise OutputFolderError(f"{folder}: in use by {owner}. Wait for it, stop it, or give another --out.")
        yield
    finally:
        os.close(handle)


def claim(folder: Path, experiment: Mapping[str, Any]) -> None:
    """Write ``experiment.json``, keeping the points and tasks of an earlier run of the same experiment in the list.

    They are dropped from the list (not from the disk) when answers were asked for differently then: other
    documents, budgets or templates do not pair with the new ones.

    Raises:
        OutputFolderError: The folder belongs to an experiment with other weights or other claims.
        DamagedFileError: Its experiment.json is not whole.
    """
    path = folder / records.EXPERIMENT
    points = list(experiment["points"])
    tasks = list(experiment["tasks"])
    if path.is_file():
        old = records.read_run(folder).experiment
        try:
            conflicts = experiment_conflicts(old, dict(experiment))
        except (KeyError, TypeError) as error:
            raise DamagedFileError(
                f"{path}: lacks what a run writes there ({error}). Restore the file, or give another --out."
            ) from error
        if conflicts:
            raise OutputFolderError(
                problem_list(
                    f"{folder}: holds another experiment:",
                    conflicts,
                    "Give another --out. To read the finished run at another margin: mergelab report --margin.",
                )
            )
        if _asked_alike(old, experiment):
            points += [point for point in old["points"] if point not in points]
            names = {task["task"] for task in tasks}
            tasks += [task for task in old["tasks"] if task["task"] not in names and not task.get("imported")]
    merged = {**experiment, "points": points, "tasks": tasks}
    if path.is_file() and json.loads(path.read_text(encoding="utf-8")) == {"format": records.FORMAT, **merged}:
        return
    records.write_experiment(folder, merged)


def _asked_alike(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Return whether answers and sinks of both pair: equal settings, and tasks of both asked in the same way."""
    before = {task["task"]: task.get("asked") for task in old["tasks"] if not task.get("imported")}
    same_tasks = all(before.get(task["task"], task["asked"]) == task["asked"] for task in new["tasks"])
    return same_tasks and _settings(old) == _settings(new)


def _settings(experiment: Mapping[str, Any]) -> list[Any]:
    """Return what has to agree apart from the tasks; which documents and budgets they have is in ``asked``."""
    recipe = experiment["recipe"]
    other = ("tasks", "data", "max_gen_toks", "replicate", "task_folder", "allow_code")
    evals = {key: value for key, value in recipe["evals"].items() if key not in other}
    return [evals, experiment["pair"]["protocol"], recipe["sink"]]
