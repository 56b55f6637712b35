"""Write one merge as a checkpoint that ``from_pretrained`` loads: the vlm with a new tower, or the tower alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mergelab import atomic
from mergelab.checkpoints.headers import TOWER_FOLDER, Checkpoint, is_plain_name
from mergelab.checkpoints.reader import read_entries, torch_dtype
from mergelab.checkpoints.safetensors_format import DTYPE_BITS, TensorHeader
from mergelab.checkpoints.writer import MANIFEST, CheckpointWriter, TensorPlan
from mergelab.engine.deltas import UnscaledDeltas
from mergelab.engine.inputs import Inputs
from mergelab.engine.outlets import outlets
from mergelab.engine.pipeline import Gate, Stages, overlap
from mergelab.engine.plan import BLOCK_ENTRIES, Operation, TensorJob
from mergelab.engine.statistics import MergeStatistics
from mergelab.engine.stream import LIMIT_BYTES, Progress, stream
from mergelab.engine.targets import ShardTarget, TextTarget
from mergelab.errors import DamagedFileError
from mergelab.strict_json import read_object, shown
from mergelab.strides import View
from mergelab.towers.layouts import repaired
from mergelab.towers.pairing import Pairing

WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")
TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
"""What a text export takes from base: tokenizer, template and generation settings."""

DTYPE_KEYS = {"dtype": "", "torch_dtype": "", "model_dtype": "torch."}
"""Keys of a config that name a dtype, and what stands before the name there (VILA: ``torch.bfloat16``)."""

DEFAULT_SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class Export:
    """A merge ready to be written: the jobs, what fills them, and the models they come from."""

    jobs: Sequence[TensorJob]
    operation: Operation
    inputs: Inputs
    pairing: Pairing
    deltas: UnscaledDeltas | None = None
    """What the sweep that this merge belongs to has decomposed already."""

    @property
    def vlm(self) -> Checkpoint:
        """The checkpoint whose layout is written."""
        return self.inputs.checkpoints["vlm"]


def export_vlm(
    export: Export, out: Path, manifest: Mapping[str, Any], dtype: str = "auto", progress: Progress | None = None
) -> MergeStatistics:
    """Write the vlm with its tower replaced: names, layout, tying, tokenizer and all side files are the vlm's.

    Of a vlm that keeps its tower in a folder of its own the whole repository is written, with that folder replaced.
    Names that transformers 5.4 or 5.5 corrupted are written as they were before, or no class would load them.

    Args:
        export: What to write.
        out: The folder to appear; it must not exist or be empty.
        manifest: Goes into ``mergelab.json`` beside the weights, with the statistics of the merge added.
        dtype: The recipe's output dtype; a forced one is also written into the config.
        progress: Called with entries done and entries in all.

    Raises:
        OutputFolderError: ``out`` holds something else.
        MachineError: The disk is too small.
        DamagedFileError: A file of the vlm has a name that cannot be written.
    """
    vlm = export.vlm
    side_files = _side_files(vlm.folder)
    by_stored = {job.tensor.stored["vlm"]: job for job in export.jobs}
    parts = _parts(export)
    dtypes = {parts[name][0] if name in parts else name: job.dtype for name, job in by_stored.items()}
    plans = [
        TensorPlan(repaired(name), dtypes.get(name, header.dtype), header.shape) for name, header in vlm.tensors.items()
    ]
    places = {repaired(name): (repaired(stored), view) for name, (stored, view) in parts.items()}
    inside = TOWER_FOLDER if vlm.repository else ""
    with CheckpointWriter(out, plans, _shard_bytes(vlm), places, inside) as writer:
        if vlm.repository:
            changed = {} if dtype == "auto" else _root_config(vlm.repository, dtype)
            writer.copy_repository(vlm.repository, changed)
        statistics = stream(
            export.jobs,
            export.operation,
            export.inputs,
            ShardTarget(writer),
            progress,
            export.deltas,
        )
        merged = {*by_stored, *(stored for stored, _ in parts.values())}
        _copy_tensors(writer, export.inputs, [name for name in (*vlm.tensors, *parts) if name not in merged])
        for path in side_files:
            writer.copy_file(path)
        config = dict(vlm.config)
        if dtype != "auto":
            config = {**_with_dtype(config, dtype), "dtype": dtype}
        writer.add_file("config.json", _json(config))
        writer.add_file(MANIFEST, _json({**manifest, "as": "vlm", "statistics": statistics.record()}))
    return statistics


def export_text(
    export: Export,
    out: Path,
    manifest: Mapping[str, Any],
    config: Mapping[str, Any],
    shapes: Mapping[str, Sequence[int]] | None = None,
    progress: Progress | None = None,
) -> MergeStatistics:
    """Write the tower alone as an ordinary text checkpoint: canonical names, base's tokenizer and template.

    Args:
        export: What to write.
        out: The folder to appear; it must not exist or be empty.
        manifest: Goes into ``mergelab.json`` beside the weights.
        config: The tower's causal-LM config. Tying follows the tensors: no head tensor, tied.
        shapes: Name -> shape of every tensor of the text model; the jobs must fill them (``check_outlets``).
            None: one tensor for every job.
        progress: Called with entries done and entries in all.

    Raises:
        OutputFolderError: ``out`` holds something else.
        MachineError: The disk is too small.
    """
    base = export.inputs.checkpoints["base"].folder
    if shapes is None:
        shapes = {job.tensor.name: tuple(job.tensor.shape) for job in export.jobs}
    plans = [TensorPlan(outlet.name, job.dtype, outlet.shape) for job in export.jobs for outlet in outlets(job, shapes)]
    with CheckpointWriter(out, plans, _shard_bytes(export.vlm)) as writer:
        target = TextTarget(writer, shapes)
        statistics = stream(export.jobs, export.operation, export.inputs, target, progress)
        for name in TEXT_FILES:
            if (base / name).is_file():
                writer.copy_file(base / name)
        largest = max(export.jobs, key=lambda job: job.num_entries)
        dtype = str(torch_dtype(largest.dtype)).removeprefix("torch.")
        writer.add_file("config.json", _json({**_with_dtype(dict(config), dtype), "dtype": dtype}))
        writer.add_file(MANIFEST, _json({**manifest, "as": "text", "statistics": statistics.record()}))
    return statistics


def _side_files(folder: Path) -> list[Path]:
    """Return what is copied beside the vlm's weights."""
    written = ("config.json", MANIFEST, atomic.LOCK)
    files = [
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and not path.name.endswith(WEIGHT_SUFFIXES) and path.name not in written
    ]
    odd = [shown(path.name) for path in files if not is_plain_name(path.name)]
    if odd:
        raise DamagedFileError(
            f"{folder}: expected plain file names, found {', '.join(odd[:3])}. Rename or remove them."
        )
    return files


