"""The header of one safetensors file: checked reading and deterministic writing. No torch.

A file is: 8 bytes little-endian header length, a JSON header, then the data, where every byte belongs to
exactly one tensor. Reading accepts a file only if all of that holds, so that a truncated download is found
before any work.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mergelab.strict_json import load_object, shown
from mergelab.strides import View

DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "U16": 16,
    "I16": 16,
    "U32": 32,
    "I32": 32,
    "U64": 64,
    "I64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F8_E8M0": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E4M3FNUZ": 8,
    "F16": 16,
    "BF16": 16,
    "F32": 32,
    "F64": 64,
    "C64": 64,
}
"""Bits of one entry for every dtype code of the format."""

MAX_HEADER_BYTES = 100_000_000
"""The limit of the format's own reader."""

MAX_NAME = 1000
MAX_DIMENSIONS = 64
"""numpy and torch handle no more."""

LIMIT = 2**63
"""No file is that long."""

LFS_POINTER = b"version https://git-lfs"


Fetch = Callable[[int, int], bytes]
"""(start, stop) -> these bytes of a file."""


@dataclass(frozen=True)
class TensorHeader:
    """Where one tensor lies: ``path`` from byte ``start`` to byte ``end`` (absolute, end excluded)."""

    name: str
    dtype: str
    """Code of the format: BF16, F16, F32, I64, ..."""
    shape: tuple[int, ...]
    path: Path
    start: int
    end: int
    view: View | None = None
    """Of a part of the tensor at ``start``: which of its entries, and in which order. None: all of them."""
    fetch: Fetch | None = field(default=None, compare=False, repr=False)
    """Of a tensor whose file is not on this machine: gives bytes of the file."""

    @property
    def num_entries(self) -> int:
        """How many numbers the tensor holds; 1 for a scalar, 0 for an empty one."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size of the data on disk."""
        return self.end - self.start if self.view is None else tensor_bytes(self.dtype, self.shape)


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the data size of a tensor, rounded up to whole bytes for the sub-byte codes."""
    return (math.prod(shape) * DTYPE_BITS[dtype] + 7) // 8


def read_headers(path: Path) -> tuple[list[TensorHeader], list[str]]:
    """Read and check the header of one file.

    Returns:
        The tensors in file order, and every problem found, worded without the file name. With a problem the
        list of tensors holds only those that could be read.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                return [], [f"has {size} bytes, a safetensors file starts with an 8-byte header length"]
            length = int.from_bytes(prefix, "little")
            if LFS_POINTER.startswith(prefix):
                return [], ["is a Git LFS pointer, not the weights; fetch them with `git lfs pull`"]
            if length > MAX_HEADER_BYTES:
                return [], [f"states a header of {length} bytes, the format allows {MAX_HEADER_BYTES}"]
            if 8 + length > size:
                return [], [f"states a header of {length} bytes but the file has only {size}: truncated or damaged"]
            raw = file.read(length)
    except OSError as error:
        return [], [f"cannot be read: {error.strerror}"]
    return parse_header(raw, path, size - 8 - length)


def parse_header(raw: bytes, path: Path, data_bytes: int) -> tuple[list[TensorHeader], list[str]]:
    """Check the JSON header of a file whose data part has ``data_bytes`` bytes; see ``read_headers``."""
    try:
        entries = load_object(raw)
    except ValueError as error:
        return [], [f"header is not valid: {error}"]
    base = 8 + len(raw)
    tensors: list[TensorHeader] = []
    problems: list[str] = []
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        problems.append("__metadata__ must map strings to strings")
    for name, entry in entries.items():
        problem = check_name(name) or check_entry(entry)
        if problem:
            problems.append(f"{shown(name)}: {problem}")
            continue
        start, end = entry["data_offsets"]
        tensors.append(TensorHeader(name, entry["dtype"], tuple(entry["shape"]), path, base + start, base + end))
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
    if not problems:
        problems.extend(check_layout(tensors, base, data_bytes))
    return tensors, problems


def check_name(name: str) -> str:
    """Return what is wrong with a tensor's name, or an empty string."""
    if not name or len(name) > MAX_NAME or not name.isprintable():
        return f"expected a tensor name of 1 to {MAX_NAME} printable characters"
    return ""


def check_entry(entry: Any) -> str:
    """Return what is wrong with one tensor's entry, or an empty string."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        return "expected exactly the keys dtype, shape, data_offsets"
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        return f"unknown dtype {shown(dtype)!r}"
    if not isinstance(shape, list) or not all(type(size) is int and 0 <= size < LIMIT for size in shape):
        return f"shape {shown(shape)} is not a list of sizes"
    if len(shape) > MAX_DIMENSIONS:
        return f"has {len(shape)} dimensions, at most {MAX_DIMENSIONS} can be read"
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(offset) is int for offset in offsets):
        return f"data_offsets {shown(offsets)} are not two integers"
    start, end = offsets
    if not 0 <= start <= end < LIMIT:
        return f"data_offsets {shown(offsets)} are not a range"
    expected = tensor_bytes(dtype, shape)
    if end - start != expected:
        return f"{dtype} {tuple(shape)} needs {expected} bytes, data_offsets give {end - start}"
    return ""


def check_layout(tensors: Sequence[TensorHeader], base: int, data_bytes: int) -> list[str]:
    """Return the holes and overlaps between tensors sorted by start, and a wrong file length."""
    problems = []
    position = base
    for tensor in tensors:
        if tensor.start != position:
            what = "leaves a hole before it" if tensor.start > position else "overlaps the tensor before it"
            problems.append(f"{tensor.name}: starts at byte {tensor.start}, {what} (expected {position})")
        position = tensor.end
    if position - base > data_bytes:
        missing = position - base - data_bytes
        problems.append(f"is {missing} bytes too short: the header describes {position - base}, found {data_bytes}")
    elif position - base < data_bytes:
        surplus = data_bytes - (position - base)
        problems.append(f"has {surplus} bytes that no tensor owns")
    return problems


def encode_header(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> tuple[bytes, list[int]]:
    """Encode the header of a file that holds ``tensors`` (name, dtype, shape) in this order.

    The metadata is ``{"format": "pt"}``, as transformers demands. Padding spaces make the data start on a
    multiple of 8 bytes. The same input gives the same bytes.

    Returns:
        The 8-byte length plus the JSON, and the absolute start of every tensor's data.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts = []
    position = 0
    for name, dtype, shape in tensors:
        size = tensor_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}
        starts.append(position)
        position += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, [8 + len(text) + start for start in starts]
