"""Runs an experiment into its folder: claims it, works through the points, keeps going past a failed one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mergelab.errors import MergelabError
from mergelab.sweeps.cache import ResultCache
from mergelab.sweeps.experiment import Prepared, experiment_record
from mergelab.sweeps.ledger import claim, owned
from mergelab.sweeps.points import Point
from mergelab.sweeps.worker import Report, Worker


@dataclass
class Outcome:
    """What became of the points of a run."""

    num_points: int
    num_worked: int = 0
    """Points that something was done for; the others were finished before."""

    num_cached: int = 0
    """Sinks and tasks of parents that came out of the cache of results."""

    failures: dict[str, str] = field(default_factory=dict)
    """Label of a failed point -> why."""

    bug: Exception | None = None
    """The first error that is no failure of a point but a bug of ours; the other points were still worked on."""


def run(
    prepared: Prepared,
    folder: Path,
    report: Report = lambda point, stage, share: None,
    finished: Callable[[Point, bool], None] = lambda point, worked: None,
    failed: Callable[[Point, str], None] = lambda point, why: None,
    cache: ResultCache | None = None,
) -> Outcome:
    """Do every point that is not done. The same call continues after any interruption.

    A point that fails is told to ``failed`` at once, and the others go on; parents come first, so a failing parent
    is seen early. Parents are taken from the cache where it has them, and kept there.

    Raises:
        OutputFolderError: The folder holds something else, another experiment, or is in use.
    """
    outcome = Outcome(len(prepared.points))
    with owned(folder):
        claim(folder, experiment_record(prepared))
        worker = Worker(prepared, folder, report, cache)
        for point in prepared.points:
            try:
                worked = worker.work(point)
            except (MergelabError, torch.OutOfMemoryError) as error:
                outcome.failures[f"{point.label} ({point.point_id})"] = str(error)
                failed(point, str(error))
                continue
            except Exception as error:
                # Hours of other points must not be lost to it; whoever called raises it once they are done.
                outcome.bug = outcome.bug or error
                failed(point, f"{type(error).__name__}: {error}")
                continue
            outcome.num_worked += worked
            finished(point, worked)
        outcome.num_cached = worker.num_cached
    return outcome
