"""Records to rows: one row per point and task, with exactly the columns of table.csv.

Text tasks are judged against the base, picture tasks against the vlm. Parents and controls are rows like
merges; parents get no verdict, controls get the one a merge would get. Decisions are read off the
rounded intervals, the ones that are printed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mergelab.errors import DamagedFileError
from mergelab.records import PointFolder, Run
from mergelab.report import statistics, verdicts
from mergelab.report.pairing import Paired, Samples, pair_samples
from mergelab.report.verdicts import Interval

POINT_DIGITS = 3
"""Decimals of scores, differences, bounds and the mde, in points."""
RATIO_DIGITS = 4
"""Decimals of Sink Strength and of the recovery ratio."""

PARENTS = ("base", "ancestor", "vlm")
EXPLORATORY = "exploratory"
POST_HOC = "post hoc"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One point on one task. Fields up to ``overall`` are the columns of table.csv; None is an empty cell."""

    point_id: str
    role: str
    method: str | None
    parameters: Mapping[str, Any]
    seed: int | None
    zero_point: str | None
    conventions: str | None
    sink_strength: float | None
    sink_strength_bf16: float | None
    task: str
    modality: str
    reference: str
    protocol: str
    n: int
    """Documents graded in this point and in every parent that answers this task."""
    strict: float
    flexible: float | None
    base_strict: float | None = None
    vlm_strict: float | None = None
    delta_vlm: float | None = None
    delta_vlm_low: float | None = None
    delta_vlm_high: float | None = None
    delta_base: float | None = None
    ci_low: float | None = None
    ci_high: float | None = None
    margin: float
    alpha: float
    mde: float | None = None
    """Smallest difference to ``reference`` these documents could have shown with 80 % power."""
    recovery: float | None = None
    """(strict - vlm_strict) / (base_strict - vlm_strict); empty unless there is a gap above the margin."""
    truncated: int | None
    """None where imported results do not tell; so for the next two."""
    empty: int | None
    unparsable: int | None
    verdict: str = ""
    overall: str = ""

    standing: str = field(default="", metadata={"column": False})
    """``post hoc`` (a margin that was not declared), ``exploratory`` (a cell of a grid), or empty."""
    backend: str = field(default="hf", metadata={"column": False})
    """What answered: ``hf`` or ``vllm``; one for all points of a task."""
    ungradable: int = field(default=0, metadata={"column": False})
    reference_p: float | None = field(default=None, metadata={"column": False})
    """``paired_p_value`` against ``reference``; None without it."""
    moved_p: float | None = field(default=None, metadata={"column": False})
    """The same against the vlm."""
    recovery_low: float | None = field(default=None, metadata={"column": False})
    recovery_high: float | None = field(default=None, metadata={"column": False})


COLUMNS: tuple[str, ...] = tuple(entry.name for entry in fields(Row) if entry.metadata.get("column", True))
"""The columns of table.csv, in order."""


def rows(run: Run, margin: float | None = None) -> list[Row]:
    """Every finished (point, task) of a run as a row: points in run order, tasks as in the experiment.

    Args:
        run: A run folder as read by ``records.read_run``.
        margin: Another margin than the declared one, in points: a post hoc reading, and every row says so.

    Raises:
        DamagedFileError: answers that should pair do not, or a parent stands there twice.
    """
    claims = run.experiment["claims"]
    is_post_hoc = margin is not None and margin != claims["margin"]
    reading = _Reading(
        run=run,
        margin=float(claims["margin"] if margin is None else margin),
        alpha=float(claims["alpha"]),
        parents=_parents(run),
    )
    found = [
        reading.row(point, str(task["task"]))
        for point in run.points
        for task in run.experiment["tasks"]
        if task["task"] in point.tasks
    ]
    grid = _grid_points(run)
    return [
        replace(
            row,
            overall=_overall(row, found, run),
            standing=POST_HOC if is_post_hoc else EXPLORATORY if row.point_id in grid else "",
        )
        for row in found
    ]


