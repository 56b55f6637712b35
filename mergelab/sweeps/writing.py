"""Write one merge, or the tower of a vlm, as a checkpoint; no run folder.

transformers is imported only where a config of its own is written: a vlm keeps its files, and small models are
merged sooner than it is there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mergelab import __version__
from mergelab.checkpoints.fingerprint import fingerprint_checkpoint
from mergelab.checkpoints.output_folder import check_output_folder
from mergelab.config import Pair, Recipe, resolved
from mergelab.device import choose_device
from mergelab.engine.ancestry import ancestry_summary, check_related
from mergelab.engine.checks import check_equal_tensors, check_same_rows
from mergelab.engine.export import Export, export_text, export_vlm
from mergelab.engine.inputs import Inputs
from mergelab.engine.plan import COPY, TensorJob, operation, plan_jobs
from mergelab.errors import RecipeError
from mergelab.sweeps.grid import expand, selected_points
from mergelab.sweeps.identity import MAPPING
from mergelab.sweeps.models import Models
from mergelab.sweeps.points import Point, named


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
    text = text_model(models, jobs) if layout == "text" else None
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
        "inferred": None if models.report is None else models.report.record(),
        "recipe": resolved(recipe),
        "pair": pair.model_dump(mode="json"),
    }
    export = Export(jobs, point.operation, Inputs(models.checkpoints, device=device), models.pairing)
    if text is None:
        statistics = export_vlm(export, out, manifest, recipe.output_dtype)
    else:
        statistics = export_text(export, out, manifest, *text)
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
    text = text_model(models, jobs)
    fingerprints = {"vlm": fingerprint_checkpoint(models.checkpoints["vlm"])}
    if models.mapping:
        fingerprints[MAPPING] = models.mapping
    manifest = {
        "format": 1,
        "mergelab": __version__,
        "method": COPY,
        "parameters": {"of": "vlm"},
        "fingerprints": fingerprints,
        "inferred": None if models.report is None else models.report.record(),
        "pair": pair.model_dump(mode="json"),
    }
    copy = operation(COPY, {"of": "vlm"}, None)
    export_text(Export(jobs, copy, Inputs(models.checkpoints), models.pairing), out, manifest, *text)
    return {**manifest, "tensors": len(jobs), "seconds": time.perf_counter() - started}


def text_model(models: Models, jobs: Sequence[TensorJob]) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Return the config of the vlm's tower alone, and its tensors' shapes.

    Raises:
        PairingError: The config does not describe the tower, or base's tokenizer does not address it.
    """
    from mergelab.live.model import tower_shapes
    from mergelab.sweeps.experiment import text_config

    check_same_rows(models.pairing)
    config = text_config(models, jobs)
    return config.to_dict(), tower_shapes(config)


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
