"""Where the tensors of a pickled weight file lie, without running what a pickle could run.

The file's list of tensors is read by torch's weights-only unpickler, which builds tensors and plain containers and
nothing else, and without their data; the data then lies uncompressed in the file and is read like any other.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mergelab.checkpoints.safetensors_format import TensorHeader, check_name
from mergelab.errors import MachineError
from mergelab.strict_json import shown

CONVERT = "convert it to safetensors"

PLACE = "_checkpoint_offset"
"""What torch calls the place of a storage's data; private, checked by a test and against the archive."""


LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Signature, and the lengths of name and extra field, of what stands before a file's data in an archive."""


def read_pickled_headers(path: Path) -> tuple[list[TensorHeader], list[str]]:
    """Read and check what ``torch.save`` wrote.

    torch says where a tensor's data lies, through a mode and an attribute that it does not promise to keep; the
    archive itself says so too, and both must agree.

    Returns:
        The tensors in file order, and every problem found, worded without the file name, as
        ``safetensors_format.read_headers`` does. Refused are the format from before torch 1.6, compressed files,
        anything that is not a flat mapping of names to tensors, and tensors whose entries do not lie in order.

    Raises:
        MachineError: This torch no longer says where data lies.
    """
    try:
        records = stored_records(path)
        content = load_without_data(path)
    except zipfile.BadZipFile:
        return [], [f"damaged or truncated, or in the format from before torch 1.6; get it again or {CONVERT}"]
    except MachineError:
        raise
    except Exception as error:  # unpickling foreign bytes raises nearly anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return [], [f"torch's weights-only loading refuses it ({shown(reason[:120])}); {CONVERT}"]
    if records is None:
        return [], [f"compressed weights; {CONVERT}"]
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        return [], [f"expected a mapping of names to tensors, found {type(content).__name__}; {CONVERT}"]
    headers: list[TensorHeader] = []
    problems: list[str] = []
    for name, tensor in content.items():
        header, problem = place_of(name, tensor, path, records)
        if header is None:
            problems.append(f"{shown(name)}: {problem}")
        else:
            headers.append(header)
    return headers, problems


def stored_records(path: Path) -> dict[int, int] | None:
    """Return start -> end of every file's data in the archive, or None if some are compressed.

    Raises:
        zipfile.BadZipFile: The archive's own books do not agree with its content.
    """
    records = {}
    size = path.stat().st_size
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
                return None
            file.seek(entry.header_offset)
            raw = file.read(LOCAL_HEADER.size)
            if len(raw) < LOCAL_HEADER.size or raw[:4] != b"PK\x03\x04":
                raise zipfile.BadZipFile(f"no data of {entry.filename}")
            _, name_length, extra_length = LOCAL_HEADER.unpack(raw)
            start = entry.header_offset + LOCAL_HEADER.size + name_length + extra_length
            if start + entry.file_size > size:
                raise zipfile.BadZipFile(f"data of {entry.filename} ends behind the file")
            records[start] = start + entry.file_size
    return records


def load_without_data(path: Path) -> Any:
    """Return what the file holds, its tensors without data but with the place of it."""
    import torch

    try:
        from torch._subclasses.fake_tensor import FakeTensorMode
    except ImportError as error:
        raise MachineError(without_places()) from error
    with FakeTensorMode():
        return torch.load(path, weights_only=True)


def without_places() -> str:
    """Word the refusal of a torch that does not say where a tensor's data lies."""
    import torch

    return (
        f"torch {torch.__version__} does not say where the data of a .bin file lies, as torch 2.6 to 2.13 do. "
        f"Install such a torch, or {CONVERT}."
    )


def place_of(name: str, tensor: Any, path: Path, records: Mapping[int, int]) -> tuple[TensorHeader | None, str]:
    """Return where one tensor lies, or None and what is wrong with it."""
    import torch

    from mergelab.checkpoints.reader import DTYPE_CODES

    if problem := check_name(name):
        return None, problem
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        return None, f"expected a tensor, found {type(tensor).__name__}; {CONVERT}"
    offset = getattr(tensor.untyped_storage(), PLACE, None)
    if offset is None:
        raise MachineError(f"{path}: {without_places()}")
    if not tensor.is_contiguous() or tensor.dtype not in DTYPE_CODES:
        return None, f"its entries do not lie in order, or have a dtype that is not read; {CONVERT}"
    start = offset + tensor.storage_offset() * tensor.element_size()
    end = start + tensor.numel() * tensor.element_size()
    if not offset <= start <= end <= records.get(offset, -1):
        return None, f"bytes {start} to {end} are not in one record of the file; it is damaged, get it again"
    return TensorHeader(name, DTYPE_CODES[tensor.dtype], tuple(tensor.shape), path, start, end), ""
