"""Write a new checkpoint folder, whole or not at all; the blocks of its shards may arrive in any order.

The layout is decided before the first byte: names in order, shards filled up to ``shard_bytes``, headers
written first. The same plan gives the same files. transformers reads the result as it reads its own.
"""

from __future__ import annotations

import errno
import json
import os
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from mergelab import atomic
from mergelab.checkpoints.file_bytes import copy_synced, read_at, surroundings, write_at
from mergelab.checkpoints.headers import INDEX_NAME, SINGLE_NAME, is_plain_name
from mergelab.checkpoints.output_folder import check_free_space, check_output_folder
from mergelab.checkpoints.reader import torch_dtype
from mergelab.checkpoints.safetensors_format import DTYPE_BITS, encode_header, tensor_bytes
from mergelab.errors import MachineError
from mergelab.strides import Box, View

MANIFEST = "mergelab.json"
"""What a merge says about itself, beside the weights."""

SPARE_BYTES = 16 << 20
"""Room asked for beyond the tensors: headers, index, config, tokenizer."""


@dataclass(frozen=True)
class TensorPlan:
    """One tensor of the folder to be: dtype is a safetensors code (BF16, F16, F32, I64, ...)."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the data."""
        return tensor_bytes(self.dtype, self.shape)

    @property
    def num_entries(self) -> int:
        """How many numbers the tensor holds."""
        return self.num_bytes * 8 // DTYPE_BITS[self.dtype]


@dataclass(frozen=True)
class Place:
    """Where a tensor goes: the open shard and the byte it starts at."""

    plan: TensorPlan
    shard: int
    start: int


def plan_shards(tensors: Sequence[TensorPlan], shard_bytes: int) -> list[list[TensorPlan]]:
    """Distribute tensors over shards: by name, a new shard when the next tensor would pass ``shard_bytes``.

    A tensor larger than ``shard_bytes`` gets a shard of its own. Within a shard wide dtypes come first, so
    that every tensor starts on a multiple of its entry size.
    """
    shards: list[list[TensorPlan]] = [[]]
    size = 0
    for tensor in sorted(tensors, key=lambda plan: plan.name):
        if shards[-1] and size + tensor.num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.num_bytes
    return [sorted(shard, key=lambda plan: (-DTYPE_BITS[plan.dtype], plan.name)) for shard in shards]


