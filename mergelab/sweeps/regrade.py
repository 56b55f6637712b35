"""Grades the stored answers of a run folder again, without a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mergelab import __version__, records
from mergelab.checkpoints.hub import resolve_source
from mergelab.config import Source
from mergelab.errors import DamagedFileError, MergelabError, RecipeError
from mergelab.evals.building import offline
from mergelab.evals.regrading import can_regrade, regrade
from mergelab.evals.request import EvalRequest
from mergelab.evals.suite import load_suite
from mergelab.sweeps.ledger import owned

_WRITTEN_BY_RECORDS = ("num_samples", "samples_sha256", "regraded")


@dataclass(frozen=True)
class Regraded:
    """What grading one task of one point again came to."""

    point_id: str
    task: str
    strict: float | None
    flexible: float | None
    before: tuple[float | None, float | None]
    """Strict and flexible as they stood in the folder."""

    changed: tuple[int, ...]
    """Ids of the documents whose line changed."""

    rewritten: bool
    """False if metrics and samples came out as they were: the files are then left alone."""


def regrade_run(
    folder: Path, data: Mapping[str, Path] | None = None, say: Callable[[str], None] = lambda line: None
) -> list[Regraded]:
    """Grade every stored answer of a run again and write what came out differently.

    Everything is graded before anything is written. Rewritten metrics keep their stage key (the answers are the
    same) and say so under ``regraded``: the versions that graded, and which documents changed.

    Args:
        folder: A run folder, finished or not.
        data: Task -> documents, instead of where the run found them.
        say: Told what is left out, and before a data set is fetched.

    Raises:
        RecipeError: A task is unknown or cannot be loaded; a document is not the one that was asked about.
        DamagedFileError: The folder is no run folder, or a record in it is not whole.
        OutputFolderError: A run works in the folder.
    """
    run = records.read_run(folder)  # refuses what is no run folder before a lock is made in it
    with owned(folder):
        run = records.read_run(folder)
        suite = load_suite(_request(run, data or {}), say)
        tasks = {task.name: task for task in suite.tasks if can_regrade(task)}
        for task in suite.tasks:
            if task.name not in tasks:
                say(f"{task.name} is left as it is: of a log-likelihood task only the choice is stored.")
        found: list[Regraded] = []
        written: list[tuple[Regraded, dict[str, Any], list[dict[str, Any]]]] = []
        for point in run.points:
            for name, record in point.tasks.items():
                if name not in tasks:
                    continue
                stored = {key: value for key, value in record.metrics.items() if key not in _WRITTEN_BY_RECORDS}
                metrics, samples = regrade(tasks[name], stored, record.samples)
                old = {int(sample["doc_id"]): sample for sample in record.samples}
                changed = tuple(sample["doc_id"] for sample in samples if sample != old[sample["doc_id"]])
                one = Regraded(
                    point.point_id,
                    name,
                    metrics["strict"],
                    metrics["flexible"],
                    (stored.get("strict"), stored.get("flexible")),
                    changed,
                    bool(changed) or metrics != stored,
                )
                found.append(one)
                if one.rewritten:
                    written.append((one, metrics, samples))
        for one, metrics, samples in written:
            by = {"mergelab": __version__, "lm_eval": version("lm_eval"), "changed_documents": list(one.changed)}
            records.write_task(folder, one.point_id, one.task, {**metrics, "regraded": by}, samples)
    return found


def _request(run: records.Run, data: Mapping[str, Path]) -> EvalRequest:
    """Return how the run asked, over every task that it graded."""
    names = [task["task"] for task in run.experiment["tasks"] if not task.get("imported")]
    unknown = [task for task in data if task not in names]
    if unknown:
        raise RecipeError(f"--data {unknown[0]}: the run has no such task (it has {', '.join(names)}).")
    try:
        evals = run.experiment["recipe"]["evals"]
        protocol = evals["protocol"] if evals["protocol"] != "auto" else run.experiment["pair"]["protocol"]
        folder = Path(evals["data"]) if isinstance(evals["data"], str) else None
        own = {} if folder else {task: Path(path) for task, path in evals["data"].items() if task in names}
        tasks, base = evals.get("task_folder"), run.experiment["pair"]["base"]
        budgets = {task: budget for task, budget in evals["max_gen_toks"].items() if task in names}
        limit, batch_size = evals["limit"], evals["batch_size"]
    except (KeyError, TypeError) as error:
        raise DamagedFileError(
            f"{run.folder / records.EXPERIMENT}: does not say how the tasks were asked ({error}). Restore the file."
        ) from error
    return EvalRequest(
        protocol=protocol,
        tasks=tuple(names),
        data={**own, **data},
        limit=limit,
        batch_size=batch_size,
        max_gen_toks=budgets,
        task_folder=Path(tasks) if tasks else None,
        allow_code=evals.get("allow_code", False),
        tokenizer=_folder(base),
        data_folder=folder,
    )


def _folder(base: Any) -> Path | None:
    """Return where the base of a run lies on this machine, as the run names it; None if it is not there."""
    named = base if isinstance(base, dict) else {"id": base}
    try:
        source = Source(id=named["id"], revision=named.get("revision"))
        with offline():
            return resolve_source(source.location, source.revision)
    except (KeyError, ValueError, MergelabError):
        return None
