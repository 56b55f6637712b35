"""Hands out the engine that answers text for a point: one running engine for all merges, a process for the rest.

Merges share the tower's config, so one engine serves them all and takes their weights in memory. A parent under its
own config gets a process of its own on its own folder. Where an engine does not let its weights be overwritten and
read back, every point is written as a text checkpoint into a scratch folder, and a process loads that. However the
weights got there, the engine must say what the live model says before it is asked anything that counts.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm_eval.models.utils import resolve_max_length
from transformers import PreTrainedModel

from mergelab.checkpoints.fingerprint import fingerprint_checkpoint
from mergelab.checkpoints.headers import open_checkpoint
from mergelab.checkpoints.reader import DTYPE_CODES
from mergelab.checkpoints.writer import CheckpointWriter, TensorPlan
from mergelab.engine.targets import hash_live
from mergelab.errors import DamagedFileError
from mergelab.evals.canary import check_engine
from mergelab.evals.engine_process import EngineProcess
from mergelab.evals.engines import MAX_LENGTH, Engine, EngineSetup, ResidentEngine, weights_content
from mergelab.evals.vllm_engine import open_resident_vllm, require_vllm
from mergelab.live.model import LiveModel

VLLM_OPENER = "mergelab.evals.vllm_engine:open_vllm"


@dataclass(frozen=True)
class EngineKind:
    """How the engines of a backend are opened.

    Args:
        resident: Builds one in this process, waiting for weights; None where that is of no use.
        opener: ``module:function`` for ``EngineProcess``.
    """

    resident: Callable[[EngineSetup], ResidentEngine] | None
    opener: str


@dataclass(frozen=True)
class Asked:
    """A model that an engine shall answer for.

    Args:
        label: What messages call it.
        live: The model with its weights in place.
        folder: Where the same weights lie under the same config; None for those that are nowhere on disk.
    """

    label: str
    live: LiveModel
    folder: Path | None = None


def vllm_kind(device: str) -> EngineKind:
    """Return how vLLM's engines are opened: on a CPU it repacks its weights, so that none stays resident.

    Raises:
        MachineError: There is no vLLM for this device.
    """
    require_vllm(device)
    return EngineKind(None if device == "cpu" else open_resident_vllm, VLLM_OPENER)


def backend_versions(backend: str, device: str) -> dict[str, str]:
    """Return what belongs into the key of answers of a backend besides its name; nothing for ``hf``.

    Raises:
        MachineError: The backend cannot be used on this device.
    """
    if backend == "hf":
        return {}
    return {"vllm": require_vllm(device), "batch_invariant": os.environ.get("VLLM_BATCH_INVARIANT", "0")}


class Engines:
    """The engines of one run or one command; at most one is alive.

    Args:
        kind: The backend's.
        tokenizer: The tokenizer that text is scored with.
        tokenizer_folder: Where it was loaded from.
        device: Of models and engines.
        batch_size: Answers written at a time.
        scratch: A folder of ours for checkpoints in passing; emptied now and in the end.
    """

    def __init__(
        self, kind: EngineKind, tokenizer: Any, tokenizer_folder: Path, device: str, batch_size: int, scratch: Path
    ) -> None:
        self._kind = kind
        self._tokenizer = tokenizer
        self._tokenizer_folder = tokenizer_folder
        self._device = device
        self._batch_size = batch_size
        self._scratch = scratch
        self._resident: ResidentEngine | None = None
        self._can_reside = kind.resident is not None
        self._passing: Engine | None = None
        self._ready: tuple[str, Engine] | None = None
        self.how = ""
        """How the last engine got its weights: ``in place``, or ``from disk`` into a process of its own."""
        # A killed run may have left a checkpoint there.
        shutil.rmtree(scratch, ignore_errors=True)

    def engine_for(self, asked: Asked) -> Engine:
        """Return an engine that answers with these weights, checked against the live model; one until ``release``.

        Raises:
            MachineError: No engine can be started, or it died.
            MergelabError: The engine answers with other weights.
        """
        if self._ready is not None and self._ready[0] == asked.label:
            return self._ready[1]
        text = asked.live.text
        self.release()
        engine: Engine | None = None
        if asked.folder is None and self._can_reside:
            engine, self.how = self._overwritten(asked), "in place"
        if engine is None:
            self._close_resident()
            folder = asked.folder or self._written(asked)
            engine = self._passing = EngineProcess(self._kind.opener, self._setup(folder, text))
            self.how = "from disk"
        check_engine(engine, text, self._tokenizer, asked.label)
        self._ready = asked.label, engine
        return engine

    def release(self) -> None:
        """Close the engine of the last point, unless it serves them all, and remove its checkpoint."""
        passing, self._passing, self._ready = self._passing, None, None
        if passing is not None:
            passing.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def drop(self) -> None:
        """Close all after a failure: the next point gets a fresh engine."""
        self.release()
        self._close_resident()

    def _overwritten(self, asked: Asked) -> Engine | None:
        """Return the resident engine with these weights; None if it does not hold them as they are."""
        assert self._kind.resident is not None
        tensors = asked.live.tensors()
        if self._resident is None:
            folder = self._scratch / "config"
            folder.mkdir(parents=True)
            (folder / "config.json").write_bytes(_config(asked.live.text))
            self._resident = self._kind.resident(self._setup(folder, asked.live.text))
        self._resident.load(tensors.items())
        found = self._resident.content()
        if found == weights_content(tensors.values()):
            return self._resident
        # Repacked, scaled or not taken over: what it answers with cannot be told from here.
        self._can_reside = False
        return None

    def _written(self, asked: Asked) -> Path:
        """Write the live weights as a text checkpoint into the scratch folder and read it back by its fingerprint."""
        folder = self._scratch / "weights"
        tensors = asked.live.tensors()
        plans = [TensorPlan(name, DTYPE_CODES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()]
        with CheckpointWriter(folder, plans) as writer:
            for name, tensor in tensors.items():
                writer.write(name, 0, tensor.reshape(-1).cpu())
            writer.add_file("config.json", _config(asked.live.text))
        found, expected = fingerprint_checkpoint(open_checkpoint(folder)), hash_live(tensors)
        if found != expected:
            raise DamagedFileError(
                f"{folder}: the checkpoint for the engine has weights {found[:12]}, the live model {expected[:12]}. "
                "The disk does not keep what is written; nothing was graded."
            )
        return folder

    def _setup(self, folder: Path, text: PreTrainedModel) -> EngineSetup:
        length = int(resolve_max_length(text.config, self._tokenizer))
        return EngineSetup(
            folder=folder,
            tokenizer=self._tokenizer_folder,
            dtype=str(text.dtype).removeprefix("torch."),
            device=self._device,
            batch_size=self._batch_size,
            max_length=min(length, MAX_LENGTH),
        )

    def _close_resident(self) -> None:
        resident, self._resident = self._resident, None
        if resident is not None:
            resident.close()


def _config(text: PreTrainedModel) -> bytes:
    """Return the config of the live model as a checkpoint has it."""
    dtype = str(text.dtype).removeprefix("torch.")
    config = {**text.config.to_dict(), "architectures": [type(text).__name__], "dtype": dtype}
    return (json.dumps(config, indent=2) + "\n").encode()
