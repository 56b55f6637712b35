"""Views: some entries of a tensor in an order of their own, as sizes and strides. No torch.

A fused tensor holds several weights: rows of q, k and v below each other, or every expert of a layer. One such weight
is a view of the stored tensor, and reading, writing and merging it needs no copy of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

MIN_RUN = 4096
"""Entries that follow each other on disk are worth a read or write of their own from this many on."""


@dataclass(frozen=True)
class Box:
    """Entries ``offset + sum(index * stride)`` of a flattened tensor, for every index below ``sizes``."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def num_entries(self) -> int:
        """How many entries there are."""
        return math.prod(self.sizes)

    @property
    def span(self) -> int:
        """Entries from the first to the last, both included; those of other views between them count."""
        if 0 in self.sizes:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))

    @property
    def is_run(self) -> bool:
        """True if nothing lies between the entries and they follow each other."""
        return self.span == self.num_entries and tuple(sorted(self.strides, reverse=True)) == self.strides

    def pieces(self) -> Iterator[Box]:
        """Yield boxes that together are this one, in order: long runs that lie apart come one by one."""
        if len(self.sizes) > 1 and self.sizes[0] > 1 and not self.is_run:
            inner = Box(self.offset, self.sizes[1:], self.strides[1:])
            if inner.span >= MIN_RUN and self.strides[0] >= inner.span:
                for index in range(self.sizes[0]):
                    yield from Box(self.offset + index * self.strides[0], inner.sizes, inner.strides).pieces()
                return
        yield self


@dataclass(frozen=True)
class View:
    """A weight inside a stored tensor.

    ``sizes`` and ``strides`` (in entries, positive) say where its entries lie; flattened in this order they are the
    flattened weight of ``shape``.
    """

    shape: tuple[int, ...]
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def num_entries(self) -> int:
        """How many numbers the weight has."""
        return math.prod(self.shape)

    @property
    def whole(self) -> Box:
        """All entries."""
        return Box(self.offset, self.sizes, self.strides)

    def boxes(self, start: int, stop: int) -> Iterator[Box]:
        """Yield boxes that together are the entries ``start..stop`` of the flattened weight, in order."""
        yield from _boxes(self.offset, self.sizes, self.strides, start, stop)

    def pieces(self, start: int, stop: int) -> Iterator[Box]:
        """Yield the same entries as boxes to read or write one by one (``Box.pieces``)."""
        for box in self.boxes(start, stop):
            yield from box.pieces()


def rows_of(shape: tuple[int, ...], first: int, count: int) -> View:
    """Return rows ``first .. first + count`` of a stored tensor."""
    width = math.prod(shape[1:])
    return View((count, *shape[1:]), first * width, (count * width,), (1,))


def _boxes(offset: int, sizes: tuple[int, ...], strides: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    if start >= stop:
        return
    if len(sizes) <= 1:
        stride = strides[0] if strides else 1
        yield Box(offset + start * stride, (stop - start,), (stride,))
        return
    inner = math.prod(sizes[1:])
    first, last = -(-start // inner), stop // inner
    if first > last:  # within one index of the outermost size
        shift = last * inner
        yield from _boxes(offset + last * strides[0], sizes[1:], strides[1:], start - shift, stop - shift)
        return
    if start < first * inner:
        head = first - 1
        yield from _boxes(offset + head * strides[0], sizes[1:], strides[1:], start - head * inner, inner)
    if first < last:
        yield Box(offset + first * strides[0], (last - first, *sizes[1:]), strides)
    if last * inner < stop:
        yield from _boxes(offset + last * strides[0], sizes[1:], strides[1:], 0, stop - last * inner)