def _root_config(repository: Path, dtype: str) -> dict[str, bytes]:
    """Return the config beside a tower's folder with another dtype, where it names one."""
    path = repository / "config.json"
    if not path.is_file():
        return {}
    try:
        config = read_object(path)
    except (OSError, ValueError) as error:
        raise DamagedFileError(f"{path}: not readable as JSON ({error}). Fetch the file again.") from error
    return {path.name: _json(_with_dtype(config, dtype))}


def _parts(export: Export) -> dict[str, tuple[str, View]]:
    """Return the parts that the vlm's fused tensors are written through."""
    return {name: (part.stored, part.view) for name, part in export.pairing.views.get("vlm", {}).items()}


@dataclass(frozen=True)
class _Stretch:
    """Entries of a tensor of the vlm that is copied as it is."""

    header: TensorHeader
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return (self.stop - self.start) * DTYPE_BITS[self.header.dtype] // 8


def _copy_tensors(writer: CheckpointWriter, inputs: Inputs, names: Sequence[str]) -> None:
    """Copy the vlm's tensors that no merge touches, reading ahead of the writing."""
    headers = [inputs.header("vlm", name) for name in names]
    stretches = [
        _Stretch(header, start, min(start + BLOCK_ENTRIES, header.num_entries))
        for header in headers
        for start in range(0, header.num_entries, BLOCK_ENTRIES)
    ]

    def read(stretch: _Stretch) -> torch.Tensor:
        return read_entries(stretch.header, stretch.start, stretch.stop)

    def hand_over(stretch: _Stretch, entries: torch.Tensor, send: Callable[[torch.Tensor], None]) -> None:
        send(entries)

    def write(stretch: _Stretch, entries: torch.Tensor) -> None:
        writer.write(repaired(stretch.header.name), stretch.start, entries)

    stages = Stages(lambda stretch: stretch.num_bytes, read, hand_over, write)
    with closing(overlap(stretches, stages, 1, Gate(LIMIT_BYTES))) as copied:
        for _ in copied:
            pass


def _shard_bytes(checkpoint: Checkpoint) -> int:
    """Shards as large as the vlm's own, so that a sharded vlm stays sharded alike."""
    if len(checkpoint.shards) < 2:
        return DEFAULT_SHARD_BYTES
    return max(path.stat().st_size for path in checkpoint.shards)


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Name the dtype wherever the config, outer or nested, names one."""
    changed: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            changed[key] = _with_dtype(value, dtype)
        elif key in DTYPE_KEYS and value is not None:
            changed[key] = DTYPE_KEYS[key] + dtype
        else:
            changed[key] = value
    return changed


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
