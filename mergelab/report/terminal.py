"""The table at the end of a run, at most 100 columns, and the lines that explain it. Prints nothing."""

from __future__ import annotations

import io
import shlex
import textwrap
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mergelab.records import Run
from mergelab.report import verdicts
from mergelab.report.checks import is_weak, notes
from mergelab.report.labels import point_labels
from mergelab.report.rows import EXPLORATORY, POST_HOC, Row, counting_tasks, rows

WIDTH = 100
WEAK_MARK = "°"
PICTURES_A_TABLE = 3
"""Picture tasks that stand side by side in ``WIDTH`` columns."""
_NOT_RESTORED = (verdicts.FAILS_TO_RESTORE, verdicts.PARTLY_RESTORED, verdicts.HARMS)


def render_lines(run: Run, margin: float | None = None) -> list[str]:
    """Everything a run ends with, as lines of at most 100 columns (paths and commands may be longer).

    Args:
        run: A run folder as read by ``records.read_run``.
        margin: Another margin than the declared one: a post hoc reading, marked so.
    """
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        for table in tables(run, margin):
            console.print(table)
    drawn = [line.rstrip() for line in capture.get().splitlines()]
    return [*drawn, *closing_lines(run, margin)]


def tables(run: Run, margin: float | None = None) -> list[Table]:
    """One table per text task with the pictures beside it, then the pictures where there are several tasks of them.

    Beside text stands the one picture task, or what several of them come to.
    """
    found = rows(run, margin)
    text, vision = (
        [task for task in dict.fromkeys(row.task for row in found if row.modality == modality)]
        for modality in ("text", "vision")
    )
    drawn = [_text_table(run, found, task, vision) for task in text]
    if len(vision) > 1:
        groups = [vision[start : start + PICTURES_A_TABLE] for start in range(0, len(vision), PICTURES_A_TABLE)]
        return drawn + [_pictures_table(run, found, group) for group in groups]
    return drawn + [_vision_table(run, found, task) for task in vision if not text]


def closing_lines(run: Run, margin: float | None = None) -> list[str]:
    """Marks, notes, one sentence per verdict that occurs, the closing line, files, what to type next."""
    found = rows(run, margin)
    lines: list[str] = []
    if any(is_weak(row) for row in found):
        lines.append(f"{WEAK_MARK} more than 2 % of the answers were cut off, or strict is under 5: read with care.")
    if any(row.standing == EXPLORATORY for row in found):
        lines.append("* a cell of a grid: exploratory, nothing is corrected for looking at several.")
    lines += notes(run, found)
    occurring = dict.fromkeys(row.verdict for row in found if row.verdict)
    lines += [f"{verdict}: {verdicts.SENTENCES[verdict]}" for verdict in verdicts.SENTENCES if verdict in occurring]
    lines += _undetectable(found)
    lines.append(_closing_line(run, found))
    wrapped = [part for line in lines for part in textwrap.wrap(line, WIDTH, subsequent_indent="  ")]
    # Commands and paths stay on one line, to be copied.
    return wrapped + _what_next(run, found, is_post_hoc=any(row.standing == POST_HOC for row in found))


def _text_table(run: Run, found: Sequence[Row], task: str, beside: Sequence[str]) -> Table:
    of_task = {row.point_id: row for row in found if row.task == task}
    pictures = {row.point_id: row for row in found if beside and row.task == beside[0]}
    pictured = ""
    if len(beside) == 1:
        pictured = f"; pictures: {beside[0]}, n = {max(row.n for row in pictures.values())}"
    elif beside:
        pictured = f"; pictures: {_listed(counting_tasks(run, 'vision'))}"
    table = _frame(_title(list(of_task.values())) + pictured)
    table.add_column("minus base", justify="right", no_wrap=True)
    if beside:
        table.add_column("pictures", justify="right", max_width=20)
    table.add_column("verdict")
    for point_id, label in point_labels(run.points).items():
        row, picture = of_task.get(point_id), pictures.get(point_id)
        if row is None and picture is None:
            continue
        cells = _first_cells(label, row or picture, row)
        cells.append(_difference(row.delta_base, row.ci_low, row.ci_high) if row else "")
        if len(beside) == 1:
            cells.append(f"{_score(picture)} {picture.verdict}".strip() if picture else "")
        elif beside:
            cells.append(_pictures_summary(run, found, point_id))
        _add(table, [*cells, row.verdict if row else ""], row or picture)
    return table


