"""Tiny random models of several families, built from config classes; nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SIZE: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # The default 0.02 gives nearly uniform attention, where a wrong row would look right.
    "initializer_range": 0.4,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma3_text": {
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 16,
    },
    "mistral": {"sliding_window": 6},
    "phi3": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma2": {
        "attn_logit_softcapping": 50.0,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gpt_oss": {
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "rope_parameters": {"rope_type": "default"},
    },
}


def tiny(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Return a random causal language model of ``family``: float32, eval mode, default attention."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**SIZE, **FAMILIES.get(family, {}), **overrides})
    return AutoModelForCausalLM.from_config(config).eval()
