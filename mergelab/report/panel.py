"""The published evidence on Sink Strength as data: 17 pairs of a base LLM and a VLM made from it.

``data/panel.csv`` holds what arXiv 2609.00746 prints, one pair a row with its source. ``run_entry`` makes a
row of the same kind from a user's run folder. What is computed from the rows is in ``evidence`` (checks of the
paper) and ``prediction`` (where a new model falls).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path, PurePosixPath

from mergelab.errors import DamagedFileError
from mergelab.records import Run, read_run
from mergelab.report.rows import rows

PAPER = "arXiv 2609.00746"
TASKS = ("ifeval", "eq_bench", "gsm8k_cot", "gpqa_diamond_cot", "mmlu", "boolq", "mbpp", "mmlu_pro", "ruler")
"""Columns of losses in points, vlm minus base; ifeval is the prompt-level strict score."""
IFEVAL = "ifeval"


@dataclass(frozen=True)
class Entry:
    """One pair: Sink Strength of its base, and what its vlm lost on text tasks."""

    vlm: str
    base: str
    sink_strength: float
    """S of the base in nats, bfloat16 read-out (every published S is one)."""
    deltas: dict[str, float]
    """Task -> vlm minus base in points; tasks that were not reported are absent."""
    source: str
    panel: int | None = None
    """Smallest panel of the paper that holds the pair: 6, 9 or 17; None for a user's run."""
    b_gap: float | None = None
    margin: float | None = None
    """G - B, difference of medians, in nats."""
    qk_norm: str | None = None
    post_training: str | None = None
    notes: tuple[str, ...] = field(default=())


def load_panel() -> tuple[Entry, ...]:
    """Return the 17 pairs of the paper; the first six are its main pairs, the first nine its second panel."""
    text = (resources.files("mergelab.report") / "data" / "panel.csv").read_text("utf-8")
    return tuple(_entry(row) for row in csv.DictReader(text.splitlines()))


def subset(entries: Iterable[Entry], size: int) -> tuple[Entry, ...]:
    """Return the paper's panel of ``size`` (6, 9 or 17) pairs."""
    return tuple(entry for entry in entries if entry.panel is not None and entry.panel <= size)


def num_distinct(entries: Iterable[Entry]) -> int:
    """Return how many different S there are; pairs that share a base share it."""
    return len({entry.sink_strength for entry in entries})


def run_entry(folder: Path) -> Entry:
    """Make a panel row from a run folder: S of its base, and strict IFEval of its vlm minus that of its base.

    The difference is that of the run's own table: paired per document, in points.

    Raises:
        DamagedFileError: The folder is no run, or lacks the base's sink or IFEval of base or vlm; all that is
            missing is named.
    """
    run = read_run(folder)
    base = next((point for point in run.points if point.role == "base"), None)
    sink = base.sink if base is not None else None
    row = next((row for row in rows(run) if row.role == "vlm" and row.task == IFEVAL), None)
    strength = sink.get("sink_strength_bf16") if sink else None
    problems = []
    if not _is_finite(strength):
        problems.append("the bfloat16 read-out of Sink Strength of its base")
    if row is None or row.delta_base is None:
        graded = sorted({task for point in run.points for task in point.tasks})
        problems.append(f"{IFEVAL} of base and vlm (graded: {', '.join(graded) or 'nothing'})")
    if problems or sink is None or row is None or row.delta_base is None or not isinstance(strength, int | float):
        raise DamagedFileError(
            f"{folder}: expected a run that can stand on the panel, found it lacks {' and '.join(problems)}. "
            "The panel compares S of a base with the loss of its vlm on IFEval: run a recipe with that task."
        )
    notes = [f"{row.n} prompts", f"protocol {row.protocol}", f"sink in {sink.get('dtype', 'unknown dtype')}"]
    return Entry(
        vlm=_model_name(run, "vlm"),
        base=_model_name(run, "base"),
        sink_strength=float(strength),
        deltas={IFEVAL: row.delta_base},
        source=f"run {folder}",
        notes=tuple(notes),
    )


def _model_name(run: Run, role: str) -> str:
    pair = run.experiment.get("pair")
    source = pair.get(role) if isinstance(pair, dict) else None
    location = source.get("id") if isinstance(source, dict) else source
    # The hub id's last part is what the panel calls a model, so a known base joins its group.
    return PurePosixPath(location).name if isinstance(location, str) and location else f"{role} of {run.folder.name}"


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _entry(row: dict[str, str]) -> Entry:
    def number(name: str) -> float | None:
        return float(row[name]) if row[name] else None

    found = {task: number(task) for task in TASKS}
    return Entry(
        vlm=row["vlm"],
        base=row["base"],
        sink_strength=float(row["sink_strength"]),
        deltas={task: value for task, value in found.items() if value is not None},
        source=row["source"],
        panel=int(row["panel"]),
        b_gap=number("b_gap"),
        margin=number("margin"),
        qk_norm=row["qk_norm"] or None,
        post_training=row["post_training"] or None,
    )
