"""Builds the bench pair from nothing: tokenizer, four training stages, three folders, gates."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Any

import torch

from mergelab import atomic
from mergelab.bench.folders import save_model
from mergelab.bench.gates import Gates, measure_gates
from mergelab.bench.models import assemble_vlm, cpu_threads, new_text_model, new_vision_tower
from mergelab.bench.stages import Context, Steps, train_ancestor, train_base, train_vision, train_vlm
from mergelab.bench.tokenizer import IMAGE, train_tokenizer
from mergelab.bench.train import StageResult
from mergelab.errors import DamagedFileError, OutputFolderError, problem_list

ROLES = ("ancestor", "base", "vlm")
REPORT_FILE = "BUILD.json"
VERSIONED = ("torch", "transformers", "tokenizers", "numpy", "safetensors")


@dataclass(frozen=True)
class BuildReport:
    """What a build did; written as ``BUILD.json`` beside the three folders.

    ``seconds`` is the whole build with saving and gates; ``versions`` names the libraries that trained it.
    """

    seed: int
    steps: Steps
    stages: tuple[StageResult, ...]
    gates: Gates
    seconds: float
    versions: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return dataclasses.asdict(self)


def pair_folder() -> Path:
    """Return the folder of the shipped pair: ``ancestor``, ``base``, ``vlm`` and ``BUILD.json``."""
    return Path(str(files("mergelab.bench.data") / "pair"))


def library_versions() -> dict[str, str]:
    """Return the versions of what decides the trained numbers."""
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in VERSIONED}


def refuse_used_folder(out: Path) -> None:
    """Refuse an output that is not absent or an empty folder.

    Raises:
        OutputFolderError: ``out`` is a file, or a folder that holds something.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OutputFolderError(f"--out {out}: expected a new or empty folder, found content. Choose another folder.")


def build_pair(
    out: Path,
    *,
    seed: int = 0,
    steps: Steps | None = None,
    progress: Callable[[str], None],
) -> BuildReport:
    """Train ancestor, base and vlm and write them to ``out``/{ancestor,base,vlm} with ``BUILD.json``.

    Everything runs on one CPU thread: two threads of a busy machine are slower for models of this size. The
    same seed gives the same files on the same machine and library versions; other processors may round
    differently, so a build is judged by bounds and not by equal numbers. The folder appears whole, at the
    end.

    Args:
        out: New or empty folder.
        seed: Decides weights, data and tokenizer.
        steps: Optimizer steps of each stage; None is the full build, under 10 minutes on one core. A build
            with other steps is only measured: its gates are reported and not enforced.
        progress: Receives one line now and then.

    Returns:
        The report that also stands in ``BUILD.json``.

    Raises:
        OutputFolderError: ``out`` holds something.
        DamagedFileError: A full build misses a gate; nothing is written.
    """
    refuse_used_folder(out)
    started = time.monotonic()
    steps = steps or Steps()
    with cpu_threads(1), atomic.new_folder(out) as scratch, torch.random.fork_rng(devices=[]):
        stages = _train_into(scratch, seed, steps, progress)
        progress("gates: generating the replies of base and vlm")
        gates = measure_gates(scratch)
        report = BuildReport(seed, steps, stages, gates, time.monotonic() - started, library_versions())
        if steps == Steps() and (problems := gates.problems()):
            raise DamagedFileError(
                problem_list(
                    f"bench build, seed {seed}: the trained pair misses its gates, {out} was not written.",
                    problems,
                    "Try another seed. If that fails too, these library versions train differently.",
                )
            )
        atomic.write_json(scratch / REPORT_FILE, report.as_json())
    return report


def _train_into(folder: Path, seed: int, steps: Steps, progress: Callable[[str], None]) -> tuple[StageResult, ...]:
    """Run the four stages and save ancestor, base and vlm as they become ready."""
    torch.manual_seed(seed)
    tokenizer = train_tokenizer(seed)

    def context(stage: str) -> Context:
        return Context(tokenizer, Random(f"{seed} {stage}"), progress)

    results = []
    text = new_text_model()
    results.append(train_ancestor(text, steps.ancestor, context("ancestor")))
    save_model(text, tokenizer, folder / "ancestor")
    results.append(train_base(text, steps.base, context("base")))
    save_model(text, tokenizer, folder / "base")
    tower = new_vision_tower()
    results.append(train_vision(tower, steps.vision, context("vision")))
    vlm = assemble_vlm(text, tower, IMAGE)
    results.append(train_vlm(vlm, steps.vlm, context("vlm")))
    save_model(vlm, tokenizer, folder / "vlm")
    return tuple(results)
