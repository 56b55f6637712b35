"""Base, tower and ancestor on the same tokens: sinks of each, and how the tower's scores moved around the base's.

The models are read one after the other, so they need not fit into memory together: of the base what its scores
are made of is kept (on the CPU, linear in the number of tokens), and each prompt of the tower is compared at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from mergelab.errors import RecipeError, problem_list
from mergelab.sinks.capture import ArchitectureError, capturing
from mergelab.sinks.displacement import Displacements, compare_projections, summarize_displacements
from mergelab.sinks.measure import Inputs, check_lengths, choose_layers
from mergelab.sinks.metric import Rows
from mergelab.sinks.prompts import Prompts
from mergelab.sinks.scores import Projections
from mergelab.sinks.summary import summarize_rows

SINGLE_NUMBERS = (
    *("sink_strength", "sink_strength_bf16", "sink_strength_low", "sink_strength_high"),
    *("position0_share", "position0_mass", "prevalence", "gap_to_second", "sink_rate"),
    *("num_rows", "num_saturated_rows", "num_skipped_rows", "per_prompt"),
)
"""What a model's record takes from ``summary.summarize_rows`` over the last layers."""


@dataclass(frozen=True)
class Reading:
    """What one model gave for every prompt, all layers with softmax attention."""

    rows: tuple[Mapping[int, Rows], ...]
    dtype: str
    """Of the forward pass."""
    softmax_terms: tuple[str, ...]
    """What takes part in the softmax beside plain scores; see ``capture.Capture``."""
    projections: tuple[Mapping[int, Projections], ...] = ()
    """On the CPU; empty unless asked for."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Ids of the layers, in order."""
        return tuple(sorted(self.rows[0]))


def read_model(model: PreTrainedModel, prompts: Prompts, inputs: Inputs, *, keep_projections: bool = False) -> Reading:
    """Run a model over the prompts and return the rows of every layer.

    Args:
        model: A causal language model; it is left as found.
        prompts: For messages.
        inputs: Their tokens, the same for every model of a diagnosis.
        keep_projections: Keep what the scores are made of, for ``compare``.

    Raises:
        RecipeError: A prompt is too short, too long, or has tokens the model lacks.
        ArchitectureError: The attention cannot be read (``capture``).
        DamagedFileError: Attention scores are NaN or infinite.
    """
    _check_inputs(model, prompts, inputs)
    rows, projections = [], []
    with capturing(model, inputs.token_ids[0]) as capture:
        for token_ids in inputs.token_ids:
            found, made_of = capture.rows_and_projections(token_ids, capture.layers)
            rows.append(found)
            if keep_projections:
                projections.append(made_of)
    return Reading(tuple(rows), _dtype_name(model), capture.terms, tuple(projections))


def compare(
    model: PreTrainedModel, prompts: Prompts, inputs: Inputs, base: Reading
) -> tuple[Reading, tuple[Mapping[int, Displacements], ...]]:
    """Run the tower over the prompts and compare its scores with the base's, prompt by prompt.

    Args:
        model: The tower.
        prompts: For messages.
        inputs: The very tokens that ``base`` was read with.
        base: A reading with projections.

    Returns:
        The tower's reading, and for every prompt the displacements by layer.

    Raises:
        ArchitectureError: Its layers, heads or visible keys are not those of the base, or as ``read_model``.
        RecipeError: As ``read_model``.
        DamagedFileError: As ``read_model``.
    """
    _check_inputs(model, prompts, inputs)
    rows, displacements = [], []
    with capturing(model, inputs.token_ids[0]) as capture:
        if capture.layers != base.layers:
            raise ArchitectureError(
                f"layers with softmax attention are {list(base.layers)} in base and {list(capture.layers)} in the "
                "tower, expected the same. Diagnose a vlm together with the base it was made from."
            )
        for token_ids, before in zip(inputs.token_ids, base.projections, strict=True):
            found, after = capture.rows_and_projections(token_ids, capture.layers)
            rows.append(found)
            displacements.append({layer: _compare(layer, before[layer], after[layer]) for layer in capture.layers})
    return Reading(tuple(rows), _dtype_name(model), capture.terms), tuple(displacements)


def sink_record(reading: Reading, last_layers: int | None) -> dict[str, Any]:
    """Return the sink numbers of one model: single ones over the last layers, curves over all.

    Args:
        reading: Of the model.
        last_layers: As ``measure.measure_sink``; the single numbers equal those of its record.

    Returns:
        JSON-able: the single numbers of ``summary.summarize_rows``, ``dtype``, ``softmax_terms``, ``last_layers``,
        ``layers`` (those of the single numbers), ``num_layers``, and over all layers ``per_layer`` (layer ->
        sink_strength, position0_share), ``per_head`` (layers x heads, median G) and ``window_layers``.

    Raises:
        RecipeError: ``last_layers`` is not between 1 and the number of layers.
        ArchitectureError: The windows leave nothing to compare.
    """
    layers = choose_layers(reading.layers, last_layers)
    try:
        last = summarize_rows([{layer: rows[layer] for layer in layers} for rows in reading.rows])
        everything = summarize_rows(reading.rows)
        single = {layer: summarize_rows([{layer: rows[layer]} for rows in reading.rows]) for layer in reading.layers}
    except ValueError as error:
        raise ArchitectureError(f"{error}. The windows of this model leave nothing to compare.") from error
    return {
        **{name: last[name] for name in SINGLE_NUMBERS},
        "dtype": reading.dtype,
        "last_layers": len(layers),
        "layers": list(layers),
        "num_layers": len(reading.layers),
        "softmax_terms": list(reading.softmax_terms),
        "per_layer": {
            str(layer): {
                "sink_strength": summary["sink_strength"],
                "position0_share": summary["position0_share"],
            }
            for layer, summary in single.items()
        },
        "per_head": everything["per_head"],
        "window_layers": everything["window_layers"],
    }


def displacement_record(
    displacements: Sequence[Mapping[int, Displacements]], last_layers: int | None
) -> dict[str, Any]:
    """Return B_gap, the margin G - B and the check of Lemma 1; see ``displacement.summarize_displacements``."""
    layers = choose_layers(tuple(sorted(displacements[0])), last_layers)
    return summarize_displacements(displacements, layers)


def _check_inputs(model: PreTrainedModel, prompts: Prompts, inputs: Inputs) -> None:
    check_lengths(model, prompts, inputs)
    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, Tensor)
    num_rows = embedding.shape[0]
    problems = [
        f"prompt {number}: token {max(token_ids)}, the model has {num_rows}"
        for number, token_ids in enumerate(inputs.token_ids, start=1)
        if max(token_ids) >= num_rows
    ]
    if problems:
        advice = "The models of a diagnosis read the same tokens, those of base."
        raise RecipeError(
            problem_list(f"prompts {prompts.name}: {type(model).__name__} lacks tokens", problems, advice)
        )


def _compare(layer: int, before: Projections, after: Projections) -> Displacements:
    try:
        return compare_projections(before, after)
    except ValueError as error:
        raise ArchitectureError(
            f"layer {layer}: {error}. B_gap compares score by score, so base and tower must see the same keys."
        ) from error


def _dtype_name(model: PreTrainedModel) -> str:
    return str(model.dtype).removeprefix("torch.")
