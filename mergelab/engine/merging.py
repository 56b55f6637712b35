"""One span of one tensor: merge the stored entries in float32 and round once. No files, no threads, no state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from mergelab.checkpoints.reader import torch_dtype
from mergelab.engine.by_mergekit import merge_by_mergekit
from mergelab.engine.deltas import UnscaledDeltas
from mergelab.engine.loading import Loaded
from mergelab.engine.pieces import Span
from mergelab.engine.plan import COPY, Operation, TensorJob, block_of
from mergelab.engine.statistics import MergeStatistics
from mergelab.errors import PairingError
from merges.block import Block, Survey
from merges.exclusion import is_excluded
from merges.kept import kept_masks
from merges.masks import is_finite
from merges.mergekit_methods import ByMergekit
from merges.methods import merge
from merges.parameters import Ties
from merges.surveyor import Counts, Surveyor, survey_tensor


@dataclass(frozen=True)
class Merging:
    """How the spans of a piece are merged."""

    operation: Operation
    survey: Survey | None = None
    """Of the whole model, or of the tensor, for methods that need one."""

    deltas: UnscaledDeltas | None = None


def merge_span(loaded: Loaded, span: Span, merging: Merging, statistics: MergeStatistics) -> torch.Tensor:
    """Return the output entries of a span, flat, rounded into the job's dtype, and count them.

    Raises:
        PairingError: An input is not finite, or the result leaves the range of the output dtype; the message names
            the tensor.
    """
    piece, operation = loaded.piece, merging.operation
    job = piece.job
    models = _models(loaded, span, operation)
    block = block_of(job, operation, piece.first_merged + span.low, merging.survey)
    with _naming(operation, job):
        block = replace(block, kept=_kept(models, operation, block))
        merged = _apply(job, models, merging, block)
    rounded = _rounded(job, merged)
    statistics.add(job, models, merged, rounded, block.kept, loaded.roles_stored_as(job.dtype))
    if piece.rows is None:
        return rounded
    statistics.copied_entries += (span.stop - span.start) - merged.numel()
    copied = loaded.copied(span)
    output = copied.to(rounded.dtype, copy=True).view(-1, piece.width)
    if not is_finite(output):
        raise _does_not_fit(job, float(copied.to(torch.float32).abs().max()))
    output[loaded.merged_rows(span)] = rounded.view(-1, piece.width)
    return output.view(-1)


def survey_span(loaded: Loaded, span: Span, operation: Operation, surveyor: Surveyor, survey: Survey | None) -> Counts:
    """Return what the current pass of ``surveyor`` counts in a span; ``survey`` is that of the tensor, if it has one.

    Raises:
        PairingError: An input is not finite; the message names the tensor.
    """
    job, models = loaded.piece.job, _models(loaded, span, operation)
    zero = models[operation.zero] if operation.zero is not None else None
    block = block_of(job, operation, loaded.piece.first_merged + span.low, survey)
    with _naming(operation, job):
        return surveyor.count(block, zero, [models[role] for role in operation.vectors])


def survey_whole(loaded: Loaded, operation: Operation, model: Survey | None) -> Survey | None:
    """Return the survey of the tensor of a piece, with what is known of the model; None where it is left out.

    Raises:
        PairingError: A task vector is not finite; the message names the tensor.
    """
    piece, parameters, zero = loaded.piece, operation.parameters, operation.zero
    assert isinstance(parameters, Ties) and zero is not None
    if is_excluded(parameters.exclude, piece.job.tensor.kind, piece.job.tensor.name):
        return model

    def parts() -> Iterator[tuple[int, Mapping[str, torch.Tensor]]]:
        for span in piece.spans:
            start = loaded.merged(zero, span)
            yield span.low, {role: loaded.merged(role, span) - start for role in operation.vectors}

    with _naming(operation, piece.job):
        found = survey_tensor(parameters, piece.num_merged, parts)
    return replace(found, majority=0 if model is None else model.majority)


def _models(loaded: Loaded, span: Span, operation: Operation) -> dict[str, torch.Tensor]:
    """Return the float32 entries of a span that are merged, by role: flat, or in their shape in a whole tensor."""
    models = {role: loaded.merged(role, span) for role in operation.roles}
    if loaded.piece.span_entries:
        return models
    return {role: model.view(loaded.piece.shape) for role, model in models.items()}


def _kept(models: Mapping[str, torch.Tensor], operation: Operation, block: Block) -> dict[str, torch.Tensor] | None:
    if operation.zero is None or operation.parameters is None:
        return None
    return kept_masks(models[operation.zero], [models[role] for role in operation.vectors], operation.parameters, block)


def _apply(job: TensorJob, models: Mapping[str, torch.Tensor], merging: Merging, block: Block) -> torch.Tensor:
    operation = merging.operation
    if operation.method == COPY:
        return models[operation.vectors[0]]
    assert operation.parameters is not None
    zero = models[operation.zero] if operation.zero is not None else None
    vectors = [models[role] for role in operation.vectors]
    if operation.matched is not None:
        matched = replace(merging, operation=operation.matched)
        inner = block_of(job, operation.matched, block.start, block.survey)
        with _naming(operation.matched, job):
            vectors = [_apply(job, models, matched, inner)]
    if isinstance(operation.parameters, ByMergekit):
        return merge_by_mergekit(zero, vectors, operation.parameters, block)
    deltas = merging.deltas
    unscaled = deltas.of(operation, zero, vectors, block) if deltas is not None else None
    return merge(zero, vectors, operation.parameters, block, unscaled)


class _naming:
    """Context manager that turns what a method refuses into a PairingError that names the tensor."""

    def __init__(self, operation: Operation, job: TensorJob) -> None:
        self.operation = operation
        self.job = job

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, ValueError):
            raise PairingError(f"{self.operation.method}, tensor {self.job.tensor.name}: {error}") from error


def _rounded(job: TensorJob, merged: torch.Tensor) -> torch.Tensor:
    rounded = merged.to(torch_dtype(job.dtype)).reshape(-1)
    if not is_finite(rounded):
        raise _does_not_fit(job, float(merged.abs().max()))
    return rounded


def _does_not_fit(job: TensorJob, largest: float) -> PairingError:
    return PairingError(
        f"{job.tensor.name}: a value of size {largest:.4g} does not fit the output dtype {job.dtype}. "
        "Set output_dtype to bfloat16 or float32 in the recipe."
    )