def counting_tasks(run: Run, modality: str) -> tuple[str, ...]:
    """Tasks that decide ``overall``: the primary ones of a modality, or all of it when none is primary."""
    every = [str(task["task"]) for task in run.experiment["tasks"] if task["modality"] == modality]
    primary = run.experiment["claims"].get("primary") or []
    return tuple(task for task in every if task in primary) or tuple(every)


@dataclass(frozen=True)
class _Reading:
    """A run read at one margin."""

    run: Run
    margin: float
    alpha: float
    parents: Mapping[str, PointFolder]

    def row(self, point: PointFolder, task: str) -> Row:
        record = point.tasks[task]
        metrics = record.metrics
        is_text = metrics["modality"] == "text"
        # A picture task has no base: a text model cannot see.
        compared = ("base", "vlm") if is_text else ("vlm",)
        others = {
            role: self.parents[role]
            for role in compared
            if role in self.parents and role != point.role and task in self.parents[role].tasks
        }
        paired = pair_samples(self.run, task, {"self": point, **others})
        if paired.n == 0:
            raise DamagedFileError(
                f"{self.run.folder / 'points' / point.point_id / 'tasks' / task}: no document is graded both "
                "in this point and in its parents. Look into samples.jsonl why, and grade the task again."
            )
        sink = point.sink or {}
        lowest = float(metrics.get("lowest", 0.0))
        row = Row(
            point_id=point.point_id,
            role=point.role,
            method=point.point["method"],
            parameters=point.point["parameters"] or {},
            seed=point.point.get("seed"),
            zero_point=point.point.get("zero_point"),
            conventions=point.point.get("conventions"),
            sink_strength=_rounded(sink.get("sink_strength"), RATIO_DIGITS),
            sink_strength_bf16=_rounded(sink.get("sink_strength_bf16"), RATIO_DIGITS),
            task=task,
            modality=metrics["modality"],
            reference="base" if is_text else "vlm",
            protocol=str(metrics["protocol"]),
            n=paired.n,
            strict=_points(paired.strict["self"], lowest),
            flexible=_mean_flexible(paired.kept["self"]),
            margin=self.margin,
            alpha=self.alpha,
            truncated=_count(record.samples, "truncated"),
            empty=_count(record.samples, "empty"),
            unparsable=_count(record.samples, "unparsable"),
            ungradable=paired.num_ungradable,
            backend=str(metrics.get("backend", "hf")),
        )
        for role in compared:
            if role == point.role:
                own: dict[str, Any] = {f"{role}_strict": row.strict}
                row = replace(row, **own)
        return self._judged(row, paired, lowest)

    def _judged(self, row: Row, paired: Paired, lowest: float) -> Row:
        """Add differences to the parents and, where both sides are there, the verdict.

        Args:
            row: The row so far.
            paired: The answers behind it.
            lowest: Points that a score of 0 stands for; a score of 1 is 100 points.
        """
        scores, clusters = paired.strict, paired.clusters
        changes: dict[str, Any] = {}
        moved = delta = None
        if "vlm" in scores:
            moved = self._interval(scores["self"], scores["vlm"], clusters, lowest)
            changes |= {
                "vlm_strict": _points(scores["vlm"], lowest),
                "moved_p": statistics.paired_p_value(scores["self"], scores["vlm"], clusters),
            }
            changes |= dict(zip(("delta_vlm", "delta_vlm_low", "delta_vlm_high"), astuple(moved), strict=True))
        if "base" in scores:
            delta = self._interval(scores["self"], scores["base"], clusters, lowest)
            changes |= {"base_strict": _points(scores["base"], lowest)}
            changes |= dict(zip(("delta_base", "ci_low", "ci_high"), astuple(delta), strict=True))
        if row.reference in scores:
            reference = scores[row.reference]
            effect = statistics.paired_mde(scores["self"], reference, self.alpha, clusters)
            changes["mde"] = round(effect * _width(lowest), POINT_DIGITS)
            changes["reference_p"] = statistics.paired_p_value(scores["self"], reference, clusters)
        if row.role not in PARENTS and moved is not None:
            if row.reference == "vlm":
                changes["verdict"] = verdicts.vision_verdict(moved.negated(), self.margin)
            elif delta is not None:
                changes |= self._text_verdict(paired, delta, moved, lowest)
        return replace(row, **changes)

    def _text_verdict(self, paired: Paired, delta: Interval, moved: Interval, lowest: float) -> dict[str, Any]:
        scores, clusters = paired.strict, paired.clusters
        gap = self._interval(scores["base"], scores["vlm"], clusters, lowest)
        verdict = verdicts.text_verdict(gap, delta.negated(), moved, self.margin)
        changes: dict[str, Any] = {"verdict": verdict}
        ratio = statistics.recovery_interval(scores["self"], scores["base"], scores["vlm"], self.alpha, clusters)
        if verdicts.has_gap(gap, self.margin) and ratio is not None:
            names = ("recovery", "recovery_low", "recovery_high")
            changes |= dict(zip(names, astuple(ratio.rounded(RATIO_DIGITS)), strict=True))
        return changes

    def _interval(
        self,
        first: NDArray[np.float64],
        second: NDArray[np.float64],
        clusters: Sequence[Hashable] | None,
        lowest: float,
    ) -> Interval:
        found = statistics.paired_interval(first, second, self.alpha, clusters)
        return Interval(*(bound * _width(lowest) for bound in astuple(found))).rounded(POINT_DIGITS)


