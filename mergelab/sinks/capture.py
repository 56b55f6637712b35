"""Reading attention rows off a running model without keeping an attention map.

An attention function registered with transformers calls the ``sdpa`` function for the model's own output and,
beside it, scores the same queries and keys block by block and reduces each block to row statistics. What
those statistics mean is in ``metric``; which prompts run is in ``measure``.

Shape letters: H query heads, Q queries, K keys.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

from mergelab.errors import DamagedFileError, PairingError
from mergelab.sinks.metric import Rows
from mergelab.sinks.scores import Projections

# For a name that contains "sdpa" transformers checks that the architecture can run it: we need that check.
IMPLEMENTATION = "mergelab_sdpa_capture"
EAGER_IMPLEMENTATION = "mergelab_eager_capture"
"""For models that sdpa cannot run (soft-capped scores, learned sink logits): their own eager function computes the
output, a map at a time, and the rows are read beside it as always."""

SCORE_ARGUMENTS = {
    "s_aux": "a learned sink logit takes part in its softmax, which the sdpa function does not compute",
    "sinks": "a learned sink logit takes part in its softmax, which the sdpa function does not compute",
    "softcap": "its scores are soft-capped, which the sdpa function does not compute",
    "position_bias": "a position bias is added to its scores, which this capture does not read",
}
"""Arguments of attention functions that change the scores, and what to tell about them."""


EAGER_ARGUMENTS = ("s_aux", "softcap")
"""Those of them that the eager path reads."""


class ArchitectureError(PairingError):
    """The sink metrics are not defined for this architecture, or its attention cannot be read."""


@dataclass
class _Recorder:
    """State of one forward pass: which modules to read, and what they gave."""

    architecture: str
    wanted: Mapping[int, nn.Module] | None
    """Layer id to attention module; None only notes which modules are called."""
    keep_projections: bool = False
    modules: dict[int, nn.Module] = field(default_factory=dict)
    rows: dict[int, Rows] = field(default_factory=dict)
    projections: dict[int, Projections] = field(default_factory=dict)
    terms: set[str] = field(default_factory=set)
    """What takes part in the softmax beside plain scores."""

    def note(self, module: nn.Module) -> int:
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            raise ArchitectureError(
                f"{self.architecture}: {type(module).__name__} has no layer_idx, expected the number "
                "of its layer. The sink metrics need a decoder language model."
            )
        if layer in self.modules:
            raise ArchitectureError(
                f"{self.architecture}: layer {layer} computes attention twice in one pass, expected "
                "self-attention once. Looped and encoder-decoder models have no single row for a query."
            )
        self.modules[layer] = module
        return layer


_RECORDER: ContextVar[_Recorder | None] = ContextVar("mergelab_sink_recorder", default=None)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention as ``sdpa`` does and let the active recorder read its rows."""
    recorder = _RECORDER.get()
    if recorder is not None:
        layer = recorder.note(module)
        _refuse_unreadable(recorder.architecture, module, (query, key), attention_mask, kwargs)
        projections = Projections(query[0], key[0], attention_mask, kwargs.get("scaling"))
        _record(recorder, layer, module, projections)
    return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **kwargs)


