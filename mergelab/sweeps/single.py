"""One thing at a time, without a run folder: write a merge, measure sinks, grade a model."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mergelab.checkpoints.headers import Checkpoint, open_checkpoint
from mergelab.checkpoints.hub import resolve_source
from mergelab.checkpoints.reader import torch_dtype
from mergelab.device import choose_device, limit_threads
from mergelab.engine.plan import OUTPUT_DTYPES
from mergelab.errors import PairingError, RecipeError
from mergelab.evals.request import EvalRequest
from mergelab.evals.suite import TaskResult, load_suite
from mergelab.live.configs import has_vlm_class
from mergelab.live.model import LiveModel
from mergelab.sinks.measure import measure_sink
from mergelab.sinks.prompts import load_prompts
from mergelab.sweeps.experiment import load_generation_config, load_tokenizer
from mergelab.sweeps.loading import tower_of
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
        RecipeError: A picture task for a text model, or anything wrong with the request.
        PairingError: The weights are quantised.
    """
    device = choose_device(device)
    checkpoint, tower = _open(source, say)
    suite = load_suite(request, say)
    sees = tower.sees_pictures and has_vlm_class(checkpoint.folder, tower.family)
    blind = [task.name for task in suite.tasks if task.modality == "vision" and not sees]
    if blind:
        what = "a vlm without a class in transformers" if tower.sees_pictures else "a text model"
        raise RecipeError(f"{source}: {what} cannot see the pictures of {', '.join(blind)}. Name --tasks.")
    tokenizer = load_tokenizer(checkpoint)
    suite.check_tokenizer(tokenizer)
    code = max(checkpoint.tensors.values(), key=lambda header: header.num_entries).dtype
    if code not in OUTPUT_DTYPES.values():
        known = ", ".join(OUTPUT_DTYPES.values())
        raise PairingError(
            f"{source}: most of its weights are {code}, expected one of {known}. Use a plain checkpoint."
        )
    live = _load(checkpoint, tower, device, torch_dtype(code))
    generation = load_generation_config(checkpoint.folder)
    results = []
    for task in suite.tasks:
        model = live.vlm if task.modality == "vision" else live.text
        assert model is not None
        results.append(suite.evaluate(task.name, model, tokenizer, generation_config=generation))
    return results


def _open(source: str, say: Callable[[str], None]) -> tuple[Checkpoint, Tower]:
    checkpoint = open_checkpoint(resolve_source(source, None, announce=say))
    return checkpoint, locate_tower(checkpoint.tensors, checkpoint.config)


def _load(checkpoint: Checkpoint, tower: Tower, device: str, dtype: torch.dtype) -> LiveModel:
    limit_threads(sum(header.num_entries for header in checkpoint.tensors.values()), device)
    return tower_of(checkpoint, tower, device, dtype)
