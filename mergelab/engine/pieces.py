"""A merge cut into pieces that are read, computed and written one by one, and spans that are computed at once."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from mergelab.engine.geometry import DOT_ENTRIES
from mergelab.engine.plan import Operation, TensorJob
from merges.parameters import Ties

SPAN_ENTRIES = DOT_ENTRIES
"""Entries computed at once on a CPU: 1 MiB of float32, so that the temporaries of a merge stay in the cache.

The inner products in a record are added up span by span, so this number is part of their last digits; the size of
the blocks and the number of threads are not.
"""

DEVICE_SPAN_ENTRIES = 1 << 22
"""The same on an accelerator, where large kernels are the fast ones."""


@dataclass(frozen=True, slots=True)
class Span:
    """Part of a piece, as offsets into it: the entries to write, and those of them that are merged.

    ``low..high`` counts the merged entries of the piece; both ranges are equal but where rows are copied.
    """

    start: int
    stop: int
    low: int
    high: int


@dataclass(frozen=True)
class Piece:
    """Part of one tensor: the output entries ``start..stop`` and the rows among them that are merged.

    ``rows`` is None where all entries are merged. Otherwise it indexes the tensor's row map, and the other rows
    are the vlm's own.
    """

    job: TensorJob
    start: int
    stop: int
    span_entries: int
    """0 computes the piece as a whole."""
    rows: range | None = None

    @property
    def width(self) -> int:
        """Entries of a row, where rows are paired; 1 of a bias."""
        return math.prod(self.job.tensor.shape[1:])

    @property
    def num_merged(self) -> int:
        """How many entries are merged."""
        return self.stop - self.start if self.rows is None else len(self.rows) * self.width

    @property
    def first_merged(self) -> int:
        """The flat index of the first merged entry, as the method sees it: rows of the vlm alone do not count."""
        return self.start if self.rows is None else self.rows.start * self.width

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the merged entries of a whole tensor."""
        shape = tuple(self.job.tensor.shape)
        return shape if self.rows is None else (len(self.rows), *shape[1:])

    @property
    def spans(self) -> tuple[Span, ...]:
        """The spans of the piece, in order; their cuts do not depend on those of the pieces."""
        total = self.stop - self.start
        if not self.span_entries or total == 0:
            return (Span(0, total, 0, self.num_merged),)
        if self.rows is None:
            cuts = [*range(0, total, self.span_entries), total]
            return tuple(Span(low, high, low, high) for low, high in pairwise(cuts))
        assert self.job.tensor.rows is not None
        width = self.width
        merged = self.job.tensor.rows.rows["vlm"][self.rows.start : self.rows.stop]
        step = width * max(1, self.span_entries // max(1, width))
        cuts = [*range(0, total, step), total]
        lows = [bisect_left(merged, (self.start + cut) // width) * width for cut in cuts]
        both = zip(pairwise(cuts), pairwise(lows), strict=True)
        return tuple(Span(start, stop, low, high) for (start, stop), (low, high) in both)


def is_surveyed(operation: Operation) -> bool:
    """True if the method needs to know a whole tensor, but no more of it than ``merges.surveyor`` counts in slices."""
    return isinstance(operation.parameters, Ties) and operation.parameters.scope == "tensor"


def pieces_of(job: TensorJob, operation: Operation, span_entries: int, block_entries: int) -> Iterator[Piece]:
    """Yield the pieces of one tensor: whole where the method needs that, else blocks of whole spans."""
    tensor, num_entries = job.tensor, job.num_entries
    whole = operation.whole_tensors
    if whole and not is_surveyed(operation):
        span_entries = 0
    if tensor.rows is None:
        step = num_entries if whole else max(1, block_entries // span_entries) * span_entries
        for start in range(0, num_entries, max(1, step)):
            yield Piece(job, start, min(start + step, num_entries), span_entries)
        if num_entries == 0:
            yield Piece(job, 0, 0, span_entries)
        return
    num_rows, width = tensor.shape[0], math.prod(tensor.shape[1:])
    span_rows = max(1, span_entries // max(1, width))
    height = num_rows if whole else max(1, block_entries // max(1, width * span_rows)) * span_rows
    shared = tensor.rows.rows["vlm"]
    first = 0
    for top in range(0, num_rows, max(1, height)):
        bottom = min(top + height, num_rows)
        last = bisect_left(shared, bottom)
        yield Piece(job, top * width, bottom * width, span_entries, range(first, last))
        first = last
