"""Rows to files: table.csv for programs, table.md for people.

Numbers in table.csv have fixed decimals: 3 for scores, differences, bounds and the mde (points), 4 for
Sink Strength and the recovery ratio (unitless), none for counts; margin and alpha stand as declared.
``parameters`` is canonical JSON (sorted keys, no spaces). A cell that does not apply is empty. Lines end
with a line feed.
"""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mergelab import atomic
from mergelab.records import Run, read_run
from mergelab.report.checks import notes
from mergelab.report.labels import point_labels
from mergelab.report.rows import (
    COLUMNS,
    EXPLORATORY,
    POINT_DIGITS,
    POST_HOC,
    RATIO_DIGITS,
    Row,
    counting_tasks,
    rows,
)
from mergelab.report.statistics import holm

__all__ = ["COLUMNS", "ReportPaths", "Row", "rows", "to_csv", "to_markdown", "write_report"]

_RATIOS = ("sink_strength", "sink_strength_bf16", "recovery")
_AS_DECLARED = ("margin", "alpha")


@dataclass(frozen=True)
class ReportPaths:
    """Where a report lies."""

    csv: Path
    markdown: Path


def write_report(run: Run | Path, margin: float | None = None) -> ReportPaths:
    """Write report/table.csv and report/table.md of a run folder, each whole or not at all.

    With another margin than the declared one the files are table-post-hoc.csv and table-post-hoc.md: a
    post hoc reading never takes the place of the declared one.

    Args:
        run: A run, or the folder to read it from.
        margin: None for the declared margin, else points.

    Raises:
        DamagedFileError: the records are damaged or do not pair.
    """
    run = read_run(run) if isinstance(run, Path) else run
    found = rows(run, margin)
    is_post_hoc = any(row.standing == POST_HOC for row in found)
    stem = run.folder / "report" / ("table-post-hoc" if is_post_hoc else "table")
    paths = ReportPaths(csv=stem.with_suffix(".csv"), markdown=stem.with_suffix(".md"))
    atomic.write_text(paths.csv, to_csv(found))
    atomic.write_text(paths.markdown, to_markdown(run, margin))
    return paths


