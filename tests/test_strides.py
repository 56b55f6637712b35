"""Views against numpy: every range of every view reads the entries that indexing gives, in long runs if it can."""

import itertools

import numpy as np
import pytest

from mergelab.strides import MIN_RUN, Box, View, rows_of

VIEWS = {
    "rows": (rows_of((7, 3), 2, 4), lambda whole: whole[:21].reshape(7, 3)[2:6]),
    "rows of a vector": (rows_of((7,), 2, 4), lambda whole: whole[2:6]),
    "transposed": (View((4, 3), 12, (4, 3), (1, 4)), lambda whole: whole[12:24].reshape(3, 4).T),
    "interleaved": (View((4, 3), 3, (4, 3), (6, 1)), lambda whole: whole[:24].reshape(4, 2, 3)[:, 1]),
    "transposed and interleaved": (View((2, 3), 1, (2, 3), (2, 4)), lambda whole: whole[:12].reshape(3, 4).T[1::2]),
    "grouped": (View((8, 2), 0, (2, 8), (12, 1)), lambda whole: whole[:24].reshape(2, 6, 2)[:, :4].reshape(8, 2)),
    "three sizes": (View((2, 3, 2), 1, (2, 3, 2), (12, 4, 2)), lambda w: w[1:25].reshape(2, 3, 2, 2)[:, :, :, 0]),
}


def entries(whole: np.ndarray, box: Box) -> list[int]:
    offsets = itertools.product(*(range(size) for size in box.sizes))
    return [int(whole[box.offset + sum(i * s for i, s in zip(at, box.strides, strict=True))]) for at in offsets]


@pytest.mark.parametrize("name", VIEWS)
def test_every_range_of_a_view_is_what_indexing_gives(name: str) -> None:
    view, index = VIEWS[name]
    whole = np.arange(30)
    expected = index(whole)
    assert expected.shape == view.shape
    flat = expected.reshape(-1).tolist()
    for start in range(len(flat) + 1):
        for stop in range(start, len(flat) + 1):
            boxes = [*view.boxes(start, stop)]
            assert [entry for box in boxes for entry in entries(whole, box)] == flat[start:stop]
            pieces = [piece for box in boxes for piece in box.pieces()]
            assert [entry for box in pieces for entry in entries(whole, box)] == flat[start:stop]
    assert view.whole.span == int(expected.max() - expected.min()) + 1


def test_long_runs_come_one_by_one_and_short_ones_together() -> None:
    grouped = View((8 * MIN_RUN,), 0, (2, 4 * MIN_RUN), (6 * MIN_RUN, 1))
    assert [(box.offset, box.span, box.is_run) for box in grouped.whole.pieces()] == [
        (0, 4 * MIN_RUN, True), (6 * MIN_RUN, 4 * MIN_RUN, True),
    ]  # fmt: skip
    transposed = View((MIN_RUN, 2), 0, (MIN_RUN, 2), (1, MIN_RUN))
    assert [*transposed.whole.pieces()] == [transposed.whole]
    assert not transposed.whole.is_run
