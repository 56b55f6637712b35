"""Read a piece, merge it in float32, round it once, hand it over: the way every merge goes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

import torch

from mergelab.checkpoints.reader import torch_dtype
from mergelab.engine.deltas import UnscaledDeltas
from mergelab.engine.inputs import Inputs
from mergelab.engine.loading import Loaded, held_bytes, load
from mergelab.engine.memory import give_back_freed_memory, keep_freed_memory
from mergelab.engine.merging import Merging, merge_span, survey_span, survey_whole
from mergelab.engine.pieces import DEVICE_SPAN_ENTRIES, SPAN_ENTRIES, Piece, is_surveyed, pieces_of
from mergelab.engine.pipeline import Gate, Stages, overlap
from mergelab.engine.plan import BLOCK_ENTRIES, Operation, TensorJob
from mergelab.engine.statistics import MergeStatistics
from mergelab.engine.targets import Target
from merges.block import Survey
from merges.surveyor import Counts, Surveyor

Progress = Callable[[int, int], None]

LIMIT_BYTES = 192 << 20
"""Bytes of pieces that are read, computed or written at one time; a larger tensor that is needed whole comes alone."""

MAX_WORKERS = 8
GPU_WORKERS = 2
"""One copies while the other computes."""


@dataclass(frozen=True)
class Block:
    """Entries ``start..`` of a tensor as they are written: flat, in the dtype of the output."""

    start: int
    entries: torch.Tensor


def stream(
    jobs: Sequence[TensorJob],
    operation: Operation,
    inputs: Inputs,
    target: Target,
    progress: Progress | None = None,
    deltas: UnscaledDeltas | None = None,
    workers: int | None = None,
) -> MergeStatistics:
    """Send every job through ``operation`` into ``target`` and return what was counted on the way.

    Rows that only the vlm's vocabulary has are the vlm's own. Every value is computed in float32 and rounded once
    into the job's dtype. A method that needs to know the whole model first (``merges.surveyor``) gets its passes over
    the inputs before the first block is written. ``deltas`` keeps what the methods on singular values need again at
    another lambda.

    Reading, computing and writing overlap (``engine.pipeline``). Neither the bytes nor the statistics depend on the
    number of ``workers``, the threads that compute; None takes as many as torch has threads. Methods on whole
    tensors have one, in which torch has its threads.

    Peak memory is ``LIMIT_BYTES`` and the temporaries of a span for each worker (or, for methods that need whole
    tensors, a fixed multiple of the largest one), whatever the number of tensors.

    Raises:
        PairingError: An input is not finite or not floating point, or the result leaves the range of the output
            dtype; the message names the tensor.
    """
    run = _Stream(operation, inputs, target, deltas)
    pieces = [piece for job in jobs for piece in run.pieces(job)]
    surveyed = operation.matched or operation
    surveyor = Surveyor(surveyed.parameters, surveyed.vectors) if surveyed.parameters is not None else None
    num_passes = surveyor.num_passes if surveyor is not None else 0
    total = sum(job.num_entries for job in jobs) * (1 + num_passes)
    done = 0

    def report(piece: Piece) -> None:
        nonlocal done
        done += piece.stop - piece.start
        if progress is not None:
            progress(done, total)

    statistics = MergeStatistics(operation)
    num_workers = count_workers(operation, inputs.device, workers)
    with one_thread_each(operation):
        for _ in range(num_passes):
            assert surveyor is not None
            counts = Counts()
            with closing(run.surveyed(pieces, surveyor, num_workers)) as found:
                for piece, here in zip(pieces, found, strict=True):
                    counts.add(here)
                    report(piece)
            surveyor.end_pass(counts)
        if surveyor is not None and num_passes:
            statistics.survey = run.survey = surveyor.survey
        with closing(run.merged(pieces, num_workers)) as merged:
            for piece, counted in zip(pieces, merged, strict=True):
                statistics.add_statistics(counted)
                report(piece)
    statistics.num_tensors = len(jobs)
    return statistics


class _Stream:
    """The stages of one merge, for the pipeline."""

    def __init__(self, operation: Operation, inputs: Inputs, target: Target, deltas: UnscaledDeltas | None) -> None:
        self.operation = operation
        self.inputs = inputs
        self.target = target
        self.deltas = deltas
        self.survey: Survey | None = None

    def pieces(self, job: TensorJob) -> Iterator[Piece]:
        span_entries = SPAN_ENTRIES if self.inputs.device == "cpu" else DEVICE_SPAN_ENTRIES
        return pieces_of(job, self.operation, span_entries, BLOCK_ENTRIES)

    def surveyed(self, pieces: Sequence[Piece], surveyor: Surveyor, num_workers: int) -> Generator[Counts]:
        def count(piece: Piece, loaded: Loaded, send: Callable[[Block], None]) -> Counts:
            counts = Counts()
            operation = self.operation.matched or self.operation
            known = survey_whole(loaded, operation, None) if is_surveyed(operation) else None
            for span in piece.spans:
                counts.add(survey_span(loaded, span, operation, surveyor, known))
            return counts

        return overlap(pieces, Stages(self.size, self.read, count, self.write), num_workers, Gate(LIMIT_BYTES))

    def merged(self, pieces: Sequence[Piece], num_workers: int) -> Generator[MergeStatistics]:
        return overlap(pieces, Stages(self.size, self.read, self.merge, self.write), num_workers, Gate(LIMIT_BYTES))

    def size(self, piece: Piece) -> int:
        """Return the bytes of a piece; one that is not held reads and writes span by span."""
        whole = held_bytes(piece, self.inputs, self.operation.roles)
        return whole if self.holds(piece) else min(whole, LIMIT_BYTES // 8)

    def holds(self, piece: Piece) -> bool:
        if self.inputs.keep or not is_surveyed(self.operation):
            return True
        return held_bytes(piece, self.inputs, self.operation.roles) <= LIMIT_BYTES // 2

    def read(self, piece: Piece) -> Loaded:
        return load(piece, self.inputs, self.operation.roles, self.holds(piece))

    def merge(self, piece: Piece, loaded: Loaded, send: Callable[[Block], None]) -> MergeStatistics:
        """Merge a piece, send its blocks to the writer, and return what was counted."""
        with own_queue_of_work(self.inputs.device), torch.no_grad():
            survey = self.survey
            if is_surveyed(self.operation):
                survey = survey_whole(loaded, self.operation, survey)
            statistics = MergeStatistics(self.operation)
            if survey is not None and is_surveyed(self.operation):
                statistics.asked_entries += sum(survey.asked.values())
            merging = Merging(self.operation, survey, self.deltas)
            output = self.empty(piece) if self.holds(piece) else None
            for span in piece.spans:
                entries = merge_span(loaded, span, merging, statistics)
                if output is not None:
                    output[span.start : span.stop].copy_(entries, non_blocking=True)
                else:
                    finish_work(self.inputs.device)
                    send(Block(piece.start + span.start, entries))
            if output is not None:
                finish_work(self.inputs.device)
                send(Block(piece.start, output))
            return statistics

    def empty(self, piece: Piece) -> torch.Tensor:
        """Return room for the output of a piece: on the device for a live model, else page-locked for a GPU."""
        size, dtype = piece.stop - piece.start, torch_dtype(piece.job.dtype)
        on_gpu = self.inputs.device.startswith("cuda")
        if self.target.in_memory:
            return torch.empty(size, dtype=dtype, device=self.inputs.device)
        return torch.empty(size, dtype=dtype, pin_memory=on_gpu)

    def write(self, piece: Piece, block: Block) -> None:
        self.target.write(piece.job, block.start, block.entries)


def is_undivided(operation: Operation) -> bool:
    """True if tensors are merged one by one, as a whole.

    Their methods decompose matrices, in which torch uses all its threads itself, or belong to mergekit, which draws
    from the one global generator.
    """
    return operation.whole_tensors and not is_surveyed(operation)


def count_workers(operation: Operation, device: str, asked: int | None) -> int:
    """Return how many threads compute."""
    if is_undivided(operation):
        return 1
    return asked or min(torch.get_num_threads(), MAX_WORKERS if device == "cpu" else GPU_WORKERS)


@contextmanager
def one_thread_each(operation: Operation) -> Iterator[None]:
    """Give torch a single thread in each worker, unless there is one worker only."""
    if is_undivided(operation):
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        yield
    finally:
        give_back_freed_memory()
        torch.set_num_threads(threads)


@contextmanager
def own_queue_of_work(device: str) -> Iterator[None]:
    """Let the kernels of this thread run beside those of others, on a GPU."""
    if not device.startswith("cuda"):
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield


def finish_work(device: str) -> None:
    """Wait for the kernels and copies that this thread has asked a GPU for."""
    if device.startswith("cuda"):
        torch.cuda.current_stream(device).synchronize()
