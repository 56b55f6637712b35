"""Diagnoses a pair: the sinks of its models on the same tokens, what moved around them, and how far weights moved."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from mergelab import __version__
from mergelab.checkpoints.fingerprint import fingerprint_checkpoint
from mergelab.config import Pair
from mergelab.device import choose_device, limit_threads
from mergelab.engine.ancestry import check_related
from mergelab.engine.checks import check_equal_tensors, check_same_rows
from mergelab.engine.inputs import Inputs
from mergelab.engine.plan import BLOCK_ENTRIES
from mergelab.live.model import load_text_model
from mergelab.sinks.diagnosis import Reading, compare, displacement_record, read_model, sink_record
from mergelab.sinks.displacement import Displacements
from mergelab.sinks.drift import Drift, spread
from mergelab.sinks.measure import Inputs as TokenInputs
from mergelab.sinks.measure import encode_prompts
from mergelab.sinks.prompts import Prompts, load_prompts
from mergelab.sinks.qk_norm import qk_norm_kind
from mergelab.sweeps.experiment import load_tokenizer
from mergelab.sweeps.loading import tower_of
from mergelab.sweeps.models import Models
from mergelab.towers.names import module_name
from mergelab.towers.pairs import PairedTensor

FORMAT = 1
ATTENTION_PRODUCTS = ("q", "k", "qkv")
"""Kinds whose operator norms bound B_gap: measured on every layer."""
SEED = 0
ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class Request:
    """How a pair is diagnosed."""

    dtype: str = "float32"
    """Of the forward passes."""
    last_layers: int | None = None
    prompts: str = "builtin-v1"
    device: str = "auto"


def diagnose_pair(
    pair: Pair, models: Models, request: Request, say: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Diagnose a pair; models are loaded one after the other.

    Args:
        pair: The pair.
        models: Its opened models.
        request: Dtype, layers, prompts and device.
        say: Told what is being done.

    Returns:
        JSON-able. ``models``: role -> sink record (``sinks.diagnosis.sink_record``) with ``qk_norm``; the roles are
        base, tower and maybe ancestor. ``displacement``: B_gap, margin, Lemma 1
        (``sinks.displacement.summarize_displacements``). ``drift``: ``tower`` and, with an ancestor, ``base``: kind ->
        numbers of ``sinks.drift.Drift.record``, base -> tower and ancestor -> base. Provenance: ``format``,
        ``mergelab``, ``pair``, ``fingerprints``, ``prompts``, ``token_counts``, ``chat_template_sha256``, ``dtype``,
        ``last_layers``, ``seconds``.

    Raises:
        PairingError: The models do not fit each other, or their attention cannot be compared.
        RecipeError: Prompts or ``last_layers`` do not fit the models.
        DamagedFileError: A tokenizer is missing; scores are not finite.
    """
    started = time.perf_counter()
    device = choose_device(request.device)
    dtype = getattr(torch, request.dtype)
    prompts = load_prompts(request.prompts)
    check_same_rows(models.pairing)
    check_equal_tensors(models.pairing, models.checkpoints)
    check_related(models.pairing, models.checkpoints)
    limit_threads(models.num_parameters("vlm"), device)
    inputs = encode_prompts(load_tokenizer(models.checkpoints["base"]), prompts)

    say("Reading base")
    base, norm = _read(_text_model(models, "base", device, dtype), prompts, inputs, keep_projections=True)
    sinks = {"base": {**sink_record(base, request.last_layers), "qk_norm": norm}}
    _release()
    say("Reading tower")
    (tower, displacements), norm = _compared(_tower(models, device, dtype), prompts, inputs, base)
    sinks["tower"] = {**sink_record(tower, request.last_layers), "qk_norm": norm}
    _release()
    if "ancestor" in models.checkpoints:
        say("Reading ancestor")
        ancestor, norm = _read(_text_model(models, "ancestor", device, dtype), prompts, inputs)
        sinks["ancestor"] = {**sink_record(ancestor, request.last_layers), "qk_norm": norm}
        _release()

    say("Comparing weights")
    drift = {"tower": weight_drift(models, "base", "vlm", device)}
    if "ancestor" in models.checkpoints:
        drift["base"] = weight_drift(models, "ancestor", "base", device)
    return {
        "format": FORMAT,
        "mergelab": __version__,
        "pair": pair.model_dump(mode="json"),
        "fingerprints": {role: fingerprint_checkpoint(model) for role, model in models.checkpoints.items()},
        "prompts": {"name": prompts.name, "sha256": prompts.sha256},
        "token_counts": [len(token_ids) for token_ids in inputs.token_ids],
        "chat_template_sha256": inputs.chat_template_sha256,
        "enable_thinking": inputs.enable_thinking,
        "token_ids_sha256": inputs.sha256(),
        "dtype": request.dtype,
        "last_layers": sinks["base"]["last_layers"],
        "models": sinks,
        "displacement": displacement_record(displacements, request.last_layers),
        "drift": drift,
        "seconds": time.perf_counter() - started,
    }


