"""Takes answers that another harness graded into a run folder, as one more task of one point."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mergelab import __version__, records
from mergelab.errors import RecipeError, problem_list
from mergelab.evals.imported import Imported, Keys, first_difference, import_file
from mergelab.evals.samples import count, score_points
from mergelab.sweeps.identity import hash_json
from mergelab.sweeps.ledger import owned

MODALITY = "vision"


@dataclass(frozen=True)
class ImportRequest:
    """Which results are whose.

    Args:
        path: A result file of lmms-eval or VLMEvalKit.
        task: What the task is called in the run; not the name of a task that the run grades itself.
        point: Id of the point, the beginning of it, or ``vlm``.
        keys: Which fields to read.
        replace: Take the place of results that were imported for this point and task before.
    """

    path: Path
    task: str
    point: str
    keys: Keys = field(default_factory=Keys)
    replace: bool = False


def import_samples(
    folder: Path, request: ImportRequest, say: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Write the results in a file as one task of one point of a run.

    Args:
        folder: A run folder, finished or not.
        request: Which results are whose.
        say: Told what looks like a mistake and may be none.

    Returns:
        The metrics as written, with ``point_id``.

    Raises:
        RecipeError: The point, the task's name or the file cannot be used, or the file's documents are not those that
            were imported for other points; the first such document is named.
        DamagedFileError: The folder is no run folder, or a record in it is not whole.
        OutputFolderError: A run works in the folder.
    """
    task = request.task
    records.read_run(folder)  # refuses what is no run folder before a lock is made in it
    with owned(folder):
        run = records.read_run(folder)
        problems: list[str] = []
        chosen, imported = None, None
        try:
            chosen = _find_point(run, request.point)
        except RecipeError as error:
            problems.append(str(error))
        problems += _task_problems(run, task)
        try:
            imported = import_file(request.path, request.keys)
        except RecipeError as error:
            problems.append(str(error))
        if chosen is not None and imported is not None and not problems:
            problems += _conflicts(run, request, chosen, imported)
        if problems or chosen is None or imported is None:
            raise _as_error(problems)
        for doubt in _doubts(run, request, chosen, imported):
            say(doubt)
        metrics = _metrics(task, imported)
        records.write_task(folder, chosen.point_id, task, metrics, imported.samples)
        return {"point_id": chosen.point_id, **metrics}


def _as_error(problems: list[str]) -> RecipeError:
    if len(problems) == 1:
        return RecipeError(problems[0])
    return RecipeError(problem_list("These results cannot be imported; nothing was written.", problems))


def _find_point(run: records.Run, wanted: str) -> records.PointFolder:
    if wanted in ("base", "ancestor"):
        copies = [one.point_id for one in run.points if (one.point["parameters"] or {}).get("of") == wanted]
        instead = (
            f"Write its weights into the vlm (mergelab merge --point {copies[0]} --as vlm), grade that, and import "
            f"it as --point {copies[0]}."
            if copies
            else "Only the vlm, controls and merges can."
        )
        raise RecipeError(f"--point {wanted}: a text model, which cannot see pictures. {instead}")
    found = [one for one in run.points if one.point_id == wanted or one.role == wanted == "vlm"]
    found = found or [one for one in run.points if len(wanted) >= 4 and one.point_id.startswith(wanted)]
    if len(found) == 1 and found[0].role not in ("base", "ancestor"):
        return found[0]
    if len(found) == 1:
        return _find_point(run, found[0].role)
    listed = "\n".join(
        f"  {one.point_id}  {one.role} {one.point['method'] or ''} {one.point['parameters'] or ''}".rstrip()
        for one in run.points
    )
    raise RecipeError(
        f"--point {wanted}: {'several points begin so' if found else 'no such point'}. There are\n{listed}"
    )


def _task_problems(run: records.Run, task: str) -> list[str]:
    own = [one["task"] for one in run.experiment["tasks"] if not one.get("imported")]
    if task in own:
        return [f"--task {task}: the run grades this task itself. Choose another name, such as {task}_lmms."]
    if not task or task.startswith(".") or any(sign in task for sign in '/\\:*?"<>| '):
        return [f"--task {task!r}: expected a name that can be a folder's, such as mmmu_lmms."]
    return []


def _conflicts(run: records.Run, request: ImportRequest, chosen: records.PointFolder, imported: Imported) -> list[str]:
    task, problems = request.task, []
    before = chosen.tasks.get(task)
    if before is not None and not request.replace:
        known = before.metrics["imported"]
        same = known["file_sha256"] == imported.provenance["file_sha256"]
        problems.append(
            f"{chosen.point_id} has results for {task} already, from {known['file']}"
            f"{' (this very file)' if same else ''}. Pass --replace to put these in their place."
        )
    for other in _others(run, task, chosen):
        known = other.tasks[task].metrics["imported"]
        for name, what in (("tool", "tool"), ("strict_key", "strict score"), ("flexible_key", "flexible score")):
            if known.get(name) != imported.provenance.get(name):
                problems.append(
                    f"{other.point_id} was imported with {what} {known.get(name)}, this file with "
                    f"{imported.provenance.get(name)}: grade and import both alike."
                )
        difference = first_difference(imported.samples, other.tasks[task].samples)
        if difference is not None:
            problems.append(
                f"does not pair with {other.point_id} ({known['file']}): {difference}. They were not asked the same "
                "questions: grade both with the same task, limit and version."
            )
            break
    return problems


def _doubts(run: records.Run, request: ImportRequest, chosen: records.PointFolder, imported: Imported) -> Iterator[str]:
    """Yield what looks like a mistake and may be none."""
    for other in _others(run, request.task, chosen):
        known = other.tasks[request.task].metrics["imported"]
        if known["file_sha256"] == imported.provenance["file_sha256"] and _weights(other) != _weights(chosen):
            yield f"{request.path} is also what {other.point_id} has, whose weights are others. Is it the right file?"
        if known.get("version") != imported.provenance.get("version"):
            versions = f"{known.get('version')}, this file by {imported.provenance.get('version')}"
            yield f"{other.point_id} was graded by {known['tool']} {versions}."


def _others(run: records.Run, task: str, chosen: records.PointFolder) -> list[records.PointFolder]:
    return [one for one in run.points if one.point_id != chosen.point_id and task in one.tasks]


def _weights(point: records.PointFolder) -> Any:
    return point.point.get("weights_hash", point.point_id)


def _metrics(task: str, imported: Imported) -> dict[str, Any]:
    samples, provenance = imported.samples, imported.provenance
    told: Mapping[str, Any] = {"mergelab": __version__, **provenance}
    return {
        "key": hash_json({"task": task, "imported": provenance}),
        "task": task,
        "modality": MODALITY,
        "protocol": " ".join(str(part) for part in (provenance["tool"], provenance.get("version")) if part),
        "n": len(samples),
        "strict": score_points(samples, "strict"),
        "flexible": score_points(samples, "flexible"),
        "empty": count(samples, "empty"),
        "ungradable": count(samples, "ungradable"),
        "truncated": None,
        "unparsable": None,
        "strict_key": provenance["strict_key"],
        "flexible_key": provenance["flexible_key"],
        "imported": told,
    }
