"""Where merged blocks go: the tensors of a live model, or shards on disk. Fed by the same jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from mergelab.checkpoints.fingerprint import combine_hashes, hash_tensor
from mergelab.checkpoints.reader import torch_dtype
from mergelab.checkpoints.writer import CheckpointWriter
from mergelab.engine.plan import TensorJob
from mergelab.errors import PairingError


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

    def check(self, jobs: list[TensorJob]) -> None:
        """Raise PairingError unless every job has a live tensor of its shape and dtype, and no tensor is left over."""
        problems = []
        for job in jobs:
            live = self.tensors.get(job.tensor.name)
            if live is None:
                problems.append(f"{job.tensor.name}: not in the live model")
            elif tuple(live.shape) != tuple(job.tensor.shape) or live.dtype != torch_dtype(job.dtype):
                found = f"{tuple(live.shape)} {live.dtype}"
                problems.append(f"{job.tensor.name}: {tuple(job.tensor.shape)} {job.dtype} to write, live {found}")
        expected = {job.tensor.name for job in jobs}
        problems += [f"{name}: live, but nothing would write it" for name in self.tensors if name not in expected]
        if problems:
            shown = "\n".join(f"  - {problem}" for problem in problems[:12])
            raise PairingError(
                f"live model: {len(problems)} tensors do not fit the merge.\n{shown}\n"
                "Tensors of several dtypes in one vlm need an explicit output_dtype in the recipe."
            )

    def write(self, job: TensorJob, start: int, block: torch.Tensor) -> None:
        """Copy the block into the live storage."""
        with torch.no_grad():
            self.tensors[job.tensor.name].view(-1)[start : start + block.numel()].copy_(block)
        if block.device.type == "cuda":
            # The memory of the block goes back to the thread that computed it, and must not be refilled too early.
            torch.cuda.current_stream(block.device).synchronize()


class ShardTarget:
    """Writes blocks into a checkpoint in the making, under the names the output uses."""

    in_memory = False

    def __init__(self, writer: CheckpointWriter, name_of: Callable[[TensorJob], str]) -> None:
        """Take an open writer and the naming: the vlm's stored names, or the canonical ones."""
        self.writer = writer
        self.name_of = name_of

    def write(self, job: TensorJob, start: int, block: torch.Tensor) -> None:
        """Hand the block to the writer."""
        self.writer.write(self.name_of(job), start, block.cpu())


def hash_live(tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the order-free content hash of live tensors; equals that of an exported text folder."""
    return combine_hashes(hash_tensor(name, tensor.detach()) for name, tensor in tensors.items())