def _vision_table(run: Run, found: Sequence[Row], task: str) -> Table:
    of_task = {row.point_id: row for row in found if row.task == task}
    table = _frame(_title(list(of_task.values())))
    table.add_column("minus vlm", justify="right", no_wrap=True)
    table.add_column("verdict")
    for point_id, label in point_labels(run.points).items():
        row = of_task.get(point_id)
        if row is not None:
            difference = _difference(row.delta_vlm, row.delta_vlm_low, row.delta_vlm_high)
            _add(table, [*_first_cells(label, row, row), difference, row.verdict], row)
    return table


def _pictures_summary(run: Run, found: Sequence[Row], point_id: str) -> str:
    """What the picture tasks that count come to for a point, and the task that decides when it is bad news."""
    counting = counting_tasks(run, "vision")
    given = {row.task: row.verdict for row in found if row.point_id == point_id and row.task in counting}
    if len(given) < len(counting) or "" in given.values():
        return ""
    summary = verdicts.vision_summary(list(given.values()))
    tasks = [task for task, verdict in given.items() if verdict == summary]
    return summary if len(tasks) == len(given) else f"{summary}:\n{_listed(tasks)}"


def _pictures_table(run: Run, found: Sequence[Row], tasks: Sequence[str]) -> Table:
    """Several picture tasks side by side: score and verdict, and below them the difference to the vlm."""
    of_tasks = [row for row in found if row.task in tasks]
    table = _frame(_title(of_tasks, "pictures, minus vlm"), scores=False)
    for task in tasks:
        n = max(row.n for row in of_tasks if row.task == task)
        table.add_column(f"{task}\nn = {n}", overflow="fold")
    by_place = {(row.point_id, row.task): row for row in of_tasks}
    for point_id, label in point_labels(run.points).items():
        given = [by_place.get((point_id, task)) for task in tasks]
        first = next((row for row in given if row is not None), None)
        if first is not None:
            _add(table, [*_first_cells(label, first, None)[:2], *(_picture_cell(row) for row in given)], None)
    return table


def _picture_cell(row: Row | None) -> str:
    if row is None:
        return ""
    difference = _difference(row.delta_vlm, row.delta_vlm_low, row.delta_vlm_high)
    return "\n".join(line for line in (f"{_score(row)} {row.verdict}".strip(), difference) if line)


def _listed(tasks: Sequence[str]) -> str:
    return ", ".join(tasks)


def _title(found: Sequence[Row], what: str = "") -> str:
    row = found[0]
    post_hoc = " (post hoc)" if row.standing == POST_HOC else ""
    what = what or f"{row.task}, n = {max(other.n for other in found)}"
    return f"{what}, margin {row.margin:g}{post_hoc}, {100 * (1 - row.alpha):g} % intervals"


def _frame(title: str, scores: bool = True) -> Table:
    table = Table(
        title=Text(title),
        title_justify="left",
        box=None,
        pad_edge=False,
        header_style="bold",
        padding=(0, 1, 0, 0),
    )
    table.add_column("point", overflow="fold", max_width=40)
    table.add_column("S", justify="right", no_wrap=True)
    if scores:
        table.add_column("strict", justify="right", no_wrap=True)
        table.add_column("flexible", justify="right", no_wrap=True)
    return table


def _first_cells(label: str, any_row: Row | None, row: Row | None) -> list[str]:
    star = "*" if any_row is not None and any_row.standing == EXPLORATORY else ""
    sink = any_row.sink_strength if any_row is not None else None
    flexible = "" if row is None or row.flexible is None else f"{row.flexible:.1f}"
    return [label + star, "" if sink is None else f"{sink:.2f}", _score(row), flexible]


