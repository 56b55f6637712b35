"""Tensor bytes from disk into memory: a whole tensor, or a flat range of its entries."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from mergelab.checkpoints.safetensors_format import DTYPE_BITS, TensorHeader
from mergelab.errors import DamagedFileError
from mergelab.strides import Box

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""Dtype codes of safetensors files and their torch dtypes."""

DTYPE_CODES: dict[torch.dtype, str] = {dtype: code for code, dtype in TORCH_DTYPES.items()}
"""The other way round."""


def torch_dtype(code: str) -> torch.dtype:
    """Return the torch dtype of a safetensors dtype code.

    Raises:
        DamagedFileError: torch has no such dtype (sub-byte codes).
    """
    if code not in TORCH_DTYPES:
        raise DamagedFileError(f"dtype {code} cannot be read: expected one of {', '.join(TORCH_DTYPES)}.")
    return TORCH_DTYPES[code]


def read_tensor(header: TensorHeader) -> torch.Tensor:
    """Read a whole tensor: its stored dtype and shape, on the CPU, in memory of its own.

    Raises:
        DamagedFileError: The file changed since its header was checked.
    """
    return read_entries(header, 0, header.num_entries).reshape(header.shape)


def read_entries(header: TensorHeader, start: int, stop: int) -> torch.Tensor:
    """Read entries ``start`` to ``stop`` (excluded) of the flattened tensor.

    Returns:
        Shape (stop - start,), stored dtype, on the CPU; empty when ``start == stop``.

    Raises:
        ValueError: The range leaves the tensor.
        DamagedFileError: The file changed since its header was checked.
    """
    if not 0 <= start <= stop <= header.num_entries:
        raise ValueError(f"{header.name}: entries {start} to {stop} of {header.num_entries}")
    dtype = torch_dtype(header.dtype)
    if start == stop:
        return torch.empty(0, dtype=dtype)
    if header.view is not None:
        return read_boxes(header, header.view.pieces(start, stop), dtype)
    entry_bytes = DTYPE_BITS[header.dtype] // 8
    entries = torch.empty(stop - start, dtype=dtype)
    read_into(header, header.start + start * entry_bytes, entries.view(torch.uint8).numpy().data)
    return entries


def read_boxes(header: TensorHeader, boxes: Iterable[Box], dtype: torch.dtype) -> torch.Tensor:
    """Read strided entries, flat; of every box, what lies between its entries is read as well."""
    entry_bytes = DTYPE_BITS[header.dtype] // 8
    found = []
    for box in boxes:
        buffer = bytearray(box.span * entry_bytes)
        read_into(header, header.start + box.offset * entry_bytes, memoryview(buffer))
        covered = torch.frombuffer(buffer, dtype=dtype)
        found.append(torch.as_strided(covered, box.sizes, box.strides).reshape(-1))
    return torch.cat(found) if len(found) != 1 else found[0].clone()


def read_into(header: TensorHeader, position: int, view: memoryview) -> None:
    """Fill ``view`` from byte ``position`` of the tensor's file."""
    if header.fetch is not None:
        view[:] = header.fetch(position, position + len(view))
        return
    try:
        with header.path.open("rb", buffering=0) as file:
            file.seek(position)
            while len(view):
                # One call reads 2 GiB at most, so large tensors need several.
                count = file.readinto(view)
                if not count:
                    raise DamagedFileError(
                        f"{header.path}: ended while {header.name} was read. The file changed; get it again."
                    )
                view = view[count:]
    except OSError as error:
        raise DamagedFileError(
            f"{header.path}: {header.name} cannot be read: {error.strerror}. Was the file moved?"
        ) from error
