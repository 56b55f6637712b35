"""What two text configs compute differently although their tensors have the same shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEAD_KEYS = ("num_attention_heads", "num_key_value_heads", "head_dim")
"""Fields that cut a projection into heads; tensors of equal shape but other heads are other functions."""

NOTED_KEYS = (
    "rope_theta",
    "rope_type",
    "rope_factor",
    "partial_rotary_factor",
    "rms_norm_eps",
    "layer_norm_eps",
    "hidden_act",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
    "max_position_embeddings",
    "tie_word_embeddings",
    "logit_scale",
    "logits_scaling",
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "query_pre_attn_scalar",
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "norm_topk_prob",
    "num_experts_per_tok",
)


def config_differences(base_config: Mapping[str, Any], vlm_text_config: Mapping[str, Any]) -> list[str]:
    """Return one note per field that both configs state differently, and one for the fields only one states.

    RoPE fields are found at the top level, in ``rope_parameters`` (transformers 5) or in ``rope_scaling``.
    The multimodal RoPE of Qwen counts as the default one, which it equals on text. Vision-language configs
    are often sparse: a field that is not stated has its class default, which is not known here.
    """
    base, vlm = flattened(base_config), flattened(vlm_text_config)
    notes = []
    alone = []
    for key in (*HEAD_KEYS, *NOTED_KEYS):
        first, second = base.get(key), vlm.get(key)
        if first == second:
            continue
        if first is None or second is None:
            side, value = ("base", first) if second is None else ("vlm", second)
            alone.append(f"{key} (only {side}: {value})")
        else:
            notes.append(f"config {key}: base {first}, vlm {second}")
    if alone:
        notes.append(f"config fields that only one side states: {', '.join(alone)}")
    return notes


def head_problems(role: str, config: Mapping[str, Any], vlm_text_config: Mapping[str, Any]) -> list[str]:
    """Return the ``HEAD_KEYS`` that both configs state, and state differently; defaults are not guessed."""
    return [
        f"config {key}: {role} {config[key]}, vlm {vlm_text_config[key]}"
        for key in HEAD_KEYS
        if isinstance(config.get(key), int)
        and isinstance(vlm_text_config.get(key), int)
        and config[key] != vlm_text_config[key]
    ]


def flattened(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with its RoPE fields at the top and derived head sizes filled in."""
    flat = dict(config)
    for key in ("rope_scaling", "rope_parameters"):
        rope = config.get(key)
        if isinstance(rope, Mapping):
            flat["rope_theta"] = rope.get("rope_theta", flat.get("rope_theta"))
            flat["rope_type"] = rope.get("rope_type", rope.get("type"))
            flat["rope_factor"] = rope.get("factor")
            if any(isinstance(value, Mapping) for value in rope.values()):
                # One setting per layer type, as Olmo3 and Gemma3 have: compared as a whole.
                flat["rope_type"] = {str(name): value for name, value in rope.items()}
    if flat.get("rope_type") == "mrope" or flat.get("rope_type") is None:
        flat["rope_type"] = "default"
    hidden, heads = flat.get("hidden_size"), flat.get("num_attention_heads")
    if flat.get("head_dim") is None and isinstance(hidden, int) and isinstance(heads, int) and heads:
        flat["head_dim"] = hidden // heads
    if flat.get("num_key_value_heads") is None:
        flat["num_key_value_heads"] = heads
    return flat