def _attend_eagerly(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention as the module's own eager function does and let the active recorder read its rows."""
    attend = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    recorder = _RECORDER.get()
    if attend is None:
        raise ArchitectureError(
            f"{type(module).__name__}: runs neither through sdpa nor through an eager function beside its class."
        )
    if recorder is not None:
        layer = recorder.note(module)
        visible = None if attention_mask is None else _visible_keys(attention_mask)
        others = {name: value for name, value in kwargs.items() if name not in EAGER_ARGUMENTS}
        mask = attention_mask if visible is None else visible
        _refuse_unreadable(recorder.architecture, module, (query, key), mask, others)
        projections = Projections(
            query[0], key[0], visible, kwargs.get("scaling"), kwargs.get("softcap"), kwargs.get("s_aux")
        )
        _record(recorder, layer, module, projections)
    return attend(module, query, key, value, attention_mask, **kwargs)


def _visible_keys(mask: Tensor) -> Tensor | None:
    """Return which keys an additive mask shows; None if it does more than to hide (any value but 0 and the least)."""
    visible = mask == 0
    hidden = mask <= torch.finfo(mask.dtype).min
    return visible if bool((visible | hidden).all()) else None


def _record(recorder: _Recorder, layer: int, module: nn.Module, projections: Projections) -> None:
    if projections.softcap is not None:
        recorder.terms.add("soft cap")
    if projections.sink_logits is not None:
        recorder.terms.add("sink logit, counted in 1 - a")
    if recorder.wanted is None or recorder.wanted.get(layer) is not module:
        return
    rows = projections.rows()
    # Neither a NaN nor an infinity may hide among rows that have something to compare.
    if not bool(torch.isfinite(rows.log_odds[rows.num_visible >= 2]).all()):
        raise DamagedFileError(
            f"{recorder.architecture}, layer {layer}: expected finite attention scores, found NaN "
            f"or infinity. The weights hold such values, or overflow in {projections.query.dtype}. Check them, "
            "or measure in float32."
        )
    recorder.rows[layer] = rows.to_cpu()
    if recorder.keep_projections:
        recorder.projections[layer] = projections.to_cpu()


AttentionInterface.register(IMPLEMENTATION, _attend)
# Without a mask function of the same name transformers would pass no mask at all: windows would be lost.
AttentionMaskInterface.register(IMPLEMENTATION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
AttentionInterface.register(EAGER_IMPLEMENTATION, _attend_eagerly)
AttentionMaskInterface.register(EAGER_IMPLEMENTATION, ALL_MASK_ATTENTION_FUNCTIONS["eager"])


def _refuse_unreadable(
    architecture: str,
    module: nn.Module,
    projected: tuple[Tensor, Tensor],
    attention_mask: Tensor | None,
    arguments: Mapping[str, Any],
) -> None:
    query, key = projected
    problems = [reason for name, reason in SCORE_ARGUMENTS.items() if arguments.get(name) is not None]
    if query.shape[2] != key.shape[2]:
        problems.append(f"{query.shape[2]} queries attend to {key.shape[2]} keys, expected self-attention")
    is_causal = arguments.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if attention_mask is None and not is_causal:
        problems.append("its attention sees later tokens, expected causal attention")
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        problems.append(f"its attention mask is {attention_mask.dtype} and may change scores, expected a boolean mask")
    elif attention_mask is not None and bool(attention_mask.triu(diagonal=1).any()):
        problems.append("its attention mask shows later tokens, expected causal attention")
    if problems:
        raise ArchitectureError(
            f"{architecture}, {type(module).__name__}: {'; '.join(dict.fromkeys(problems))}. "
            "The sink metrics are defined for causal softmax attention over the keys alone."
        )


@contextmanager
def _as_found(model: PreTrainedModel) -> Iterator[None]:
    """Run the model in eval mode with our attention function, and leave it exactly as it was."""
    modes = [(module, module.training) for module in model.modules()]
    configs = _configs(model)
    implementations = [(config, config._attn_implementation_internal) for config in configs]
    try:
        model.eval()
        try:
            model.set_attn_implementation(IMPLEMENTATION)
        except ValueError as error:
            if not getattr(model, "_supports_attention_backend", False):
                raise ArchitectureError(
                    f"{type(model).__name__} ({model.config.model_type}): transformers cannot run it "
                    "through an attention function of ours. Usual reason: it has no attention. "
                    "The sink metrics are defined for causal softmax attention over the keys."
                ) from error
            model.set_attn_implementation(EAGER_IMPLEMENTATION)
        yield
    finally:
        # Set on the configs directly: set_attn_implementation would check (and might reload) what was there.
        for config, implementation in implementations:
            config._attn_implementation_internal = implementation
        for module, training in modes:
            module.training = training


def _configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    owned: list[object] = [getattr(module, "config", None) for module in model.modules()]
    waiting = [config for config in owned if isinstance(config, PreTrainedConfig)]
    found: dict[int, PreTrainedConfig] = {}
    while waiting:
        config = waiting.pop()
        if id(config) not in found:
            found[id(config)] = config
            parts = (getattr(config, name, None) for name in config.sub_configs)
            waiting.extend(part for part in parts if isinstance(part, PreTrainedConfig))
    return list(found.values())


class Capture:
    """Reads attention rows of a model inside ``capturing``.

    ``layers`` are the ids of all layers with softmax attention, in order; ``terms`` name what takes part in the
    softmax beside plain scores (a soft cap, a learned sink logit), mostly nothing.
    """

    def __init__(self, model: PreTrainedModel, token_ids: list[int]) -> None:
        self._model = model
        found = self._forward(token_ids[:2], None)
        self._modules = found.modules
        self.terms: tuple[str, ...] = tuple(sorted(found.terms))
        self.layers: tuple[int, ...] = tuple(sorted(self._modules))
        if not self.layers:
            raise ArchitectureError(
                f"{type(model).__name__} ({model.config.model_type}): not one layer called softmax "
                "attention through transformers' attention interface, so there is nothing to "
                "measure. State-space models have none; models with code of their own must use "
                "ALL_ATTENTION_FUNCTIONS."
            )

    def rows(self, token_ids: list[int], layers: tuple[int, ...]) -> dict[int, Rows]:
        """Run the model once over one prompt and return the rows of ``layers``, on the CPU.

        Args:
            token_ids: One prompt of T >= 1 tokens; no padding, so no row depends on a batch.
            layers: Ids out of ``self.layers``.

        Returns:
            For each layer its Rows of (H, T).

        Raises:
            ArchitectureError: The attention is not causal softmax attention over the keys alone.
            DamagedFileError: Scores are NaN or infinite.
        """
        return self._read(token_ids, layers).rows

    def rows_and_projections(
        self, token_ids: list[int], layers: tuple[int, ...]
    ) -> tuple[dict[int, Rows], dict[int, Projections]]:
        """Run the model once as ``rows`` does and return beside the rows what their scores are made of."""
        recorder = self._read(token_ids, layers, keep_projections=True)
        return recorder.rows, recorder.projections

    def _read(self, token_ids: list[int], layers: tuple[int, ...], keep_projections: bool = False) -> _Recorder:
        wanted = {layer: self._modules[layer] for layer in layers}
        recorder = self._forward(token_ids, wanted, keep_projections)
        if missing := sorted(set(layers) - set(recorder.rows)):
            raise ArchitectureError(
                f"{type(self._model).__name__}: layers {missing} computed attention for one prompt and not "
                "for another. The sink metrics need the same layers for each prompt."
            )
        recorder.rows = {layer: recorder.rows[layer] for layer in sorted(recorder.rows)}
        return recorder

    def _forward(
        self, token_ids: list[int], wanted: Mapping[int, nn.Module] | None, keep_projections: bool = False
    ) -> _Recorder:
        recorder = _Recorder(type(self._model).__name__, wanted, keep_projections)
        input_ids = torch.tensor([token_ids], device=self._model.device)
        token = _RECORDER.set(recorder)
        try:
            with torch.no_grad():
                self._model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids), use_cache=False)
        finally:
            _RECORDER.reset(token)
        return recorder


@contextmanager
def capturing(model: PreTrainedModel, token_ids: list[int]) -> Iterator[Capture]:
    """Yield a Capture of ``model``; on exit, even by an error, the model is exactly as it was before.

    Attention implementation (of every config in the model) and training flags (of every module) are put back;
    weights, buffers and the model's dtype are never touched, and no gradient is recorded.

    Args:
        model: A causal language model on any device, in any float dtype.
        token_ids: Two or more token ids that show which layers compute softmax attention.

    Raises:
        ArchitectureError: The model is an encoder-decoder, its attention cannot run through ``sdpa``, is not
            causal, or no layer calls it.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        raise ArchitectureError(
            f"{type(model).__name__} is an encoder-decoder; the sink metrics need a decoder-only model."
        )
    with _as_found(model):
        yield Capture(model, token_ids)
