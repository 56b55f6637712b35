"""One thing at a time, without a run folder: write a merge, measure sinks, grade a model."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from mergelab import __version__
from mergelab.atomic import write_text
from mergelab.checkpoints.fingerprint import fingerprint_checkpoint
from mergelab.checkpoints.headers import Checkpoint, open_checkpoint
from mergelab.checkpoints.hub import resolve_source
from mergelab.checkpoints.output_folder import check_output_folder
from mergelab.checkpoints.reader import torch_dtype
from mergelab.config import Pair, Recipe, resolved
from mergelab.device import choose_device, limit_threads
from mergelab.engine.ancestry import ancestry_summary, check_related
from mergelab.engine.checks import check_equal_tensors, check_same_rows
from mergelab.engine.export import Export, export_text, export_vlm
from mergelab.engine.inputs import Inputs
from mergelab.engine.plan import COPY, OUTPUT_DTYPES, operation, plan_jobs
from mergelab.errors import PairingError, RecipeError
from mergelab.evals.request import EvalRequest
from mergelab.evals.suite import TaskResult, load_suite
from mergelab.live.configs import has_vlm_class
from mergelab.live.model import LiveModel
from mergelab.sinks.measure import measure_sink
from mergelab.sinks.prompts import load_prompts
from mergelab.sweeps.engines import Asked, Engines, vllm_kind
from mergelab.sweeps.experiment import Point, load_generation_config, load_tokenizer, named, text_config
from mergelab.sweeps.grid import expand, selected_points
from mergelab.sweeps.loading import tower_of
from mergelab.sweeps.models import Models
from mergelab.sweeps.processor import load_processor
from mergelab.towers.layouts import Tower, locate_tower


def write_merge(
    recipe: Recipe, pair: Pair, models: Models, out: Path, layout: str, point_id: str | None, device: str
) -> dict[str, Any]:
    """Write one point of a recipe as a checkpoint.

    Args:
        recipe: The recipe.
        pair: The pair it runs on.
        models: The opened models.
        out: Folder to write; new or empty.
        layout: ``vlm`` or ``text``.
        point_id: A point of the grid; None takes the one that ``parameters`` names.
        device: Where to compute.

    Returns:
        What the manifest beside the weights says, with label and seconds.

    Raises:
        RecipeError: ``parameters`` name no or several points, or no point has this id.
        OutputFolderError: ``out`` holds something.
        PairingError: The models do not fit each other; as text, the vlm's config does not describe its tower, or
            base's tokenizer does not address it.
    """
    started = time.perf_counter()
    check_output_folder(out)
    device = choose_device(device)
    check_equal_tensors(models.pairing, models.checkpoints)
    digest = check_related(models.pairing, models.checkpoints, models.accept_unrelated)
    jobs = plan_jobs(models.pairing, models.checkpoints, recipe.output_dtype)
    config = None
    if layout == "text":
        check_same_rows(models.pairing)
        config = text_config(models, jobs)
    fingerprints = models.fingerprints()
    point = _choose(recipe, pair, fingerprints, point_id)
    assert point.operation is not None
    manifest = {
        "format": 1,
        "mergelab": __version__,
        "point_id": point.point_id,
        "method": point.spec.method,
        "parameters": dict(point.spec.parameters),
        "seed": point.spec.seed,
        "zero_point": point.spec.zero_point,
        "conventions": point.spec.conventions,
        "fingerprints": fingerprints,
        "ancestry": ancestry_summary(digest, models.accept_unrelated),
        "recipe": resolved(recipe),
        "pair": pair.model_dump(mode="json"),
    }
    export = Export(jobs, point.operation, Inputs(models.checkpoints, device=device), models.pairing)
    if config is None:
        statistics = export_vlm(export, out, manifest, recipe.output_dtype)
    else:
        statistics = export_text(export, out, manifest, config.to_dict())
    seconds = time.perf_counter() - started
    return {**manifest, "label": point.label, "statistics": statistics.record(), "seconds": seconds}


def write_tower(pair: Pair, models: Models, out: Path) -> dict[str, Any]:
    """Write the vlm's tower, bit for bit, as a text checkpoint with base's tokenizer.

    Nothing is merged, so base need not be related: it only has to have the same tensors and tokens.

    Returns:
        What the manifest beside the weights says, with the number of tensors and seconds.

    Raises:
        OutputFolderError: ``out`` holds something.
        PairingError: The vlm's config does not describe its tower, or base's tokenizer does not address it.
    """
    started = time.perf_counter()
    check_output_folder(out)
    jobs = plan_jobs(models.pairing, models.checkpoints)
    check_same_rows(models.pairing)
    config = text_config(models, jobs)
    manifest = {
        "format": 1,
        "mergelab": __version__,
        "method": COPY,
        "parameters": {"of": "vlm"},
        "fingerprints": {"vlm": fingerprint_checkpoint(models.checkpoints["vlm"])},
        "pair": pair.model_dump(mode="json"),
    }
    copy = operation(COPY, {"of": "vlm"}, None)
    export_text(Export(jobs, copy, Inputs(models.checkpoints), models.pairing), out, manifest, config.to_dict())
    return {**manifest, "tensors": len(jobs), "seconds": time.perf_counter() - started}


def find_point(recipe: Recipe, pair: Pair, models: Models, point_id: str) -> Point:
    """Return the point of this id on these models.

    Raises:
        RecipeError: There is none; the message lists those there are.
    """
    return _choose(recipe, pair, models.fingerprints(), point_id)


def _choose(recipe: Recipe, pair: Pair, fingerprints: dict[str, str], point_id: str | None) -> Point:
    if point_id is None:
        selected = [named(spec, fingerprints, recipe.output_dtype) for spec in selected_points(recipe, pair)]
        if len(selected) == 1:
            return selected[0]
        labels = "; ".join(f"{point.point_id} {point.label}" for point in selected)
        raise RecipeError(f"recipe {recipe.name}: it has {len(selected)} merges. Choose one with --point: {labels}.")
    specs = [*expand(recipe, pair)]
    known = [named(spec, fingerprints, recipe.output_dtype) for spec in specs if spec.method is not None]
    for point in known:
        if point.point_id == point_id:
            return point
    labels = "\n".join(f"  {point.point_id}  {point.label}" for point in known)
    raise RecipeError(f"--point {point_id}: no such point on these models. Known are\n{labels}")


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
    sees = tower.sees_pictures and has_vlm_class(checkpoint.folder)
    blind = [task.name for task in suite.tasks if task.modality == "vision" and not sees]
    if blind:
        what = "a vlm without a class in transformers" if tower.sees_pictures else "a text model"
        raise RecipeError(f"{source}: {what} cannot see the pictures of {', '.join(blind)}. Name --tasks.")
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
