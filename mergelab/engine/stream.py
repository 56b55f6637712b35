"""Read a block, merge it in float32, round it once, hand it over: the loop every merge goes through."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from mergelab.checkpoints.reader import torch_dtype
from mergelab.engine.by_mergekit import merge_by_mergekit
from mergelab.engine.deltas import UnscaledDeltas
from mergelab.engine.inputs import Inputs
from mergelab.engine.plan import BLOCK_ENTRIES, COPY, Operation, TensorJob, block_of
from mergelab.engine.statistics import MergeStatistics
from mergelab.engine.targets import Target
from mergelab.errors import PairingError
from merges.block import Block
from merges.mergekit_methods import ByMergekit
from merges.methods import merge
from merges.surveyor import Surveyor

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class _Piece:
    """Part of one tensor: the output entries ``start..stop`` and the matrix rows among them that are merged.

    ``rows`` is None where all entries are merged. Otherwise it indexes the tensor's row map, and the other rows
    are the vlm's own.
    """

    start: int
    stop: int
    shape: tuple[int, ...]
    rows: range | None = None


def stream(
    jobs: Sequence[TensorJob],
    operation: Operation,
    inputs: Inputs,
    target: Target,
    progress: Progress | None = None,
    deltas: UnscaledDeltas | None = None,
) -> MergeStatistics:
    """Send every job through ``operation`` into ``target`` and return what was counted on the way.

    Rows that only the vlm's vocabulary has are the vlm's own. Every value is computed in float32 and rounded once
    into the job's dtype. A method that needs to know the whole model first (``merges.surveyor``) gets its passes over
    the inputs before the first block is written. ``deltas`` keeps what the methods on singular values need again at
    another lambda.

    Peak memory is a fixed multiple of one block (or, for methods that need whole tensors, of the largest tensor),
    whatever the number of tensors.

    Raises:
        PairingError: An input is not finite or not floating point, or the result leaves the range of the output
            dtype; the message names the tensor.
    """
    surveyed = operation.matched or operation
    surveyor = Surveyor(surveyed.parameters, surveyed.vectors) if surveyed.parameters is not None else None
    total = sum(job.num_entries for job in jobs) * (1 + (surveyor.num_passes if surveyor else 0))
    done = 0
    for _ in range(surveyor.num_passes if surveyor else 0):
        assert surveyor is not None
        for job in jobs:
            for piece in _pieces(job, whole=operation.whole_tensors):
                _survey_piece(job, piece, surveyed, inputs, surveyor)
                done += piece.stop - piece.start
                if progress is not None:
                    progress(done, total)
        surveyor.end_pass()
    survey = surveyor.survey if surveyor is not None and surveyor.num_passes else None
    statistics = MergeStatistics(operation, survey)
    for job in jobs:
        for piece in _pieces(job, whole=operation.whole_tensors):
            block = _merged_piece(job, piece, operation, inputs, statistics, deltas)
            target.write(job, piece.start, block)
            done += piece.stop - piece.start
            if progress is not None:
                progress(done, total)
        statistics.num_tensors += 1
    return statistics


def _pieces(job: TensorJob, whole: bool) -> Iterator[_Piece]:
    tensor, num_entries = job.tensor, job.num_entries
    if tensor.rows is None:
        if whole or num_entries <= BLOCK_ENTRIES:
            yield _Piece(0, num_entries, tuple(tensor.shape))
            return
        for start in range(0, num_entries, BLOCK_ENTRIES):
            stop = min(start + BLOCK_ENTRIES, num_entries)
            yield _Piece(start, stop, (stop - start,))
        return
    num_rows, width = tensor.shape
    height = num_rows if whole else max(1, BLOCK_ENTRIES // max(1, width))
    shared = tensor.rows.rows["vlm"]
    first = 0
    for top in range(0, num_rows, height):
        bottom = min(top + height, num_rows)
        last = first
        while last < len(shared) and shared[last] < bottom:
            last += 1
        yield _Piece(top * width, bottom * width, (bottom - top, width), range(first, last))
        first = last


def _read(job: TensorJob, piece: _Piece, operation: Operation, inputs: Inputs) -> tuple[dict[str, torch.Tensor], int]:
    """Return the float32 entries of a piece that are merged, by role, and the flat index of the first."""
    tensor = job.tensor
    if piece.rows is None:
        return {
            role: inputs.float_entries(role, tensor.stored[role], piece.start, piece.stop).view(piece.shape)
            for role in operation.roles
        }, piece.start
    assert tensor.rows is not None
    width = tensor.shape[1]
    return {
        role: inputs.float_rows(
            role, tensor.stored[role], tensor.rows.rows[role][piece.rows.start : piece.rows.stop], width
        )
        for role in operation.roles
    }, piece.rows.start * width


def _survey_piece(job: TensorJob, piece: _Piece, operation: Operation, inputs: Inputs, surveyor: Surveyor) -> None:
    models, start = _read(job, piece, operation, inputs)
    zero = models[operation.zero] if operation.zero is not None else None
    try:
        surveyor.add(block_of(job, operation, start), zero, [models[role] for role in operation.vectors])
    except ValueError as error:
        raise PairingError(f"{operation.method}, tensor {job.tensor.name}: {error}") from error


def _merged_piece(
    job: TensorJob,
    piece: _Piece,
    operation: Operation,
    inputs: Inputs,
    statistics: MergeStatistics,
    deltas: UnscaledDeltas | None,
) -> torch.Tensor:
    """Return the output entries of a piece, flat, rounded into the job's dtype."""
    tensor = job.tensor
    models, start = _read(job, piece, operation, inputs)
    merged = _apply(job, models, operation, block_of(job, operation, start, statistics.survey), deltas)
    rounded = _rounded(job, merged)
    statistics.add(job, models, merged, rounded, start)
    if piece.rows is None:
        return rounded
    assert tensor.rows is not None
    width = tensor.shape[1]
    statistics.copied_entries += (piece.stop - piece.start) - merged.numel()
    # Rows of the vlm alone keep its bits.
    output = inputs.entries("vlm", tensor.stored["vlm"], piece.start, piece.stop).to(inputs.device)
    output = output.to(torch_dtype(job.dtype), copy=True).view(-1, width)
    if not bool(torch.isfinite(output).all()):
        raise _does_not_fit(
            job, float(inputs.float_entries("vlm", tensor.stored["vlm"], piece.start, piece.stop).abs().max())
        )
    top = piece.start // width
    shared = torch.tensor(tensor.rows.rows["vlm"][piece.rows.start : piece.rows.stop], dtype=torch.long)
    output[(shared - top).to(inputs.device)] = rounded.view(-1, width)
    return output.view(-1)


