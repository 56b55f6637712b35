"""The input checkpoints of a pair as the engine reads them: blocks by role and stored name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mergelab.checkpoints.headers import Checkpoint, TensorHeader
from mergelab.checkpoints.reader import read_entries, torch_dtype
from mergelab.errors import PairingError

KEEP_SHARE_OF_FREE_MEMORY = 0.5
"""A sweep keeps its inputs in memory when they take at most this share of what is free; else it re-reads."""


def free_memory_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return the memory this process could still take without swapping, by the kernel's own estimate.

    The file cache counts as free: it holds the very checkpoints that were just fingerprinted. 0 on a platform
    without the figure.
    """
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
    except OSError:  # keep nothing rather than guess
        return 0
    return int(found[1]) * 1024 if found else 0


@dataclass
class Inputs:
    """Reads entries of the input tensors: in their stored dtype on the CPU, or in float32 on ``device``.

    For ``mps`` the device is the CPU.

    With ``keep`` a tensor is read from disk once in its stored dtype and served from memory afterwards, as long as
    all inputs together fit (``KEEP_SHARE_OF_FREE_MEMORY``).
    """

    checkpoints: Mapping[str, Checkpoint]
    device: str = "cpu"
    keep: bool = False
    _kept: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.device.startswith("mps"):  # it has no float64, which norms and matrix methods compute in
            self.device = "cpu"
        if self.keep:
            headers = (header for checkpoint in self.checkpoints.values() for header in checkpoint.tensors.values())
            total = sum(header.end - header.start for header in headers)
            self.keep = total <= KEEP_SHARE_OF_FREE_MEMORY * free_memory_bytes()

    def header(self, role: str, stored: str) -> TensorHeader:
        """Return where a tensor of the model ``role`` lies."""
        return self.checkpoints[role].header(stored)

    def entries(self, role: str, stored: str, start: int, stop: int) -> torch.Tensor:
        """Return entries ``start..stop`` of the flattened tensor, in its stored dtype, on the CPU."""
        header = self.header(role, stored)
        if not self.keep:
            return read_entries(header, start, stop)
        if (role, stored) not in self._kept:
            self._kept[role, stored] = read_entries(header, 0, header.num_entries)
        return self._kept[role, stored][start:stop]

    def float_entries(self, role: str, stored: str, start: int, stop: int) -> torch.Tensor:
        """Return entries ``start..stop`` as float32 on the device.

        Whether they are finite is checked by the merge that takes them.

        Raises:
            PairingError: The tensor is not floating point; the message names it.
        """
        self.check_float(role, stored)
        return self.entries(role, stored, start, stop).to(self.device, torch.float32)

    def check_float(self, role: str, stored: str) -> None:
        """Raise PairingError, which names the tensor, unless it is floating point."""
        header = self.header(role, stored)
        dtype = torch_dtype(header.dtype)
        if not dtype.is_floating_point:
            raise PairingError(
                f"{header.path}: {stored} is {dtype}; only floating-point tensors merge. "
                f"Use the unquantised checkpoint of {role}."
            )

    def float_rows(self, role: str, stored: str, rows: Sequence[int], width: int) -> torch.Tensor:
        """Return the given rows of a matrix, (len(rows), width), float32 on the device.

        Vocabularies agree in long runs, and each run of consecutive rows is read at once.
        """
        self.check_float(role, stored)
        return self.rows(role, stored, rows, width).to(self.device, torch.float32).view(-1, width)

    def rows(self, role: str, stored: str, rows: Sequence[int], width: int) -> torch.Tensor:
        """Return the entries of the given rows of a matrix, flat, in its stored dtype, on the CPU."""
        runs = [self.entries(role, stored, low * width, high * width) for low, high in consecutive_runs(rows)]
        if len(runs) == 1:
            return runs[0]
        return torch.cat(runs) if runs else torch.empty(0, dtype=torch_dtype(self.header(role, stored).dtype))


def consecutive_runs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, last + 1) of every stretch of rows that follow each other."""
    if not rows:
        return
    first = previous = rows[0]
    for row in rows[1:]:
        if row != previous + 1:
            yield first, previous + 1
            first = row
        previous = row
    yield first, previous + 1