def to_csv(rows: Iterable[Row]) -> str:
    """The rows as CSV with the columns of ``COLUMNS``; post hoc verdicts say so in their cells."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        marked = _marked(row)
        writer.writerow([_cell(name, getattr(marked, name)) for name in COLUMNS])
    return buffer.getvalue()


def to_markdown(run: Run, margin: float | None = None) -> str:
    """The rows as Markdown, one table per task, under a caption that says what the numbers are.

    Beside the differences stand the p against the reference (McNemar, clusters ignored; paired t for fractions),
    and for merges that are no grid cells p against the vlm after Holm over all of them on the primary
    tasks.
    """
    found = rows(run, margin)
    labels = point_labels(run.points)
    adjusted = _adjusted(run, found)
    lines = [f"# {run.experiment.get('name', run.folder.name)}", "", *_caption(run, found), ""]
    for task in dict.fromkeys(row.task for row in found):
        of_task = [row for row in found if row.task == task]
        lines += _task_table(of_task, labels, adjusted, _speed(run, task))
    said = notes(run, found)
    if said:
        lines += ["## Notes", "", *(f"- {line}" for line in said), ""]
    return "\n".join(lines)


def _marked(row: Row) -> Row:
    if row.standing != POST_HOC:
        return row
    marks: dict[str, Any] = {
        name: f"{getattr(row, name)} ({POST_HOC})" for name in ("verdict", "overall") if getattr(row, name)
    }
    return replace(row, **marks)


def _cell(name: str, value: object) -> str:
    if value is None:
        return ""
    if name == "parameters":
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    if name in _AS_DECLARED:
        return f"{value:g}"
    if isinstance(value, float):
        return f"{value:.{RATIO_DIGITS if name in _RATIOS else POINT_DIGITS}f}"
    return str(value)


def _adjusted(run: Run, found: Sequence[Row]) -> dict[tuple[str, str], float]:
    """Holm over the confirmatory family: merges that are no grid cells, on the primary tasks."""
    primary = counting_tasks(run, "text") + counting_tasks(run, "vision")
    family = [
        row
        for row in found
        if row.role == "merge" and not row.standing and row.task in primary and row.moved_p is not None
    ]
    values = holm([row.moved_p for row in family if row.moved_p is not None])
    return {(row.point_id, row.task): value for row, value in zip(family, values, strict=True)}


def _caption(run: Run, found: Sequence[Row]) -> list[str]:
    experiment, claims = run.experiment, run.experiment["claims"]
    margin, alpha = (found[0].margin, found[0].alpha) if found else (claims["margin"], claims["alpha"])
    versions = ", ".join(f"{name} {version}" for name, version in (experiment.get("versions") or {}).items())
    lines = [
        f"Zero point {experiment.get('zero_point')}, conventions {experiment.get('conventions')}. "
        f"Versions: {versions or 'not recorded'}.",
        "",
        f"Scores and differences in points (0 to 100) on the same documents; intervals are two-sided at "
        f"{100 * (1 - alpha):g} %, paired by document, cluster-aware where a task has clusters. "
        f"Margin {margin:g} points. Verdicts are read off the intervals alone. MDE: smallest difference to "
        "the reference that these documents would show with 80 % power. p is of the exact McNemar test, which ignores "
        "clusters; where scores are fractions of a document, of a paired t test.",
    ]
    if any(row.standing == POST_HOC for row in found):
        lines += [
            "",
            f"**Post hoc**: margin {margin:g} was chosen after the run; {claims['margin']:g} was declared.",
        ]
    if any(row.standing == EXPLORATORY for row in found):
        lines += [
            "",
            "Rows marked * are cells of a grid: exploratory. No correction is made for looking at several; "
            "the best of them looks better here than on new documents.",
        ]
    return lines


def _speed(run: Run, task: str) -> str:
    """How long a point took to answer a task, and how fast it wrote; empty where that was not recorded."""
    done = [point.tasks[task].metrics for point in run.points if task in point.tasks]
    timed = [metrics for metrics in done if metrics.get("seconds")]
    if not timed:
        return ""
    seconds = [float(metrics["seconds"]) for metrics in timed]
    line = f"Seconds a point: median {statistics.median(seconds):.1f}, {min(seconds):.1f} to {max(seconds):.1f}."
    rates = [metrics["num_tokens"] / metrics["seconds"] for metrics in timed if metrics.get("num_tokens")]
    if rates:
        line += f" Tokens per second: median {statistics.median(rates):.0f}, {min(rates):.0f} to {max(rates):.0f}."
    return line


def _task_table(
    found: Sequence[Row], labels: dict[str, str], adjusted: dict[tuple[str, str], float], speed: str
) -> list[str]:
    reference = found[0].reference
    header = ["point", "S", "strict", "flexible", f"minus {reference}", "p", "MDE"]
    header += ["minus vlm", "recovery"] if reference == "base" else []
    header += ["p vlm (Holm)"] if any((row.point_id, row.task) in adjusted for row in found) else []
    header += ["n", "truncated", "empty", "unparsable", "verdict", "overall"]
    lines = [
        f"## {found[0].task}",
        "",
        f"{found[0].modality}, protocol {found[0].protocol}, answered by {found[0].backend}, "
        f"n = {max(row.n for row in found)}, reference {reference}." + (f" {speed}" if speed else ""),
        "",
        _line(header),
        _line(["---"] * len(header)),
    ]
    order = list(labels)
    for row in sorted(found, key=lambda row: order.index(row.point_id)):
        marked = _marked(row)
        star = " *" if row.standing == EXPLORATORY else ""
        moved = _difference(row.delta_vlm, row.delta_vlm_low, row.delta_vlm_high)
        delta = _difference(row.delta_base, row.ci_low, row.ci_high)
        cells = [
            labels[row.point_id] + star,
            _number(row.sink_strength),
            _number(row.strict),
            _number(row.flexible),
        ]
        cells += [delta if reference == "base" else moved, _p(row.reference_p), _number(row.mde)]
        cells += [moved, _difference(row.recovery, row.recovery_low, row.recovery_high)] if reference == "base" else []
        cells += [_p(adjusted.get((row.point_id, row.task)))] if "p vlm (Holm)" in header else []
        cells += ["" if value is None else str(value) for value in (row.n, row.truncated, row.empty, row.unparsable)]
        lines.append(_line([*cells, marked.verdict, marked.overall]))
    return [*lines, ""]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _difference(value: float | None, low: float | None, high: float | None) -> str:
    return "" if value is None else f"{value:.2f} [{_number(low)}, {_number(high)}]"


def _p(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"