def _parents(run: Run) -> dict[str, PointFolder]:
    count = Counter(point.role for point in run.points)
    doubled = [role for role in PARENTS if count[role] > 1]
    if doubled:
        raise DamagedFileError(
            f"{run.folder}: expected one point for each parent, found several for {', '.join(doubled)}. "
            "Run again into a new folder."
        )
    return {point.role: point for point in run.points if point.role in PARENTS}


def _grid_points(run: Run) -> set[str]:
    """Merges that share their method with others of different parameters; seeds alone make no grid.

    While points are missing nobody knows what the finished ones share, so all merges count as cells.
    """
    cells: dict[str, set[str]] = {}
    merges = [point.point for point in run.points if point.role == "merge"]
    for point in merges:
        cells.setdefault(str(point["method"]), set()).add(repr(sorted((point["parameters"] or {}).items())))
    return {point["point_id"] for point in merges if run.missing or len(cells[str(point["method"])]) > 1}


def _overall(row: Row, every: Sequence[Row], run: Run) -> str:
    """Verdict of the whole point; empty for parents and until every task that counts is there."""
    if row.role in PARENTS:
        return ""
    of_point = {other.task: other.verdict for other in every if other.point_id == row.point_id}
    text, vision = (
        [of_point.get(task, "") for task in counting_tasks(run, modality)] for modality in ("text", "vision")
    )
    return "" if "" in text + vision else verdicts.overall_verdict(text, vision)


def _mean_flexible(samples: Samples) -> float | None:
    graded = [line["flexible"] for line in samples if line["flexible"] is not None]
    return _points(np.array(graded, dtype=float)) if graded else None


def _points(scores: NDArray[np.float64], lowest: float = 0.0) -> float:
    return round(lowest + 100 * _width(lowest) * float(scores.mean()), POINT_DIGITS)


def _width(lowest: float) -> float:
    """Return how many points a hundredth of a task's scale is: 1 unless answers can cost points (EQ-Bench)."""
    return (100 - lowest) / 100


def _rounded(value: object, digits: int) -> float | None:
    return round(float(value), digits) + 0.0 if isinstance(value, int | float) else None


def _count(samples: Samples, name: str) -> int | None:
    told = [bool(line[name]) for line in samples if line[name] is not None]
    return sum(told) if told or not samples else None