def weight_drift(models: Models, before: str, after: str, device: str) -> dict[str, Any]:
    """Return how far the weights moved from one model of a pair to another, by module kind.

    Entries are read in blocks. Whole matrices are read for operator norms: of q and k in every layer, of the others
    in at most ``drift.MAX_LAYERS`` layers.
    """
    inputs = Inputs(models.checkpoints, device=device)
    kinds: dict[str, Drift] = {}
    layers: dict[str, list[int]] = {}
    named = [(paired, *module_name(paired.name, paired.kind)) for paired in models.pairing.tensors]
    for paired, kind, layer in named:
        if layer is not None and paired.kind in ("attention", "mlp"):
            layers.setdefault(kind, []).append(layer)
    sampled = {
        kind: set(found if kind in ATTENTION_PRODUCTS else spread(sorted(found))) for kind, found in layers.items()
    }
    for paired, kind, layer in named:
        drift = kinds.setdefault(kind, Drift())
        drift.num_tensors += 1
        if layer is not None and layer in sampled.get(kind, ()):
            first, second = (
                inputs.float_entries(role, paired.stored[role], 0, inputs.header(role, paired.stored[role]).num_entries)
                for role in (before, after)
            )
            drift.add(layer, first, second)
            drift.add_matrix(layer, first.view(*paired.shape), second.view(*paired.shape), SEED)
            continue
        for first, second in _blocks(inputs, paired, before, after):
            drift.add(layer, first, second)
    return {kind: drift.record() for kind, drift in kinds.items()}


def _blocks(
    inputs: Inputs, paired: PairedTensor, before: str, after: str
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the entries of one tensor in both models, a block at a time; of a vocabulary the shared rows."""
    if paired.rows is not None:
        width = paired.shape[1] if len(paired.shape) > 1 else 1
        rows = {role: list(paired.rows.rows[role]) for role in (before, after)}
        for start in range(0, paired.rows.num_shared, ROWS_AT_ONCE):
            first, second = (
                inputs.float_rows(role, paired.stored[role], rows[role][start : start + ROWS_AT_ONCE], width)
                for role in (before, after)
            )
            yield first, second
        return
    num_entries = inputs.header(before, paired.stored[before]).num_entries
    for start in range(0, num_entries, BLOCK_ENTRIES):
        stop = min(start + BLOCK_ENTRIES, num_entries)
        first, second = (inputs.float_entries(role, paired.stored[role], start, stop) for role in (before, after))
        yield first, second


# A model lives in the frame of the function that reads it and is gone when that returns.


def _read(
    model: PreTrainedModel, prompts: Prompts, token_inputs: TokenInputs, *, keep_projections: bool = False
) -> tuple[Reading, str]:
    return read_model(model, prompts, token_inputs, keep_projections=keep_projections), _qk_norm(model)


def _compared(
    model: PreTrainedModel, prompts: Prompts, token_inputs: TokenInputs, base: Reading
) -> tuple[tuple[Reading, tuple[Mapping[int, Displacements], ...]], str]:
    return compare(model, prompts, token_inputs, base), _qk_norm(model)


def _text_model(models: Models, role: str, device: str, dtype: torch.dtype) -> PreTrainedModel:
    return load_text_model(models.checkpoints[role].folder, device, dtype).text


def _tower(models: Models, device: str, dtype: torch.dtype) -> PreTrainedModel:
    return tower_of(models.checkpoints["vlm"], models.pairing.towers["vlm"], device, dtype).text


def _qk_norm(model: PreTrainedModel) -> str:
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return qk_norm_kind(shapes, model.config.get_text_config().to_dict())


def _release() -> None:
    """Free the weights of the last model before the next one is loaded."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