class CheckpointWriter:
    """Context manager that writes one checkpoint folder.

    Leaving the ``with`` block cleanly commits: every entry of every tensor must have been written exactly
    once, then the files are synced and the folder takes its final name. On an exception nothing is left; a
    killed process leaves a ``.partial`` folder beside ``final``, which the same command removes. ``write``
    may be called from several threads.

    Args:
        final: Folder to make; new or empty.
        tensors: All tensors that will be written.
        shard_bytes: Most tensor bytes per file.
        parts: Weights inside fused tensors that will be written by names of their own: name -> the tensor and which
            entries of it. A tensor with parts is written through them alone; together they must be all of it.
        inside: Name of a folder inside ``final`` that gets the weights and the files beside them; "" is ``final``
            itself.

    Raises:
        OutputFolderError: ``final`` holds something.
        MachineError: Not enough disk space (checked first), or the disk filled up later.
        ValueError: The caller's mistake: doubled names, blocks that leave a tensor, overlap or are missing.
    """

    def __init__(
        self,
        final: Path,
        tensors: Sequence[TensorPlan],
        shard_bytes: int = 5_000_000_000,
        parts: Mapping[str, tuple[str, View]] | None = None,
        inside: str = "",
    ) -> None:
        self.final = final.absolute()
        self.inside = inside
        self.shards = plan_shards(tensors, shard_bytes)
        count = len(self.shards)
        self.names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        if count == 1:
            self.names = [SINGLE_NAME]
        self.places: dict[str, Place] = {}
        self.parts = dict(parts or {})
        self.lock = threading.Lock()
        fused = {stored for stored, _ in self.parts.values()}
        names = [plan.name for plan in tensors]
        self.written: dict[str, list[tuple[int, int]]] = {
            name: [] for name in (*names, *self.parts) if name not in fused
        }
        self.files: list[int] = []
        self.stack = ExitStack()
        self.num_bytes = sum(plan.num_bytes for plan in tensors)
        if len({*names, *self.parts}) != len(names) + len(self.parts) or not fused.issubset(names):
            raise ValueError("two tensors of one name, or a part of a tensor that is not there")
        sizes: Counter[str] = Counter()
        for stored, view in self.parts.values():
            sizes[stored] += view.num_entries
        for plan in tensors:
            if plan.name in fused and sizes[plan.name] != plan.num_entries:
                raise ValueError(f"{plan.name}: its parts have {sizes[plan.name]} of {plan.num_entries} entries")
        if shard_bytes < 1:
            raise ValueError(f"shard_bytes must be positive, not {shard_bytes}")
        check_output_folder(self.final)
        # What a killed run left is removed before the first byte is written.
        check_free_space(self.final, self.num_bytes + SPARE_BYTES - atomic.leftover_bytes(self.final))

    def __enter__(self) -> CheckpointWriter:
        check_output_folder(self.final)
        with self.naming_disk_errors(), ExitStack() as stack:
            self.root = stack.enter_context(atomic.new_folder(self.final))
            self.scratch = self.root / self.inside
            self.scratch.mkdir(exist_ok=True)
            stack.callback(self.close)
            for number, shard in enumerate(self.shards):
                self.open_shard(number, shard)
            self.stack = stack.pop_all()
        return self

    def open_shard(self, number: int, shard: Sequence[TensorPlan]) -> None:
        """Create one shard at its full size, with its header."""
        header, starts = encode_header([(plan.name, plan.dtype, plan.shape) for plan in shard])
        for plan, start in zip(shard, starts, strict=True):
            self.places[plan.name] = Place(plan, number, start)
        handle = os.open(self.scratch / self.names[number], os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        self.files.append(handle)
        os.fchmod(handle, 0o644)
        os.ftruncate(handle, len(header) + sum(plan.num_bytes for plan in shard))
        write_at(handle, memoryview(header), 0)

    def write(self, name: str, start_entry: int, flat_block: torch.Tensor) -> None:
        """Write the entries of a block (1-D, the planned dtype, any device) from ``start_entry`` on."""
        stored, view = self.parts.get(name, (name, None))
        place = self.places[stored]
        num_entries = place.plan.num_entries if view is None else view.num_entries
        stop = start_entry + flat_block.numel()
        dtype = torch_dtype(place.plan.dtype)
        if flat_block.ndim != 1 or flat_block.dtype != dtype:
            raise ValueError(f"{name}: expected a flat block of {dtype}, found {flat_block.ndim}-D {flat_block.dtype}")
        if not 0 <= start_entry <= stop <= num_entries:
            raise ValueError(f"{name}: entries {start_entry} to {stop} of {num_entries}")
        if flat_block.numel() == 0:
            return
        flat = flat_block.detach().to("cpu").contiguous()
        with self.naming_disk_errors():
            if view is None:
                self.write_box(place, Box(start_entry, (flat.numel(),), (1,)), flat)
            else:
                # Parts of one tensor may interleave: what one thread reads, no other may write meanwhile.
                with self.lock:
                    used = 0
                    for box in view.pieces(start_entry, stop):
                        self.write_box(place, box, flat[used : used + box.num_entries])
                        used += box.num_entries
        self.written[name].append((start_entry, stop))

    def write_box(self, place: Place, box: Box, flat: torch.Tensor) -> None:
        """Write the entries of a box; those of other parts between them keep their values."""
        entry_bytes = DTYPE_BITS[place.plan.dtype] // 8
        handle, position = self.files[place.shard], place.start + box.offset * entry_bytes
        if box.is_run:
            write_at(handle, flat.view(torch.uint8).numpy().data, position)
            return
        covered = torch.frombuffer(read_at(handle, box.span * entry_bytes, position), dtype=flat.dtype)
        torch.as_strided(covered, box.sizes, box.strides).copy_(flat.view(box.sizes))
        write_at(handle, covered.view(torch.uint8).numpy().data, position, finished=False)

    def add_file(self, name: str, content: bytes) -> None:
        """Add a file beside the weights (config, tokenizer, manifest)."""
        with self.naming_disk_errors():
            atomic.write_bytes(self.new_path(name), content)

    def copy_file(self, path: Path, name: str | None = None) -> None:
        """Copy a file beside the weights, byte for byte, following links."""
        target = self.new_path(path.name if name is None else name)
        with self.naming_disk_errors():
            copy_synced(path, target)

    def copy_repository(self, repository: Path, changed: Mapping[str, bytes]) -> None:
        """Copy what surrounds the folder that is written inside ``final``: all files and folders beside it.

        Args:
            repository: The folder that is copied.
            changed: Name -> other content of files right in it.

        Raises:
            DamagedFileError: There is something else than files and folders, for example a link to a folder.
            MachineError: The disk is too small for them.
        """
        if not self.inside:
            raise ValueError("only a writer inside a larger folder has surroundings to copy")
        files = surroundings(repository, self.inside, (atomic.LOCK, MANIFEST))
        # The shards were made at their full size, but take no room before they are written.
        check_free_space(self.final, self.num_bytes + sum(path.stat().st_size for path in files) + SPARE_BYTES)
        with self.naming_disk_errors():
            for path in files:
                target = self.root / path.relative_to(repository)
                target.parent.mkdir(parents=True, exist_ok=True)
                if path.parent == repository and path.name in changed:
                    atomic.write_bytes(target, changed[path.name])
                else:
                    copy_synced(path, target)

    def new_path(self, name: str) -> Path:
        """Return where a further file goes; weight files and doubled names are the caller's mistake."""
        path = self.scratch / name
        if not is_plain_name(name) or name == INDEX_NAME or path.exists():
            raise ValueError(f"{name!r} cannot be added: not a plain new file name")
        return path

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.naming_disk_errors():
            if error is not None:
                self.stack.__exit__(kind, error, trace)
                return
            with self.stack:
                self.check_complete()
                for handle in self.files:
                    os.fsync(handle)
                if len(self.shards) > 1:
                    atomic.write_bytes(self.scratch / INDEX_NAME, self.index())

    def check_complete(self) -> None:
        """Raise ValueError unless the blocks written tile every tensor exactly."""
        problems = []
        for name, blocks in self.written.items():
            expected = self.parts[name][1].num_entries if name in self.parts else self.places[name].plan.num_entries
            position = 0
            for start, stop in sorted(blocks):
                if start != position:
                    break
                position = stop
            if position != expected:
                problems.append(f"{name} at entry {position} of {expected}")
        if problems:
            raise ValueError(f"{len(problems)} tensors have gaps or doubled blocks: {', '.join(problems[:5])}")

    def index(self) -> bytes:
        """Return the content of ``model.safetensors.index.json``."""
        weight_map = {name: self.names[self.places[name].shard] for name in sorted(self.places)}
        value = {"metadata": {"total_size": self.num_bytes}, "weight_map": weight_map}
        return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode("utf-8")

    def close(self) -> None:
        """Close the shards."""
        while self.files:
            os.close(self.files.pop())

    @contextmanager
    def naming_disk_errors(self) -> Iterator[None]:
        """Turn a full or broken disk into a MachineError that names the folder."""
        try:
            yield
        except OSError as error:
            if error.errno not in (
                errno.ENOSPC,
                errno.EFBIG,
                errno.EDQUOT,
                errno.EIO,
                errno.EROFS,
                errno.EACCES,
                errno.EPERM,
            ):
                raise
            raise MachineError(
                f"{self.final}: cannot be written: {error.strerror}. Nothing was left; give another --out."
            ) from error