def _add(table: Table, cells: Sequence[str], row: Row | None) -> None:
    # Text, not str: an interval in square brackets is not markup.
    table.add_row(*(Text(cell) for cell in cells), style="dim" if row is not None and is_weak(row) else None)


def _score(row: Row | None) -> str:
    return "" if row is None else f"{row.strict:.1f}{WEAK_MARK if is_weak(row) else ''}"


def _difference(value: float | None, low: float | None, high: float | None) -> str:
    return "" if value is None else f"{value:+.1f} [{low:+.1f},{high:+.1f}]"


def _undetectable(found: Sequence[Row]) -> list[str]:
    """What the undecided cells could have shown, one line a task."""
    lines: list[str] = []
    for task in dict.fromkeys(row.task for row in found):
        effects = [
            row.mde
            for row in found
            if row.task == task and row.verdict == verdicts.INCONCLUSIVE and row.mde is not None
        ]
        if effects:
            span = f"{min(effects):.1f}" + (f" to {max(effects):.1f}" if len(effects) > 1 else "")
            lines.append(f"where {task} is inconclusive, it would show a difference of {span} points (80 % power).")
    return lines


def _closing_line(run: Run, found: Sequence[Row]) -> str:
    """`k of n merges restore text, j of them keep pictures`, over merges with all tasks that count."""
    summaries: dict[str, list[str]] = {}
    for modality, summary in (("text", verdicts.text_summary), ("vision", verdicts.vision_summary)):
        tasks = counting_tasks(run, modality)
        for point_id in dict.fromkeys(row.point_id for row in found if row.role == "merge" and row.overall):
            given = [row.verdict for row in found if row.point_id == point_id and row.task in tasks]
            summaries.setdefault(point_id, []).append(summary(given))
    claims = run.experiment["claims"]
    is_post_hoc = any(row.standing == POST_HOC for row in found)
    prefix = f"post hoc, margin {found[0].margin:g} instead of {claims['margin']:g}: " if is_post_hoc else ""
    n = len(summaries)
    if not n:
        return prefix + "no merge is graded on every task that counts yet."
    if not counting_tasks(run, "text"):
        kept = sum(vision == verdicts.RETAINED for _, vision in summaries.values())
        return f"{prefix}{kept} of {n} merges keep pictures; text was not graded."
    restored = [vision for text, vision in summaries.values() if text == verdicts.RESTORED]
    line = f"{prefix}{len(restored)} of {n} merges restore text"
    if not counting_tasks(run, "vision"):
        line += "; pictures were not graded."
    else:
        line += f", {sum(vision == verdicts.RETAINED for vision in restored)} of them keep pictures."
    if n > 1 and all(text in _NOT_RESTORED for text, _ in summaries.values()):
        line += " Even the best of them, picked on these very documents, does not."
    return line


def _what_next(run: Run, found: Sequence[Row], *, is_post_hoc: bool) -> list[str]:
    folder = shlex.quote(str(run.folder))
    stem = run.folder / "report" / ("table-post-hoc" if is_post_hoc else "table")
    lines = [f"table: {stem}.md and {stem.name}.csv; every answer: {run.folder / 'points'}"]
    best = _best_merge(run, found)
    if best is not None:
        lines.append(f"next: mergelab merge RECIPE --point {best} --out DIR --as vlm")
    lines.append(f"next: mergelab report {folder} --margin POINTS")
    return lines


def _best_merge(run: Run, found: Sequence[Row]) -> str | None:
    """The merge to look at first: one that restores, else the one with the highest strict score."""
    tasks = counting_tasks(run, "text") or counting_tasks(run, "vision")
    merges = [row for row in found if row.role == "merge" and row.task in tasks[:1]]
    if not merges:
        return None
    return max(
        merges,
        key=lambda row: (
            row.overall == verdicts.RESTORED,
            row.overall.startswith(verdicts.RESTORED),
            row.strict,
        ),
    ).point_id
