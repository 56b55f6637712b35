"""What makes a point, a stage and a run folder the same one as before.

Three classes of fields of a recipe or pair:

- ``identity``: decides the weights of points, or what a run claims. The weights enter the point id; what may
  not change within a run folder is listed in ``FIXED``.
- ``stage``: decides what a stage (sink, one per task) measures on given weights. Enters the key of the stage.
- ``runtime``: changes no number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Literal

from mergelab.config import canonical_json
from mergelab.config.problems import shown
from mergelab.sweeps.grid import PointSpec
from mergelab.towers.rules import Family

ARITHMETIC_VERSION = 1
"""Raised by one whenever the same inputs and parameters give other weights: old points are made anew."""

POINT_ID_DIGITS = 12
"""48 bits: among a million points the chance of a clash is one in five hundred."""

MAPPING = "mapping"
"""Beside the fingerprints of the models: how the vlm's names are mapped, where it is not by what mergelab ships."""

WORDS_OF_A_FAMILY = ("family", "covers", "notes", "checked", "detect")
"""Keys of a family that change no weight once it is chosen."""

FieldClass = Literal["identity", "stage", "runtime"]

FIELD_CLASSES: dict[str, FieldClass] = {
    "recipe.name": "runtime",
    "recipe.pair": "runtime",  # the models count, not what the pair is called: see pair.base and the rest
    "recipe.zero_point": "identity",
    "recipe.conventions": "identity",
    "recipe.method": "identity",
    "recipe.parameters": "identity",
    "recipe.sweep": "identity",
    "recipe.merges": "identity",
    "recipe.merges.method": "identity",
    "recipe.merges.parameters": "identity",
    "recipe.merges.sweep": "identity",
    "recipe.seeds": "identity",
    "recipe.controls": "identity",
    "recipe.control_seeds": "identity",
    "recipe.output_dtype": "identity",
    "recipe.keep_weights": "runtime",
    "recipe.sink": "stage",
    "recipe.sink.last_layers": "stage",
    "recipe.sink.prompts": "stage",
    "recipe.sink.dtype": "stage",
    "recipe.evals": "stage",
    "recipe.evals.protocol": "stage",
    "recipe.evals.tasks": "stage",
    "recipe.evals.data": "stage",
    "recipe.evals.limit": "stage",
    "recipe.evals.batch_size": "stage",
    "recipe.evals.backend": "stage",
    "recipe.evals.template": "stage",
    "recipe.evals.max_gen_toks": "stage",
    "recipe.evals.task_folder": "stage",
    "recipe.evals.allow_code": "runtime",  # without it a task is refused, never answered in another way
    "recipe.evals.replicate": "runtime",  # a second answer beside the first; no other number changes
    "recipe.claims": "identity",
    "recipe.claims.margin": "identity",
    "recipe.claims.alpha": "identity",
    "recipe.claims.primary": "identity",
    "recipe.claims.correction": "identity",
    "recipe.track": "runtime",
    "pair.name": "runtime",
    "pair.base": "identity",  # by the fingerprint of what the source holds, not by its spelling
    "pair.base.id": "identity",
    "pair.base.revision": "identity",
    "pair.vlm": "identity",
    "pair.vlm.id": "identity",
    "pair.vlm.revision": "identity",
    "pair.ancestor": "identity",
    "pair.ancestor.id": "identity",
    "pair.ancestor.revision": "identity",
    "pair.family": "identity",  # by what a file says, not by its name: see MAPPING
    "pair.protocol": "stage",
}
"""The class of every field of a recipe (``recipe.``) and a pair (``pair.``), by dotted name."""

FIXED: dict[str, str] = {
    "zero_point": "zero_point",
    "conventions": "conventions",
    "recipe.output_dtype": "output_dtype",
    "recipe.claims.margin": "claims.margin",
    "recipe.claims.alpha": "claims.alpha",
    "recipe.claims.primary": "claims.primary",
    "recipe.claims.correction": "claims.correction",
}
"""What a run folder keeps besides the fingerprints: place in ``experiment.json``, name in messages."""


def point_id(
    spec: PointSpec,
    fingerprints: Mapping[str, str],
    output_dtype: str,
    arithmetic_version: int = ARITHMETIC_VERSION,
) -> str:
    """Return the id of a point: 12 hex digits of the hash of what determines its weights.

    A parent is its files and nothing else, so its id does not depend on ``output_dtype`` or the arithmetic.

    Args:
        spec: The point.
        fingerprints: Content hashes of the models by role, and that of the mapping; those the point does not read are
            ignored.
        output_dtype: As in the recipe: ``auto`` or the name of a dtype.
        arithmetic_version: Of the code that makes the weights.

    Raises:
        KeyError: The fingerprint of a model that the point reads is not given.
    """
    content: dict[str, Any] = {
        "fingerprints": {role: fingerprints[role] for role in spec.inputs},
        "method": spec.method,
        "parameters": spec.parameters,
        "seed": spec.seed,
        "zero_point": spec.zero_point,
        "conventions": spec.conventions,
    }
    if not spec.is_parent:
        content |= {"output_dtype": output_dtype, "arithmetic": arithmetic_version}
    if MAPPING in fingerprints and "vlm" in spec.inputs:
        content[MAPPING] = fingerprints[MAPPING]
    return hash_json(content)[:POINT_ID_DIGITS]


def stage_key(weights: str, stage: Mapping[str, Any]) -> str:
    """Return the key of one stage of a point; a stage file with another key is not done.

    Args:
        weights: Point id or hash of the weights that are measured.
        stage: Everything else that determines the outcome, as JSON can say it.
    """
    return hash_json({"weights": weights, "stage": stage})


def experiment_conflicts(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return why ``new`` may not continue in the run folder of ``old``; nothing if it may.

    More or fewer grid values, seeds, controls and tasks, and other stage settings, are no conflict.

    Args:
        old: What ``experiment.json`` of the folder says.
        new: What would be written there now.

    Returns:
        One sentence for each difference: what the folder holds and what is asked for.
    """
    problems = []
    hashes_old, hashes_new = old["fingerprints"], new["fingerprints"]
    for role in ("ancestor", "base", "vlm"):
        before, now = hashes_old.get(role), hashes_new.get(role)
        if before != now:
            problems.append(f"{role}: the folder was made with {_model(before)}, this run has {_model(now)}")
    before, now = (found.get(MAPPING, "of mergelab") for found in (hashes_old, hashes_new))
    if before != now:
        digits = slice(POINT_ID_DIGITS)
        problems.append(f"family: the folder was made with the rules {before[digits]}, this run has {now[digits]}")
    for place, name in FIXED.items():
        before, now = _at(old, place), _at(new, place)
        if canonical_json(before) != canonical_json(now):
            problems.append(f"{name}: the folder has {shown(before)}, this run asks for {shown(now)}")
    return problems


def _model(fingerprint: str | None) -> str:
    return "none" if fingerprint is None else f"weights {fingerprint[:POINT_ID_DIGITS]}"


def _at(experiment: Mapping[str, Any], place: str) -> Any:
    value: Any = experiment
    for part in place.split("."):
        value = value[part]
    return value


def hash_json(content: Any) -> str:
    """Return the hex SHA-256 of the canonical JSON of ``content``."""
    return hashlib.sha256(canonical_json(content).encode("utf-8")).hexdigest()


def hash_family(family: Family) -> str:
    """Return the hash of what a family does to names and tensors; what it is called and tells people is left out."""
    content = family.model_dump(mode="json", exclude_defaults=True)
    return hash_json({key: value for key, value in content.items() if key not in WORDS_OF_A_FAMILY})
