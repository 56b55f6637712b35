"""Where the tensors of a pickled weight file lie, without running what a pickle could run.

The file's list of tensors is read by torch's weights-only unpickler, which builds tensors and plain containers and
nothing else, and without their data; the data then lies uncompressed in the file and is read like any other.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

from mergelab.checkpoints.safetensors_format import TensorHeader

CONVERT = "convert it to safetensors"


def read_pickled_headers(path: Path) -> tuple[list[TensorHeader], list[str]]:
    """Read and check what ``torch.save`` wrote.

    Returns:
        The tensors in file order, and every problem found, worded without the file name, as
        ``safetensors_format.read_headers`` does. Refused are the format from before torch 1.6, compressed files,
        anything that is not a flat mapping of names to tensors, and tensors whose entries do not lie in order.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from mergelab.checkpoints.reader import DTYPE_CODES

    try:
        with zipfile.ZipFile(path) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                return [], [f"compressed weights; {CONVERT}"]
        with FakeTensorMode():
            content = torch.load(path, weights_only=True)
    except zipfile.BadZipFile:
        return [], [f"damaged or truncated, or in the format from before torch 1.6; get it again or {CONVERT}"]
    except Exception as error:  # unpickling foreign bytes raises nearly anything
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return [], [f"torch's weights-only loading refuses it ({reason[:120]}); {CONVERT}"]
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        return [], [f"expected a mapping of names to tensors, found {type(content).__name__}; {CONVERT}"]
    size = path.stat().st_size
    headers: list[TensorHeader] = []
    problems: list[str] = []
    for name, tensor in content.items():
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            problems.append(f"{name}: expected a tensor, found {type(tensor).__name__}; {CONVERT}")
            continue
        offset = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
        if offset is None or not tensor.is_contiguous() or tensor.dtype not in DTYPE_CODES:
            problems.append(f"{name}: its entries do not lie in order, or their place is not known; {CONVERT}")
            continue
        start = offset + tensor.storage_offset() * tensor.element_size()
        end = start + tensor.numel() * tensor.element_size()
        if end > size:
            problems.append(f"{name}: ends at byte {end} of {size}; the file is truncated, get it again")
            continue
        headers.append(TensorHeader(name, DTYPE_CODES[tensor.dtype], tuple(tensor.shape), path, start, end))
    return headers, problems
