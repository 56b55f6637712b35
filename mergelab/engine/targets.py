"""Where merged blocks go: the tensors of a live model, or shards on disk. Fed by the same jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from mergelab.checkpoints.fingerprint import combine_hashes, hash_tensor
from mergelab.checkpoints.reader import torch_dtype
from mergelab.checkpoints.writer import CheckpointWriter
from mergelab.engine.outlets import Distributor, outlets
from mergelab.engine.plan import TensorJob
from mergelab.errors import PairingError
from mergelab.towers.layouts import repaired


def holds(live: torch.dtype, written: torch.dtype) -> bool:
    """Say whether a live tensor holds exactly what a file of another dtype does.

    transformers keeps routers of experts in float32 whatever dtype the model has.
    """
    return live == written or (live == torch.float32 and written in (torch.bfloat16, torch.float16))


class Target(Protocol):
    """Takes the blocks of every job, in any order within a tensor."""

    in_memory: bool
    """True if blocks are wanted on the device where they are computed, False if on the CPU."""

    def write(self, job: TensorJob, start: int, block: torch.Tensor) -> None:
        """Store ``block``, flat and in the job's dtype, as entries ``start..`` of the job's tensor."""


class LiveTarget:
    """Overwrites the weights of a live model in place; nothing is written to disk."""

    in_memory = True

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the live tensors by canonical name. A tied head appears once, as the embedding."""
        self.tensors = tensors
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.distributor = Distributor(self.shapes, self._store)

    def check(self, jobs: list[TensorJob]) -> None:
        """Raise PairingError unless every job has a live tensor of its shape and dtype, and no tensor is left over."""
        problems = []
        expected: set[str] = set()
        for job in jobs:
            name, live = job.tensor.name, self.tensors.get(job.tensor.name)
            found = outlets(job, self.shapes)
            expected.update((name, *(outlet.name for outlet in found)))
            dtypes = {self.tensors[outlet.name].dtype for outlet in found}
            if not found and live is None:
                problems.append(f"{name}: not in the live model")
            elif not found or not all(holds(dtype, torch_dtype(job.dtype)) for dtype in dtypes):
                has = f"{tuple(live.shape)} {live.dtype}" if live is not None else ", ".join(map(str, dtypes))
                problems.append(f"{name}: {tuple(job.tensor.shape)} {job.dtype} to write, live {has}")
        problems += [f"{name}: live, but nothing would write it" for name in self.tensors if name not in expected]
        if problems:
            shown = "\n".join(f"  - {problem}" for problem in problems[:12])
            raise PairingError(
                f"live model: {len(problems)} tensors do not fit the merge.\n{shown}\n"
                "Tensors of several dtypes in one vlm need an explicit output_dtype in the recipe."
            )

    def hash(self, jobs: Sequence[TensorJob]) -> str:
        """Return the content hash of the live weights in the dtypes in which the jobs write them."""
        written = {outlet.name: torch_dtype(job.dtype) for job in jobs for outlet in outlets(job, self.shapes)}
        return hash_live(
            {
                name: tensor.to(written[name]) if holds(tensor.dtype, written.get(name, tensor.dtype)) else tensor
                for name, tensor in self.tensors.items()
            }
        )

    def write(self, job: TensorJob, start: int, block: torch.Tensor) -> None:
        """Copy the block into the live storage."""
        self.distributor.write(job, start, block)
        if block.device.type == "cuda":
            # The memory of the block goes back to the thread that computed it, and must not be refilled too early.
            torch.cuda.current_stream(block.device).synchronize()

    def _store(self, name: str, start: int, block: torch.Tensor) -> None:
        with torch.no_grad():
            self.tensors[name].view(-1)[start : start + block.numel()].copy_(block)


class ShardTarget:
    """Writes blocks into a vlm in the making, under the names the vlm has (``repaired``)."""

    in_memory = False

    def __init__(self, writer: CheckpointWriter) -> None:
        """Take an open writer."""
        self.writer = writer

    def write(self, job: TensorJob, start: int, block: torch.Tensor) -> None:
        """Hand the block to the writer."""
        self.writer.write(repaired(job.tensor.stored["vlm"]), start, block.cpu())


class TextTarget:
    """Writes blocks into a text checkpoint in the making, under canonical names."""

    in_memory = False

    def __init__(self, writer: CheckpointWriter, shapes: Mapping[str, Sequence[int]]) -> None:
        """Take an open writer and the tensors of the text model, which it was opened with."""
        self.distributor = Distributor(shapes, lambda name, start, block: writer.write(name, start, block.cpu()))

    def write(self, job: TensorJob, start: int, block: torch.Tensor) -> None:
        """Hand the block to the writer."""
        self.distributor.write(job, start, block)


def hash_live(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the order-free content hash of live tensors; equals that of an exported text folder."""
    return combine_hashes(hash_tensor(name, tensor.detach()) for name, tensor in tensors.items())
