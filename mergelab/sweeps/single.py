"""One thing at a time, without a run folder: write a merge, measure sinks, grade a model."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from mergelab.atomic import write_text
from mergelab.checkpoints.headers import Checkpoint, open_checkpoint
from mergelab.checkpoints.hub import resolve_source
from mergelab.checkpoints.reader import torch_dtype
from mergelab.device import choose_device, limit_threads
from mergelab.engine.plan import OUTPUT_DTYPES
from mergelab.errors import PairingError
from mergelab.evals.request import EvalRequest
from mergelab.evals.suite import TaskResult, load_suite
from mergelab.live.model import LiveModel
from mergelab.sinks.measure import measure_sink
from mergelab.sinks.prompts import load_prompts
from mergelab.sweeps.engines import Asked, Engines, vllm_kind
from mergelab.sweeps.experiment import load_generation_config, load_tokenizer
from mergelab.sweeps.loading import tower_of
from mergelab.sweeps.processor import load_processor
from mergelab.sweeps.sight import check_sight
from mergelab.towers.layouts import Tower, locate_tower


def measure_models(
    sources: Sequence[str],
    dtype: str,
    last_layers: int | None,
    prompts: str,
    device: str,
    say: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """Return the sink record of each model (of a vlm: of its tower), with its source as ``model``."""
    device = choose_device(device)
    loaded_prompts = load_prompts(prompts)
    opened = [(source, *_open(source, say)) for source in sources]
    records = []
    for source, checkpoint, tower in opened:
        live = _load(checkpoint, tower, device, getattr(torch, dtype))
        tokenizer = load_tokenizer(checkpoint)
        records.append({"model": source, **measure_sink(live.text, tokenizer, loaded_prompts, last_layers=last_layers)})
        del live
        gc.collect()
    return records


def evaluate_model(
    source: str, request: EvalRequest, device: str, say: Callable[[str], None] = lambda line: None
) -> list[TaskResult]:
    """Grade one model on the tasks of a request; picture tasks need a vlm.

    Raises:
        MachineError: The backend cannot be used here.
        RecipeError: A picture task for a text model, or anything wrong with the request.
        PairingError: The weights are quantised.
    """
    device = choose_device(device)
    # Asked for first: a missing program costs no work.
    kind = None if request.backend == "hf" else vllm_kind(device)
    checkpoint, tower = _open(source, say)
    suite = load_suite(replace(request, tokenizer=checkpoint.folder), say)
    check_sight([task.name for task in suite.tasks if task.modality == "vision"], source, checkpoint.folder, tower)
    tokenizer = load_tokenizer(checkpoint)
    suite.check_tokenizer(tokenizer)
    processor = None
    if any(task.needs_processor for task in suite.tasks):
        processor = load_processor(checkpoint).processor
        suite.check_processor(processor)
    code = max(checkpoint.tensors.values(), key=lambda header: header.num_entries).dtype
    if code not in OUTPUT_DTYPES.values():
        known = ", ".join(OUTPUT_DTYPES.values())
        raise PairingError(
            f"{source}: most of its weights are {code}, expected one of {known}. Use a plain checkpoint."
        )
    live = _load(checkpoint, tower, device, torch_dtype(code))
    generation = load_generation_config(checkpoint.folder)
    results = []
    with ExitStack() as stack:
        engine = None
        if kind is not None and any(task.backend != "hf" for task in suite.tasks):
            size = max(task.stage["batch_size"] for task in suite.tasks if task.backend != "hf")
            scratch = Path(stack.enter_context(TemporaryDirectory(prefix="mergelab-weights-"))) / "scratch"
            engines = Engines(kind, tokenizer, checkpoint.folder, device, size, scratch)
            stack.callback(engines.drop)
            engine = engines.engine_for(Asked(source, live, None if tower.sees_pictures else checkpoint.folder))
        for task in suite.tasks:
            model = live.vlm if task.modality == "vision" else live.text
            assert model is not None
            asked = engine if engine is not None and task.backend != "hf" else model
            reader = processor if task.needs_processor else tokenizer
            results.append(suite.evaluate(task.name, asked, reader, generation_config=generation))
    return results


def write_documents(
    source: str, request: EvalRequest, folder: Path, say: Callable[[str], None] = lambda line: None
) -> list[Path]:
    """Write the documents of the tasks of a request as JSONL files that ``data_folder`` takes; nothing is graded.

    Args:
        source: The model whose tokenizer counts, for documents that are made to a length in tokens.
        request: The tasks.
        folder: Where the files go.
        say: Told before a data set is fetched.

    Returns:
        The files, in the order of the tasks.
    """
    checkpoint, _ = _open(source, say)
    suite = load_suite(replace(request, tokenizer=checkpoint.folder), say)
    paths = []
    for task in suite.tasks:
        paths.append(folder / f"{task.name}.jsonl")
        write_text(paths[-1], "".join(json.dumps(document) + "\n" for document in task.documents()))
    return paths


def _open(source: str, say: Callable[[str], None]) -> tuple[Checkpoint, Tower]:
    checkpoint = open_checkpoint(resolve_source(source, None, announce=say))
    return checkpoint, locate_tower(checkpoint.tensors, checkpoint.config)


def _load(checkpoint: Checkpoint, tower: Tower, device: str, dtype: torch.dtype) -> LiveModel:
    limit_threads(sum(header.num_entries for header in checkpoint.tensors.values()), device)
    return tower_of(checkpoint, tower, device, dtype)
