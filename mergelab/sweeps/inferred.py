"""The fallback for vlms of no known family: infer how their names map to base's, and say how sure that is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mergelab.checkpoints.headers import Checkpoint
from mergelab.checkpoints.safetensors_format import TensorHeader
from mergelab.errors import PairingError, problem_list
from mergelab.towers.confidence import Findings, Report, report_on
from mergelab.towers.inference import Inference, find_text_config, infer_tower, prediction_layers
from mergelab.towers.inferred_rule import Setting, family_of, role_rules
from mergelab.towers.layouts import Tower, first, locate_tower, text_config_of
from mergelab.towers.pairing import Pairing
from mergelab.towers.parts import EMBEDDING
from mergelab.towers.rules import Family

SHOWN_MISSING = 6


@dataclass(frozen=True)
class Inferred:
    """A family that was inferred from one vlm, with the report's material still to be paired."""

    family: Family
    findings: Findings


def infer_family(checkpoints: Mapping[str, Checkpoint]) -> Inferred:
    """Infer the family of the vlm from the names, shapes and sampled rows of base.

    Raises:
        PairingError: Base's own names are unknown, no tower or two, or tensors of base without a place.
    """
    base, vlm = checkpoints["base"], checkpoints["vlm"]
    tower = locate_tower(base.tensors, base.config)
    shapes = {name: tuple(header.shape) for name, header in vlm.tensors.items()}
    headers, inference = best_reading(base, tower, shapes)
    if inference.missing or not inference.match.layers:
        raise PairingError(no_place(inference))

    from mergelab.engine.inference import Judge, Models, settle_outside  # reads numbers, with torch; not before here

    models = Models(headers, vlm)
    outside, undecided = settle_outside(inference, models)
    roles = inference.roles(shapes, outside)
    setting = Setting(
        roles=role_rules(inference, shapes, roles),
        text_config=text_section(vlm, inference, headers[EMBEDDING].shape[1]),
        model_type=causal_type(tower, vlm),
        vlm_type=str(vlm.config.get("model_type") or ""),
        base=tower.family,
        covers=f"inferred for {vlm.config.get('model_type') or vlm.folder.name}",
    )
    operations, open_ends = Judge(models, inference, outside, setting).settle()
    family = family_of(inference, operations, outside, setting)
    findings = Findings(
        prefix=inference.prefix,
        runner_up=inference.runner_up,
        runner_up_coverage=inference.runner_up_coverage,
        operations=tuple(operation.text for operation in operations if not operation.is_trivial)
        + tuple(
            f"layers {', '.join(map(str, inference.dropped))} are no layers of base" for _ in inference.dropped[:1]
        ),
        undecided=(*undecided, *open_ends),
        roles=roles,
        rule=family.to_yaml(),
    )
    return Inferred(family, findings)


def report_pairing(inferred: Inferred, pairing: Pairing, checkpoints: Mapping[str, Checkpoint]) -> Report:
    """Return how sure an inferred family is, now that its pairing and sampled rows are there."""
    from mergelab.engine.ancestry import ancestry_digest

    return report_on(inferred.findings, pairing, ancestry_digest(pairing, checkpoints))


def best_reading(
    base: Checkpoint, tower: Tower, shapes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, TensorHeader], Inference]:
    """Return base's headers by canonical name and what is inferred from them: whole, or taken apart where base fuses.

    Layers for multi-token prediction are left out where the vlm has none.
    """
    optional = prediction_layers(tower.stored, tower.text_config)
    found: list[tuple[dict[str, TensorHeader], Inference]] = []
    refusals: list[PairingError] = []
    for apart in (False, True) if tower.parts else (False,):
        headers = base_headers(base, tower, apart)
        known = {name: tuple(header.shape) for name, header in headers.items()}
        for unneeded in (set(), optional) if optional else (set(),):
            try:
                found.append((headers, infer_tower(known, shapes, unneeded)))
            except PairingError as refusal:
                refusals.append(refusal)
    if not found:
        raise refusals[0]
    return min(found, key=lambda pair: (not pair[1].match.layers, len(pair[1].missing)))


def base_headers(base: Checkpoint, tower: Tower, apart: bool) -> dict[str, TensorHeader]:
    """Return canonical name -> header of base, fused tensors whole or as their parts."""
    headers = {name: base.tensors[stored] for name, stored in tower.stored.items()}
    if apart:
        for fused, parts in tower.parts.items():
            stored = tower.stored[fused]
            labels = {f"{stored}[{part.label}]": part for part in parts}
            read = base.with_parts({label: (stored, part.view) for label, part in labels.items()}).parts
            del headers[fused]
            headers |= {part.name: read[label] for label, part in labels.items()}
    return headers


def text_section(vlm: Checkpoint, inference: Inference, width: int) -> str:
    """Return where the vlm's config describes its tower, empty where that is found without being told."""
    usual = text_config_of(vlm.config)
    return "" if "num_hidden_layers" in usual else find_text_config(vlm.config, inference.match, width)


def causal_type(base: Tower, vlm: Checkpoint) -> str:
    """Return base's ``model_type`` where transformers knows neither the vlm's nor its text config's, else nothing."""
    from transformers import CONFIG_MAPPING

    said = (str(config.get("model_type") or "") for config in (vlm.config, text_config_of(vlm.config)))
    return "" if any(kind in CONFIG_MAPPING for kind in said) else str(base.text_config.get("model_type") or "")


def no_place(inference: Inference) -> str:
    """Word the refusal of a vlm in which tensors of base are not found."""
    missing = inference.missing
    shown = first(missing, SHOWN_MISSING)
    share = f"{inference.match.coverage:.0%}"
    guess = f"the best guess at its tower, {inference.prefix}.*, holds {share} of base's layer tensors"
    if not inference.match.layers:
        guess += "; its layers cannot be lined up with base's"
    return problem_list(f"{guess}. Without a place:", shown) if shown else f"{guess}."
