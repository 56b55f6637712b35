"""Which documents may be compared: the same ones, asked the same way, graded in every compared point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergelab.errors import DamagedFileError
from mergelab.records import PointFolder, Run

HASHES = ("doc_hash", "prompt_hash", "target_hash")

Samples = tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Paired:
    """Answers of several points to the same documents of one task, in one order."""

    strict: Mapping[str, NDArray[np.float64]]
    """By the name the caller gave each point; shape (n,), in [0, 1]."""
    clusters: Sequence[str | None] | None
    """Cluster of each document, or None when the task has none."""
    num_ungradable: int
    """Documents left out because some compared point could not be graded on them."""
    kept: Mapping[str, Samples]
    """The sample lines behind ``strict``."""

    @property
    def n(self) -> int:
        """Number of documents."""
        return len(next(iter(self.strict.values())))


def pair_samples(run: Run, task: str, points: Mapping[str, PointFolder]) -> Paired:
    """Put the answers of ``points`` to ``task`` side by side.

    Documents that are ungradable (strict is null) in any of the points are left out of all of them, so that
    scores, differences and intervals of a row belong to the same documents.

    Args:
        run: Where the points come from; it names the files in errors.
        task: A task that every point has finished.
        points: By role in the comparison; the first one fixes the order of documents.

    Raises:
        DamagedFileError: two points do not have the same documents, or a document, prompt or target
            differs; the first such document is named. Or they were answered by different backends.
    """
    names = list(points)
    _refuse_other_backend(run, task, points)
    by_id = {name: {_id(line): line for line in points[name].tasks[task].samples} for name in names}
    first = by_id[names[0]]
    for name in names[1:]:
        here, there = (_path(run, points[which], task) for which in (names[0], name))
        _refuse_mismatch(first, by_id[name], here, there)
    kept = [key for key in first if all(by_id[name][key]["strict"] is not None for name in names)]
    clusters = [first[key].get("cluster") for key in kept]
    return Paired(
        strict={name: np.array([by_id[name][key]["strict"] for key in kept], dtype=float) for name in names},
        clusters=[None if c is None else str(c) for c in clusters] if any(c is not None for c in clusters) else None,
        num_ungradable=len(first) - len(kept),
        kept={name: tuple(by_id[name][key] for key in kept) for name in names},
    )


def count_different_answers(first: Samples, second: Samples) -> int:
    """Number of documents whose response differs, or which only one of the two has."""
    answers = [{_id(line): line["response"] for line in samples} for samples in (first, second)]
    missing = object()
    return sum(
        answers[0].get(key, missing) != answers[1].get(key, missing) for key in answers[0].keys() | answers[1].keys()
    )


def _id(line: Mapping[str, Any]) -> str:
    return str(line["doc_id"])


def _path(run: Run, point: PointFolder, task: str) -> Path:
    return run.folder / "points" / point.point_id / "tasks" / task / "samples.jsonl"


def _refuse_other_backend(run: Run, task: str, points: Mapping[str, PointFolder]) -> None:
    """Refuse to compare answers of two programs: they round differently, and a difference would not be the merge's."""
    backends = {name: str(point.tasks[task].metrics.get("backend", "hf")) for name, point in points.items()}
    first = next(iter(backends))
    for name, backend in backends.items():
        if backend != backends[first]:
            here, there = (_path(run, points[which], task) for which in (first, name))
            raise DamagedFileError(
                f"{there} does not pair with {here}: its answers are of {backend}, the others of {backends[first]}. "
                "Give the run command again with one evals.backend until every point is done."
            )


def _refuse_mismatch(
    first: Mapping[str, Mapping[str, Any]], second: Mapping[str, Mapping[str, Any]], here: Path, there: Path
) -> None:
    advice = "They were not asked the same questions and cannot be compared: grade both again in one run."
    alone = next((key for key in first if key not in second), None)
    if alone is None:
        alone = next((key for key in second if key not in first), None)
    if alone is not None:
        raise DamagedFileError(
            f"{there} does not pair with {here}: document {alone} stands in only one of them "
            f"({len(first)} and {len(second)} documents). {advice}"
        )
    for key, line in first.items():
        for name in HASHES:
            if line[name] != second[key][name]:
                raise DamagedFileError(
                    f"{there} does not pair with {here}: document {key}, {name}: expected {line[name]}, "
                    f"found {second[key][name]}. {advice}"
                )
