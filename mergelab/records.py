"""What is on disk in a run folder: its files, how they are written whole, how they are read back.

Layout::

    experiment.json                           what was asked for, and the points in run order
    points/<id>/point.json                    who the point is
                merge.json  sink.json         one stage each
                replicate.json                the vlm graded a second time, where that was asked for
                tasks/<task>/samples.jsonl    one line a document, written first
                             metrics.json     written last; carries the stage key and a digest of them

A stage is done when its file is there and carries a ``key`` (for a task: metrics.json, with the samples
beside it). What a key must be equal to is the business of the sweep, not of this module. Nothing here
knows what a number means; pairing and statistics live in ``mergelab.report``.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from mergelab import atomic
from mergelab.errors import DamagedFileError, OutputFolderError

FORMAT = 1
ROLES = ("base", "ancestor", "vlm", "control", "merge")
STAGES = ("merge", "sink")
REPLICATE = "replicate"
MODALITIES = ("text", "vision")

EXPERIMENT = "experiment.json"
_EXPERIMENT_KEYS = ("claims", "tasks", "points")
_POINT_KEYS = ("point_id", "role", "method", "parameters")
_METRIC_KEYS = ("task", "modality", "protocol")
_SAMPLE_KEYS = (
    *("doc_id", "doc_hash", "prompt_hash", "target_hash", "response"),
    *("strict", "flexible", "truncated", "empty", "unparsable"),
)


@dataclass(frozen=True)
class TaskRecord:
    """One finished task of one point."""

    metrics: dict[str, Any]
    """metrics.json: key, task, modality, protocol, counts and scores; ``lowest`` where a score of 0 is not 0 points."""
    samples: tuple[dict[str, Any], ...]
    """The lines of samples.jsonl, one a document; strict and flexible in [0, 1] or None (ungradable)."""


@dataclass(frozen=True)
class PointFolder:
    """One point of a run: what it is, and the stages that are done."""

    point: dict[str, Any]
    merge: dict[str, Any] | None
    sink: dict[str, Any] | None
    tasks: dict[str, TaskRecord]
    replicate: dict[str, Any] | None = None
    """How a second grading of the point differed from the first, by task."""

    @property
    def point_id(self) -> str:
        """The identity of the point, which is also the name of its folder."""
        return str(self.point["point_id"])

    @property
    def role(self) -> str:
        """One of base, ancestor, vlm, control, merge."""
        return str(self.point["role"])


@dataclass(frozen=True)
class Run:
    """A run folder as it was when it was read."""

    folder: Path
    experiment: dict[str, Any]
    points: tuple[PointFolder, ...]
    """Points with a point.json, in the run order of experiment.json."""
    missing: tuple[str, ...] = ()
    """Listed in experiment.json, not begun."""
    unlisted: tuple[str, ...] = ()
    """Finished earlier, no longer listed in experiment.json (a smaller grid); they are not in ``points``."""


# Writing


def write_experiment(folder: Path, experiment: Mapping[str, Any]) -> None:
    """Write experiment.json whole, with the format number added.

    Raises:
        ValueError: a required key is missing, or a point id cannot be a folder name.
    """
    value = {"format": FORMAT, **experiment}
    problems = _experiment_problems(value)
    if problems:
        raise ValueError(f"experiment: {'; '.join(problems)}")
    atomic.write_json(folder / EXPERIMENT, value)


def write_point(folder: Path, point: Mapping[str, Any]) -> None:
    """Write points/<point_id>/point.json whole, with the format number added.

    Raises:
        ValueError: a required key is missing, an unknown role, or an id that cannot be a folder name.
    """
    value = {"format": FORMAT, **point}
    problems = _point_problems(value)
    if problems:
        raise ValueError(f"point: {'; '.join(problems)}")
    atomic.write_json(_point_folder(folder, value["point_id"]) / "point.json", value)


def write_stage(folder: Path, point_id: str, stage: str, value: Mapping[str, Any]) -> None:
    """Write points/<point_id>/<stage>.json whole; ``value`` carries its ``key``.

    Raises:
        ValueError: ``stage`` is not one of ``STAGES`` nor ``REPLICATE``, or ``value`` has no key.
    """
    _require_key(value, f"stage {stage} of {point_id}")
    atomic.write_json(_stage_path(folder, point_id, stage), dict(value))


def write_task(
    folder: Path,
    point_id: str,
    task: str,
    metrics: Mapping[str, Any],
    samples: Sequence[Mapping[str, Any]],
) -> None:
    """Write one task of one point: samples.jsonl first, metrics.json last.

    A metrics.json of an earlier answer is removed first, so that a kill in between leaves the stage not
    done, never old scores beside new answers. The number and the sha256 of the samples are added to the
    metrics.

    Raises:
        ValueError: ``metrics`` has no key, or a required entry of metrics or samples is missing or out of
            range.
    """
    _require_key(metrics, f"task {task} of {point_id}")
    problems = _metric_problems(metrics, task)
    for number, sample in enumerate(samples, start=1):
        problems += [f"sample {number}: {problem}" for problem in _sample_problems(sample)]
    if problems:
        raise ValueError(f"task {task} of {point_id}: {'; '.join(problems[:10])}")
    target = _task_folder(folder, point_id, task)
    # ASCII escapes keep every answer on one line and readable again, whatever characters a model makes.
    content = "".join(json.dumps(dict(sample), allow_nan=False) + "\n" for sample in samples).encode("ascii")
    (target / "metrics.json").unlink(missing_ok=True)
    atomic.write_bytes(target / "samples.jsonl", content)
    digest = hashlib.sha256(content).hexdigest()
    atomic.write_json(target / "metrics.json", {**metrics, "num_samples": len(samples), "samples_sha256": digest})


def read_samples(folder: Path, point_id: str, task: str) -> tuple[dict[str, Any], ...]:
    """Samples of a finished task of one point.

    Raises:
        DamagedFileError: the task is not done, or its files are not whole.
    """
    target = _task_folder(folder, point_id, task)
    record = _read_task(target)
    if record is None:
        _damaged(target / "metrics.json", "expected a finished task, found none")
    return record.samples


def remove_task(folder: Path, point_id: str, task: str) -> None:
    """Make one task of one point not done; what else is in the run folder stays."""
    (_task_folder(folder, point_id, task) / "metrics.json").unlink(missing_ok=True)


# Keys: is a stage done, and what was it made from?


def read_stage_key(folder: Path, point_id: str, stage: str) -> str | None:
    """Key of a finished stage; None when the stage is not done.

    Raises:
        DamagedFileError: the file is there and is not JSON.
    """
    return _read_key(_stage_path(folder, point_id, stage))


def read_task_key(folder: Path, point_id: str, task: str) -> str | None:
    """Key of a finished task; None when it is not done, which includes metrics without samples.

    Raises:
        DamagedFileError: metrics.json is there and is not JSON.
    """
    target = _task_folder(folder, point_id, task)
    if not (target / "samples.jsonl").is_file():
        return None
    return _read_key(target / "metrics.json")


def refuse_foreign_folder(folder: Path) -> None:
    """Refuse to make a run in a folder that holds something else. Hidden files (a lock) do not count.

    Raises:
        OutputFolderError: ``folder`` is a file, or has entries but no experiment.json.
    """
    if not folder.exists() or (folder / EXPERIMENT).is_file():
        return
    if not folder.is_dir():
        raise OutputFolderError(f"{folder}: expected a folder for the run, found a file. Choose another --out.")
    found = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if found:
        raise OutputFolderError(
            f"{folder}: expected an empty folder or a run folder (with {EXPERIMENT}), "
            f"found {', '.join(found[:5])}. Choose another --out."
        )


# Reading


def read_run(folder: Path) -> Run:
    """Read a run folder, finished or not: every point that has begun, every stage that is done.

    Tasks whose results were imported are listed behind those of the experiment, marked ``imported``.

    Raises:
        DamagedFileError: the folder is missing or is no run folder; a file is torn, truncated, not JSON, of
            another format, or lacks an entry. The message names the file and, where there is one, the line.
    """
    if not folder.is_dir():
        raise DamagedFileError(f"{folder}: expected a run folder, found nothing. Check the path.")
    if not (folder / EXPERIMENT).is_file():
        raise DamagedFileError(
            f"{folder}: expected a run folder, found no {EXPERIMENT}. "
            "Name the folder that was given as --out to `mergelab run`."
        )
    experiment = _read_checked(folder / EXPERIMENT, _experiment_problems)
    points: list[PointFolder] = []
    missing: list[str] = []
    for point_id in experiment["points"]:
        point = _read_point(folder, point_id)
        if point is None:
            missing.append(point_id)
        else:
            points.append(point)
    experiment["tasks"] = [*experiment["tasks"], *_imported_tasks(experiment, points)]
    listed = set(experiment["points"])
    begun = [path.name for path in _subfolders(folder / "points") if (path / "point.json").is_file()]
    return Run(
        folder=folder,
        experiment=experiment,
        points=tuple(points),
        missing=tuple(missing),
        unlisted=tuple(name for name in begun if name not in listed),
    )


def _imported_tasks(experiment: Mapping[str, Any], points: Sequence[PointFolder]) -> list[dict[str, Any]]:
    """Return the tasks that points have from elsewhere, in the order in which they are met."""
    known = {task["task"] for task in experiment["tasks"]}
    found: dict[str, dict[str, Any]] = {}
    for name, metrics in ((name, record.metrics) for point in points for name, record in point.tasks.items()):
        if metrics.get("imported") and name not in known:
            entry = {key: metrics[key] for key in ("task", "modality", "protocol")}
            found.setdefault(name, {**entry, "n": metrics.get("n"), "imported": True})
    return list(found.values())


def _read_point(folder: Path, point_id: str) -> PointFolder | None:
    target = _point_folder(folder, point_id)
    if not (target / "point.json").is_file():
        return None
    point = _read_checked(target / "point.json", _point_problems)
    if point["point_id"] != point_id:
        _damaged(target / "point.json", f"expected point_id {point_id!r}, found {point['point_id']!r}")
    tasks = {path.name: _read_task(path) for path in _subfolders(target / "tasks")}
    return PointFolder(
        point=point,
        merge=_read_stage(target / "merge.json"),
        sink=_read_stage(target / "sink.json"),
        tasks={name: record for name, record in tasks.items() if record is not None},
        replicate=_read_stage(target / f"{REPLICATE}.json"),
    )


def _read_stage(path: Path) -> dict[str, Any] | None:
    return _read_object(path) if _read_key(path) is not None else None


def _read_task(target: Path) -> TaskRecord | None:
    path = target / "metrics.json"
    if _read_key(path) is None:
        return None
    metrics = _read_checked(path, lambda value: _metric_problems(value, target.name))
    samples_path = target / "samples.jsonl"
    if not samples_path.is_file():
        _damaged(samples_path, "expected the samples that metrics.json belongs to, found no file")
    content = samples_path.read_bytes()
    samples = _parse_lines(samples_path, content)
    asked = metrics.get("num_samples")
    if len(samples) != asked:
        _damaged(samples_path, f"expected {asked} lines (num_samples in metrics.json), found {len(samples)}")
    if hashlib.sha256(content).hexdigest() != metrics.get("samples_sha256"):
        _damaged(samples_path, "its content is not what metrics.json was written for (samples_sha256 differs)")
    return TaskRecord(metrics=metrics, samples=samples)


def _parse_lines(path: Path, content: bytes) -> tuple[dict[str, Any], ...]:
    lines = content.split(b"\n")
    if lines[-1]:
        _damaged(path, "the last line is torn (no line end)", len(lines))
    samples: list[dict[str, Any]] = []
    first_line: dict[str, int] = {}
    for number, line in enumerate(lines[:-1], start=1):
        try:
            value = json.loads(line, parse_constant=_refuse_constant)
        except ValueError as error:
            _damaged(path, f"expected one JSON object, found {line[:60]!r} ({error})", number)
        problems = _sample_problems(value)
        if problems:
            _damaged(path, "; ".join(problems), number)
        doc_id = json.dumps(value["doc_id"])
        if doc_id in first_line:
            _damaged(path, f"document {doc_id} stands in line {first_line[doc_id]} already", number)
        first_line[doc_id] = number
        samples.append(value)
    return tuple(samples)


# What the files must say


def _experiment_problems(value: Mapping[str, Any]) -> list[str]:
    problems = _format_problems(value) + _missing(value, _EXPERIMENT_KEYS)
    if problems:
        return problems
    claims, points, tasks = value["claims"], value["points"], value["tasks"]
    if not isinstance(claims, Mapping) or not all(_is_number(claims.get(name)) for name in ("margin", "alpha")):
        problems.append("claims: expected numbers for margin and alpha")
    if not isinstance(points, list | tuple) or not all(_is_name(point) for point in points):
        problems.append("points: expected a list of point ids that can be folder names")
    elif len(set(points)) != len(points):
        problems.append("points: an id stands there twice")
    if not isinstance(tasks, list | tuple) or not all(
        isinstance(task, Mapping) and _is_name(task.get("task")) and task.get("modality") in MODALITIES
        for task in tasks
    ):
        problems.append("tasks: expected a list of {task, modality: text | vision, ...}")
    return problems


def _point_problems(value: Mapping[str, Any]) -> list[str]:
    problems = _format_problems(value) + _missing(value, _POINT_KEYS)
    if problems:
        return problems
    if not _is_name(value["point_id"]):
        problems.append(f"point_id: expected a folder name, found {value['point_id']!r}")
    if value["role"] not in ROLES:
        problems.append(f"role: expected one of {', '.join(ROLES)}, found {value['role']!r}")
    return problems


def _metric_problems(value: Mapping[str, Any], task: str) -> list[str]:
    problems = _missing(value, _METRIC_KEYS)
    if "task" in value and value["task"] != task:
        problems.append(f"task: expected {task!r} (the folder), found {value['task']!r}")
    if "modality" in value and value["modality"] not in MODALITIES:
        problems.append(f"modality: expected text or vision, found {value['modality']!r}")
    if not (_is_number(value.get("lowest", 0)) and value.get("lowest", 0) <= 0):
        problems.append(f"lowest: expected the points of a score of 0, at most 0, found {value['lowest']!r}")
    return problems


def _sample_problems(value: object) -> list[str]:
    if not isinstance(value, Mapping):
        return [f"expected a JSON object, found {type(value).__name__}"]
    problems = _missing(value, _SAMPLE_KEYS)
    for name in ("strict", "flexible"):
        score = value.get(name)
        if score is not None and not (_is_number(score) and 0 <= score <= 1):
            problems.append(f"{name}: expected a score in [0, 1] or null, found {score!r}")
    return problems


def _format_problems(value: Mapping[str, Any]) -> list[str]:
    found = value.get("format")
    if found == FORMAT and not isinstance(found, bool):
        return []
    return [f"format: expected {FORMAT}, found {found!r} (a folder of another program, or of another mergelab)"]


def _missing(value: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    absent = [name for name in names if name not in value]
    return [f"expected {', '.join(absent)}, found no such entry"] if absent else []


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value != "" and not value.startswith(".") and not set(value) & set("/\\\0")


# Paths and JSON


def _require_name(name: str, what: str) -> str:
    if not _is_name(name):
        raise ValueError(f"{what} {name!r} cannot be a folder name")
    return name


def _require_key(value: Mapping[str, Any], where: str) -> None:
    if not isinstance(value.get("key"), str) or not value["key"]:
        raise ValueError(f"{where}: a stage is written with its key, found {value.get('key')!r}")


def _point_folder(folder: Path, point_id: str) -> Path:
    return folder / "points" / _require_name(point_id, "point id")


def _stage_path(folder: Path, point_id: str, stage: str) -> Path:
    if stage not in (*STAGES, REPLICATE):
        raise ValueError(f"expected a stage of {', '.join(STAGES)}, found {stage!r}")
    return _point_folder(folder, point_id) / f"{stage}.json"


def _task_folder(folder: Path, point_id: str, task: str) -> Path:
    return _point_folder(folder, point_id) / "tasks" / _require_name(task, "task")


def _subfolders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _read_key(path: Path) -> str | None:
    if not path.is_file():
        return None
    key = _read_object(path).get("key")
    return key if isinstance(key, str) and key else None


def _read_checked(path: Path, check: Callable[[Mapping[str, Any]], list[str]]) -> dict[str, Any]:
    value = _read_object(path)
    problems = check(value)
    if problems:
        _damaged(path, "; ".join(problems))
    return value


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"), parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        _damaged(path, f"expected JSON, found {error.msg}", error.lineno)
    except ValueError as error:
        _damaged(path, f"expected JSON, found {error}")
    if not isinstance(value, dict):
        _damaged(path, f"expected a JSON object, found {type(value).__name__}")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name}, which is not JSON")


def _damaged(path: Path, problem: str, line: int | None = None) -> NoReturn:
    where = f"{path}, line {line}" if line is not None else str(path)
    raise DamagedFileError(f"{where}: {problem}. Restore the file, or delete it and give the same run command again.")
