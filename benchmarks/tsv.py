"""How much faster ``merges.tsv`` merges two task matrices than the textbook form of TSV-M, in one run.

The textbook form is full SVDs of each task matrix and polar factors by SVDs of the concatenated singular
vectors, as the authors compute it (in float32), and the same in float64, which is the precision of ours.

Run by hand: OMP_NUM_THREADS=1 python benchmarks/tsv.py [rows columns]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from merges.tsv import merge_matrices


def textbook(vectors: Sequence[Tensor]) -> Tensor:
    rank = min(vectors[0].shape) // len(vectors)
    parts = [torch.linalg.svd(vector, full_matrices=False) for vector in vectors]
    left = torch.cat([u[:, :rank] for u, _, _ in parts], dim=1)
    values = torch.cat([s[:rank] for _, s, _ in parts])
    right = torch.cat([v[:rank] for _, _, v in parts])
    a, _, b = torch.linalg.svd(left, full_matrices=False)
    c, _, d = torch.linalg.svd(right, full_matrices=False)
    return (a @ b) @ torch.diag(values) @ (c @ d)


def timed(times: int, work: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """Return the least processor seconds of some calls, and the result of the last."""
    seconds = []
    for _ in range(times):
        begin = time.process_time()
        result = work()
        seconds.append(time.process_time() - begin)
    return min(seconds), result


def main(shapes: Sequence[tuple[int, int]]) -> None:
    print(f"two task matrices, cosine about .8, {torch.get_num_threads()} thread(s), processor time")
    for rows, columns in shapes:
        torch.manual_seed(0)
        shared, own = torch.randn(rows, columns), torch.randn(2, rows, columns)
        vectors = [shared + 0.5 * part for part in own]
        doubles = [vector.double() for vector in vectors]
        times = 3 if rows * columns < 4e6 else 1
        ours, found = timed(times, lambda doubles=doubles: merge_matrices(doubles))
        single, by_single = timed(times, lambda vectors=vectors: textbook(vectors))
        double, reference = timed(times, lambda doubles=doubles: textbook(doubles))
        error, error_single = (float((x.double() - reference).norm() / reference.norm()) for x in (found, by_single))
        print(
            f"{rows} x {columns}, best of {times}: ours {ours * 1e3:.0f} ms (error {error:.0e}); "
            f"textbook float32 {single / ours:.1f} x (error {error_single:.0e}), "
            f"float64 {double / ours:.1f} x"
        )


if __name__ == "__main__":
    given = [int(text) for text in sys.argv[1:]]
    main([(given[0], given[1])] if given else [(576, 576), (192, 576), (1536, 576), (1536, 1536)])
