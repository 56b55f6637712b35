"""Where the entries of a job go in a text model: mostly into the tensor of its name, sometimes into several.

A tensor that is merged fused (InternLM2's ``wqkv``, stacked experts) is taken apart where the text model has its parts,
and an embedding with rows beyond the text model's vocabulary is cut.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from mergelab.engine.plan import TensorJob
from mergelab.errors import PairingError, problem_list
from mergelab.strides import View
from mergelab.towers.layouts import first
from mergelab.towers.pairing import VOCABULARY_TENSORS

Shapes = Mapping[str, Sequence[int]]
Sink = Callable[[str, int, torch.Tensor], None]
"""(name, start, block): stores flat entries ``start..`` of a tensor of the text model."""


@dataclass(frozen=True)
class Outlet:
    """One tensor of the text model that a job fills."""

    name: str
    shape: tuple[int, ...]
    view: View | None = None
    """Which entries of the job; None: the first ones, as they stand."""


def outlets(job: TensorJob, shapes: Shapes) -> tuple[Outlet, ...]:
    """Return what a job fills in a text model with tensors of these shapes; nothing if it does not fit."""
    name, shape = job.tensor.name, tuple(job.tensor.shape)
    wanted = tuple(shapes[name]) if name in shapes else None
    if wanted == shape:
        return (Outlet(name, shape),)
    if wanted is not None and name in VOCABULARY_TENSORS and wanted[1:] == shape[1:] and wanted[0] < shape[0]:
        return (Outlet(name, wanted),)
    parts = job.tensor.parts
    if parts and all(tuple(shapes.get(part.name, ())) == part.view.shape for part in parts):
        return tuple(Outlet(part.name, part.view.shape, part.view) for part in parts)
    return ()


def check_outlets(jobs: Iterable[TensorJob], shapes: Shapes, model: str) -> None:
    """Refuse a text model that the jobs do not fill exactly.

    Args:
        jobs: All jobs of a merge.
        shapes: Name -> shape of every tensor of the text model.
        model: What it is called in the message.

    Raises:
        PairingError: With every job that has no place, and every tensor that nothing would fill.
    """
    problems = []
    filled: set[str] = set()
    for job in jobs:
        found = outlets(job, shapes)
        filled.update(outlet.name for outlet in found)
        name = job.tensor.name
        if not found:
            filled.add(name)
            wanted = tuple(shapes[name]) if name in shapes else "none"
            problems.append(f"{name}: the file has {tuple(job.tensor.shape)}, {model} {wanted}")
    problems += [f"{name}: the file has none, {model} {tuple(shapes[name])}" for name in shapes if name not in filled]
    if problems:
        raise PairingError(
            problem_list(
                "vlm: its config.json does not describe its language weights:",
                first(problems),
                "Fetch config.json and the weights from the same place again.",
            )
        )


class Distributor:
    """Takes the blocks of jobs and hands them on to the tensors of a text model.

    A job with several outlets is held until it is complete: one tensor at a time when jobs come one by one.
    """

    def __init__(self, shapes: Shapes, sink: Sink) -> None:
        """Take the text model's shapes and what stores into it."""
        self.shapes = shapes
        self.sink = sink
        self.lock = threading.Lock()
        self.held: dict[str, tuple[torch.Tensor, int]] = {}
        """Name of a job -> its entries so far, and how many are still to come."""

    def write(self, job: TensorJob, start: int, block: torch.Tensor) -> None:
        """Pass on the flat entries ``start..`` of a job."""
        found = outlets(job, self.shapes)
        if not found:
            raise PairingError(f"{job.tensor.name}: the text model has no place for {tuple(job.tensor.shape)}.")
        if found[0].view is None:
            cut = block[: max(0, math.prod(found[0].shape) - start)]
            if cut.numel() or not block.numel():
                self.sink(found[0].name, start, cut)
            return
        whole = self._collect(job, start, block)
        if whole is not None:
            for outlet in found:
                assert outlet.view is not None
                box = outlet.view.whole
                self.sink(outlet.name, 0, torch.as_strided(whole, box.sizes, box.strides, box.offset).reshape(-1))

    def _collect(self, job: TensorJob, start: int, block: torch.Tensor) -> torch.Tensor | None:
        """Return the whole job once its last block has come."""
        if block.numel() == job.num_entries:
            return block
        with self.lock:
            if job.tensor.name not in self.held:
                self.held[job.tensor.name] = block.new_empty(job.num_entries), job.num_entries
            whole, left = self.held.pop(job.tensor.name)
            whole[start : start + block.numel()] = block
            if left == block.numel():
                return whole
            self.held[job.tensor.name] = whole, left - block.numel()
            return None
