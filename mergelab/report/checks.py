"""What a reader must know first: controls that fail, merges that change nothing, weak cells."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from itertools import groupby

from scipy import stats

from mergelab.records import PointFolder, Run
from mergelab.report.labels import copied_parent, point_labels
from mergelab.report.pairing import count_different_answers
from mergelab.report.rows import PARENTS, Row, counting_tasks

MAX_TRUNCATED_SHARE = 0.02
FLOOR_POINTS = 5.0
LOW_POINTS = 10.0
MIN_MERGES_FOR_RANKS = 4
SHARED_COSINE = 0.3
"""Two task vectors above it share so much that lambda 1 counts a visible part twice."""

OUTSIDE_SHARE = 0.3
"""A decomposition that leaves more of its norm than this outside the task vectors has made up a visible part."""

DECOMPOSING = {
    "tsv": "singular directions that overlap are turned apart",
    "iso_c": "all singular directions get the same weight, those that hardly matter as well",
}
"""Methods that leave the plane of the task vectors by what they do to singular directions, and what that is."""


def is_weak(row: Row) -> bool:
    """True for a cell to grey: more than 2 % of its answers were cut off, or strict is under 5 points."""
    return _is_cut(row) or row.strict < FLOOR_POINTS


def _is_cut(row: Row) -> bool:
    return (row.truncated or 0) > MAX_TRUNCATED_SHARE * (row.n + row.ungradable)


def notes(run: Run, rows: Sequence[Row]) -> list[str]:
    """One line for everything that limits what the rows say; empty when nothing does.

    Args:
        run: The run the rows come from.
        rows: ``rows(run)``.
    """
    checks: tuple[Callable[[Run, Sequence[Row]], list[str]], ...] = (
        _unfinished,
        _endpoint_controls,
        _noise_floor,
        _no_effective_change,
        _equal_points,
        _announced,
        _overruled,
        _shared_change,
        _outside_the_plane,
        _weak_parents,
        _truncation,
        _ungradable,
        _imported,
        _rank_correlation,
    )
    return [line for check in checks for line in check(run, rows)]


def _unfinished(run: Run, rows: Sequence[Row]) -> list[str]:
    lines: list[str] = []
    labels = point_labels(run.points)
    graded = {row.point_id for row in rows}
    waiting = len(run.missing) + sum(point.point_id not in graded for point in run.points)
    if waiting:
        total = len(run.points) + len(run.missing)
        lines.append(f"unfinished: {waiting} of {total} points have no graded task yet; the same command continues.")
    undecided = [row for row in rows if row.role not in PARENTS and not row.verdict]
    for task, found in groupby(sorted(undecided, key=lambda row: row.task), key=lambda row: row.task):
        names = [labels[row.point_id] for row in found]
        lines.append(f"no verdict on {task}: base or vlm is not graded there yet ({_some(names)}).")
    if run.unlisted:
        lines.append(
            f"{len(run.unlisted)} points in the folder are no longer part of the experiment and left out: "
            f"{_some(run.unlisted)}."
        )
    return lines


def _endpoint_controls(run: Run, rows: Sequence[Row]) -> list[str]:
    parents = {point.role: point for point in run.points if point.role in PARENTS}
    lines: list[str] = []
    for control in run.points:
        role = copied_parent(control)
        if role is None or role not in parents:
            continue
        for task in sorted(control.tasks.keys() & parents[role].tasks.keys()):
            total = len(parents[role].tasks[task].samples)
            different = count_different_answers(control.tasks[task].samples, parents[role].tasks[task].samples)
            lines.append(
                f"WARNING: the copy of {role} answers {different} of {total} documents of {task} differently "
                f"from {role} itself; differences of that size are not caused by a merge."
                if different
                else f"control passed: the copy of {role} repeats {role} on all {total} documents of {task}."
            )
        own_rows = (control.merge or {}).get("entries_copied")
        if role == "base" and own_rows:
            lines.append(
                f"the copy of base keeps {own_rows} entries of the vlm's own: embedding rows without a token of base."
            )
        elif _hash(control) != _hash(parents[role]) and None not in (_hash(control), _hash(parents[role])):
            lines.append(f"WARNING: the weights of the copy of {role} are not the weights of {role}.")
    return lines


def _noise_floor(run: Run, rows: Sequence[Row]) -> list[str]:
    """What a second grading of the same weights changed: no difference below it is an effect."""
    labels = point_labels(run.points)
    lines: list[str] = []
    for point in run.points:
        for task, found in ((point.replicate or {}).get("tasks") or {}).items():
            graded = point.tasks.get(task)
            if graded is None or graded.metrics.get("key") != found["key"]:
                continue  # the task was asked in another way since
            n = found["n"]
            shares = ", ".join(
                f"{found[f'{grader}_discordant']} {grader} verdicts ({100 * found[f'{grader}_discordant'] / n:.1f} %)"
                for grader in ("strict", "flexible")
            )
            lines.append(
                f"noise floor: {labels[point.point_id]} graded twice on {task}: {found['different_answers']} of {n} "
                f"answers differ, {shares}."
            )
    return lines


def _no_effective_change(run: Run, rows: Sequence[Row]) -> list[str]:
    labels = point_labels(run.points)
    parents = {point.role: point for point in run.points if point.role in PARENTS}
    lines: list[str] = []
    if "base" in parents and "vlm" in parents and _same_weights(parents["base"], parents["vlm"]):
        lines.append("no effective change: base and the vlm's tower are the same weights.")
    for point in run.points:
        if point.role in PARENTS or copied_parent(point) is not None:
            continue
        for role, parent in parents.items():
            if _same_weights(point, parent):
                lines.append(f"no effective change: {labels[point.point_id]} is {role} bit for bit.")
            elif _same_answers(point, parent):
                lines.append(
                    f"no effective change: {labels[point.point_id]} gives {role}'s answer to every document"
                    f"{_changed_share(point, role)}."
                )
    return lines


def _equal_points(run: Run, rows: Sequence[Row]) -> list[str]:
    labels = point_labels(run.points)
    by_hash: dict[str, list[str]] = {}
    for point in run.points:
        weights = _hash(point)
        if weights is not None and point.role not in PARENTS and copied_parent(point) is None:
            by_hash.setdefault(weights, []).append(labels[point.point_id])
    return [f"the same weights under two names: {_some(names)}." for names in by_hash.values() if len(names) > 1]


def _overruled(run: Run, rows: Sequence[Row]) -> list[str]:
    ancestry = run.experiment.get("ancestry") or {}
    if not ancestry.get("accepted_unrelated"):
        return []
    return [f"--accept-unrelated was given, {ancestry['verdict']}: {ancestry['reason']}."]


def _announced(run: Run, rows: Sequence[Row]) -> list[str]:
    """What was known of the grid before it ran."""
    return [str(line) for line in run.experiment.get("announced", ())]


def _shared_change(run: Run, rows: Sequence[Row]) -> list[str]:
    """One line for each pair of task vectors that overlap; all points of one zero point share theirs."""
    cosines: dict[tuple[str, ...], float] = {}
    methods: dict[tuple[str, ...], dict[str, bool | None]] = {}
    for point in run.points:
        merge = point.merge or {}
        cosine, vectors = merge.get("task_vector_cosine"), merge.get("vectors") or ()
        if point.role == "merge" and isinstance(cosine, int | float) and cosine > SHARED_COSINE and len(vectors) == 2:
            place = (*vectors, str(merge.get("zero")))
            cosines.setdefault(place, cosine)
            methods.setdefault(place, {})[str(point.point["method"])] = _averages(point)
    lines = []
    for place, cosine in cosines.items():
        first, second, zero = place
        line = f"shared change: the task vectors of {first} and {second} from {zero} have cosine {cosine:.2f}."
        if sums := [name for name, averages in methods[place].items() if averages is False]:
            line += (
                f" Added up ({', '.join(sums)}), lambda 1 counts the change they share twice and lambda 0.5 is about "
                "the average; read lambda 1 with that in mind."
            )
        if means := [name for name, averages in methods[place].items() if averages]:
            line += (
                f" Averaged ({', '.join(means)}), lambda 1 counts it once, and a smaller one stays nearer to {zero}."
            )
        lines.append(line)
    return lines


def _averages(point: PointFolder) -> bool | None:
    """Whether lambda scales a mean of the task vectors (True) or their sum (False); None where it scales neither."""
    method, parameters = str(point.point["method"]), point.point["parameters"] or {}
    if "divisor" in parameters:
        return bool(parameters["divisor"] != "none")
    if method in ("star", "tsv", "iso_c", "task_arithmetic", "dare_linear"):
        return method == "star"
    return parameters.get("normalize") if "lambda" in parameters else None


def _outside_the_plane(run: Run, rows: Sequence[Row]) -> list[str]:
    """One line for each method that puts much of its norm where neither task vector lies."""
    labels = point_labels(run.points)
    outside: dict[str, list[tuple[str, float, float]]] = {}
    for point in run.points:
        merge = point.merge or {}
        share, cosine = merge.get("outside_span_share"), merge.get("task_vector_cosine")
        method = str(point.point["method"])
        if method in DECOMPOSING and isinstance(share, int | float) and share > OUTSIDE_SHARE:
            outside.setdefault(method, []).append((labels[point.point_id], share, float(cosine or 0.0)))
    lines = []
    for method, points in outside.items():
        low, high = min(share for _, share, _ in points), max(share for _, share, _ in points)
        shares = f"{100 * low:.0f} %" if high - low < 0.005 else f"{100 * low:.0f} to {100 * high:.0f} %"
        lines.append(
            f"WARNING: {shares} of the norm of what {method} merged lies outside both task vectors (their cosine is "
            f"{points[0][2]:.2f}), in {_some([name for name, _, _ in points])}: {DECOMPOSING[method]}, "
            "which neither model asked for."
        )
    return lines


def _weak_parents(run: Run, rows: Sequence[Row]) -> list[str]:
    lines: list[str] = []
    for row in rows:
        if row.role == row.reference or (row.role == "vlm" and row.modality == "text"):
            if row.strict < FLOOR_POINTS:
                lines.append(f"floor: {row.role} scores {row.strict:.1f} strict on {row.task}, near nothing.")
            elif row.strict < LOW_POINTS:
                lines.append(f"low: {row.role} scores {row.strict:.1f} strict on {row.task}.")
    return lines


def _truncation(run: Run, rows: Sequence[Row]) -> list[str]:
    labels = point_labels(run.points)
    lines = []
    for task in dict.fromkeys(row.task for row in rows):
        found = [row for row in rows if row.task == task]
        cut = [row for row in found if _is_cut(row)]
        if cut:
            worst = max(cut, key=lambda row: row.truncated or 0)
            lines.append(
                f"cut off: {len(cut)} of {len(found)} points ran out of tokens on more than 2 % of {task}, most "
                f"often {labels[worst.point_id]} ({worst.truncated} documents)."
            )
    return lines


def _ungradable(run: Run, rows: Sequence[Row]) -> list[str]:
    lines = []
    for task in dict.fromkeys(row.task for row in rows):
        most = max(row.ungradable for row in rows if row.task == task)
        if most:
            lines.append(f"ungradable: up to {most} documents of {task} are left out of its scores.")
    return lines


def _imported(run: Run, rows: Sequence[Row]) -> list[str]:
    lines: list[str] = []
    for task in [task["task"] for task in run.experiment["tasks"] if task.get("imported")]:
        sources = [point.tasks[task].metrics["imported"] for point in run.points if task in point.tasks]
        tools = sorted({" ".join(str(one[k]) for k in ("tool", "version") if one.get(k)) for one in sources})
        lines.append(
            f"{task} is imported, graded by {', '.join(tools)}: that each file belongs to its point is its importer's "
            "word, and whether answers were cut off is not told."
        )
    return lines


def _rank_correlation(run: Run, rows: Sequence[Row]) -> list[str]:
    """Sink Strength against the strict score over the merges: a description, not a test."""
    lines: list[str] = []
    weights = {point.point_id: _hash(point) or point.point_id for point in run.points}
    for task in counting_tasks(run, "text"):
        found = [row for row in rows if row.role == "merge" and row.task == task and row.sink_strength is not None]
        distinct = len({weights[row.point_id] for row in found})
        sinks, scores = [row.sink_strength for row in found], [row.strict for row in found]
        if len(found) < MIN_MERGES_FOR_RANKS or len(set(sinks)) < 2 or len(set(scores)) < 2:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # scipy warns about ties in tiny samples; n is printed
            rho = float(stats.spearmanr(sinks, scores).statistic)
        lines.append(
            f"S against strict {task} over {len(found)} merges ({distinct} distinct): Spearman {rho:.2f}, "
            "descriptive only, since cells of one grid are not independent."
        )
    return lines


def _hash(point: PointFolder) -> str | None:
    value = point.point.get("weights_hash")
    return str(value) if value else None


def _same_weights(first: PointFolder, second: PointFolder) -> bool:
    return _hash(first) is not None and _hash(first) == _hash(second)


def _same_answers(first: PointFolder, second: PointFolder) -> bool:
    shared = first.tasks.keys() & second.tasks.keys()
    return bool(shared) and not any(
        count_different_answers(first.tasks[task].samples, second.tasks[task].samples) for task in shared
    )


def _changed_share(point: PointFolder, role: str) -> str:
    shares = (point.merge or {}).get("changed_share")
    share = shares.get(role) if isinstance(shares, dict) else shares
    return f", though {100 * share:.3g} % of the entries differ" if isinstance(share, int | float) else ""


def _some(names: Sequence[str], most: int = 4) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
