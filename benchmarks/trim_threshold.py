"""How much faster ``merges.trim.trim_mask`` is than torch.topk on one big task vector, in one process.

Run by hand: OMP_NUM_THREADS=1 python benchmarks/trim_threshold.py [entries] [density]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from merges.trim import kept_count, trim_mask


def by_topk(delta: Tensor, density: float, sort: bool) -> Tensor:
    mask = torch.zeros(delta.numel(), dtype=torch.bool)
    mask[torch.topk(delta.abs().flatten(), kept_count(delta.numel(), density), sorted=sort).indices] = True
    return mask.view(delta.shape)


def by_kthvalue(delta: Tensor, density: float) -> Tensor:
    rank = delta.numel() - kept_count(delta.numel(), density) + 1
    return delta.abs() >= torch.kthvalue(delta.abs().flatten(), rank).values


def best_of(times: int, work: Callable[[], Tensor]) -> float:
    seconds = []
    for _ in range(times):
        begin = time.process_time()
        work()
        seconds.append(time.process_time() - begin)
    return min(seconds)


def main(num_entries: int = 11_534_336, density: float = 0.2) -> None:
    torch.manual_seed(0)
    weights = torch.randn(num_entries) * 0.02
    inputs = {
        "float32 normal": torch.randn(num_entries) * 1e-3,
        "bf16 deltas (mass ties)": (weights + torch.randn(num_entries) * 1e-3).bfloat16().float()
        - weights.bfloat16().float(),
    }
    print(f"{num_entries} entries, density {density}, {torch.get_num_threads()} thread(s), best of 3")
    for name, delta in inputs.items():
        ours = best_of(3, lambda delta=delta: trim_mask(delta, density))
        others = {
            "topk": best_of(3, lambda delta=delta: by_topk(delta, density, sort=True)),
            "topk unsorted": best_of(3, lambda delta=delta: by_topk(delta, density, sort=False)),
            "kthvalue": best_of(3, lambda delta=delta: by_kthvalue(delta, density)),
        }
        print(f"{name}: trim_mask {ours * 1e3:.0f} ms")
        for other, seconds in others.items():
            print(f"  {other:14} {seconds * 1e3:6.0f} ms   {seconds / ours:5.1f} x")


if __name__ == "__main__":
    main(*(kind(text) for kind, text in zip((int, float), sys.argv[1:], strict=False)))