def _apply(
    job: TensorJob,
    models: dict[str, torch.Tensor],
    operation: Operation,
    block: Block,
    deltas: UnscaledDeltas | None,
) -> torch.Tensor:
    if operation.method == COPY:
        return models[operation.vectors[0]]
    assert operation.parameters is not None
    zero = models[operation.zero] if operation.zero is not None else None
    vectors = [models[role] for role in operation.vectors]
    if operation.matched is not None:
        inner = block_of(job, operation.matched, block.start, block.survey)
        vectors = [_apply(job, models, operation.matched, inner, deltas)]
    try:
        if isinstance(operation.parameters, ByMergekit):
            return merge_by_mergekit(zero, vectors, operation.parameters, block)
        unscaled = deltas.of(operation, zero, vectors, block) if deltas is not None else None
        return merge(zero, vectors, operation.parameters, block, unscaled)
    except ValueError as error:
        raise PairingError(f"{operation.method}, tensor {job.tensor.name}: {error}") from error


def _rounded(job: TensorJob, merged: torch.Tensor) -> torch.Tensor:
    rounded = merged.to(torch_dtype(job.dtype)).reshape(-1)
    if not bool(torch.isfinite(rounded).all()):
        raise _does_not_fit(job, float(merged.abs().max()))
    return rounded


def _does_not_fit(job: TensorJob, largest: float) -> PairingError:
    return PairingError(
        f"{job.tensor.name}: a value of size {largest:.4g} does not fit the output dtype {job.dtype}. "
        "Set output_dtype to bfloat16 or float32 in the recipe."
    )
