"""What a run will do and roughly how long it takes, from headers and line counts alone. No torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mergelab.checkpoints.output_folder import check_free_space
from mergelab.config import Recipe
from mergelab.evals.entry import task_path
from mergelab.evals.protocols import PROTOCOLS
from mergelab.evals.request import EvalRequest
from mergelab.evals.task_folder import known_tasks, own_data
from mergelab.sweeps.grid import PointSpec
from mergelab.sweeps.models import Models

START_SECONDS = 15.0
"""Importing the libraries, loading tasks and models of a small pair."""

POINT_SECONDS = 2.0
"""Merging, measuring the sink and starting the tasks of a small pair, per point."""

CPU_SECONDS_PER_TOKEN_PARAMETER = 3.8e-11
"""Measured: SmolLM2-135M in bfloat16, batch 32, two cores: 100 answers of at most 512 tokens in 259 s."""

GPU_SPEEDUP = 50.0
"""Guess, said to be one: generation with transformers in batches on one data-centre GPU against two cores."""


@dataclass(frozen=True)
class TaskSize:
    """How much one task asks of a model."""

    name: str
    modality: str
    num_documents: int | None
    """None when only loading the data set can tell (or refuse it)."""
    max_new_tokens: int
    """0 for tasks that only score given answers."""


def task_sizes(request: EvalRequest) -> list[TaskSize]:
    """Return the tasks of a request with as much of their size as files on disk tell; unknown tasks are left out.

    Loading the tasks, which comes later, refuses what is wrong with the request.
    """
    protocol = PROTOCOLS[request.protocol]
    known = known_tasks(request.task_folder)
    sizes = []
    for name in request.tasks or protocol.tasks:
        entry = known.get(name)
        if entry is None:
            continue
        path = request.source(name) or own_data(entry)
        if path is None and entry.home == "bench":
            path = task_path(entry).with_suffix(".jsonl")
        count = _count_documents(path, entry.listed) if path is not None and path.is_file() else None
        if request.limit is not None:
            count = request.limit if count is None else min(count, request.limit)
        budget = request.max_gen_toks.get(name, protocol.max_gen_toks.get(name, entry.max_gen_toks or 0))
        sizes.append(TaskSize(name, entry.modality, count, budget))
    return sizes


def likely_device(name: str) -> str:
    """Return the device a run will probably use, without importing torch; ``auto`` looks for an NVIDIA driver."""
    if name != "auto":
        return name
    return "cuda" if shutil.which("nvidia-smi") else "cpu"


def check_disk(recipe: Recipe, models: Models, points: Sequence[PointSpec], folder: Path) -> int:
    """Return the bytes of the weights that a run will still write into its folder.

    Raises:
        MachineError: The disk cannot hold them.
    """
    if recipe.keep_weights != "always":
        return 0
    merges = sum(spec.role == "merge" for spec in points)
    kept = sum(path.is_dir() for path in folder.glob("points/*/weights"))
    num_bytes = max(0, merges - kept) * models.num_bytes("vlm")
    check_free_space(folder, num_bytes)
    return num_bytes


def announcement(
    name: str, models: Models, points: Sequence[PointSpec], tasks: Sequence[TaskSize], device: str
) -> list[str]:
    """Return the lines that tell, before any work, what will run."""
    lines = [f"{name}: {_points(points)} on {device}"]
    for role, checkpoint in models.checkpoints.items():
        size = models.num_parameters(role)
        what = "tower of " if role == "vlm" and models.pairing.copied else ""
        lines.append(
            f"  {role:<8} {_count(size)} parameters, {_bytes(models.num_bytes(role))}  {what}{checkpoint.folder}"
        )
    for task in tasks:
        n = f"n = {task.num_documents}" if task.num_documents is not None else "all documents"
        budget = f", up to {task.max_new_tokens} new tokens" if task.max_new_tokens else ""
        lines.append(f"  {task.name}: {n}{budget} ({task.modality})")
    lines.append(f"  about {_minutes(estimated_seconds(models, points, tasks, device))}")
    return lines


def estimated_seconds(models: Models, points: Sequence[PointSpec], tasks: Sequence[TaskSize], device: str) -> float:
    """Return a rough duration: every answer as long as its budget allows, at a measured cost a token and parameter."""
    cost = CPU_SECONDS_PER_TOKEN_PARAMETER / (1.0 if device == "cpu" else GPU_SPEEDUP)
    tokens = sum((task.num_documents or 1000) * max(1, task.max_new_tokens) for task in tasks)
    return START_SECONDS + len(points) * (POINT_SECONDS + tokens * models.num_parameters("vlm") * cost)


def _count_documents(path: Path, listed: str | None) -> int | None:
    """Return how many documents a JSONL file holds; None for one that loading will refuse."""
    lines = [line for line in path.read_bytes().splitlines() if line.strip()]
    if listed is None:
        return len(lines)
    try:
        return sum(len(json.loads(line)[listed]) for line in lines)
    except (ValueError, KeyError, TypeError):
        return None


def _points(points: Sequence[PointSpec]) -> str:
    counts: dict[str, int] = {}
    for spec in points:
        kind = {"merge": "merge", "control": "control"}.get(spec.role, "parent")
        counts[kind] = counts.get(kind, 0) + 1
    parts = [f"{count} {kind}{'s' if count != 1 else ''}" for kind, count in counts.items()]
    return f"{len(points)} points ({', '.join(parts)})"


def _count(number: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def _bytes(number: int) -> str:
    return f"{number / 1e9:.2f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"


def _minutes(seconds: float) -> str:
    if seconds < 90:
        return f"{max(10, round(seconds, -1)):.0f} seconds"
    minutes = seconds / 60
    return f"{minutes:.0f} minutes" if minutes < 120 else f"{minutes / 60:.1f} hours"
