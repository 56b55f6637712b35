"""What the catalogue of families is written with: sizes, shared configs, one dataclass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tests.builders import TEXT_SIZE as TEXT

Layout = Literal["hub", "native", "repeated", "transposed"]

IMAGE = 30
"""The row of the picture token."""

ROPE = {"rope_type": "default", "rope_theta": 5000.0}
MROPE = {**ROPE, "mrope_section": [1, 1, 0]}
GLM_ROPE = {**ROPE, "partial_rotary_factor": 1.0}
YARN = {**ROPE, "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8}
VIT: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
CLIP = {**VIT, "model_type": "clip_vision_model", "projection_dim": 16}
SIGLIP = {**VIT, "model_type": "siglip_vision_model", "vision_use_head": False}
PIXTRAL = {**VIT, "model_type": "pixtral"}
QWEN_VIT = {"depth": 1, "num_heads": 2, "intermediate_size": 32, "hidden_size": 16, "out_hidden_size": 16}


@dataclass(frozen=True)
class Family:
    """One class of transformers, tiny."""

    model_type: str
    text: Mapping[str, Any]
    """Fields of the nested text config."""
    rest: Mapping[str, Any] | None
    """The other fields of the vlm's config; None for a plain text checkpoint that stands as vlm."""
    base: Mapping[str, Any]
    """Fields in which the plain text config differs from ``text``; None: it lacks the field."""
    name: str = ""
    layouts: tuple[Layout, ...] = ("hub", "native")
    """Layouts on disk that differ; ``native`` alone where the class was never restructured."""
    factor: float = 1.0
    """Logits of the vlm's class on text, divided by those of the plain text class."""
    tolerance: float = 0.0
    """How far the two may differ; zero is bit for bit."""
    tied_base: bool = False
    """Whether the base ties its head although the vlm does not: the usual case of small models."""

    @property
    def id(self) -> str:
        """What a test calls it."""
        return self.name or self.model_type

    @property
    def sees_pictures(self) -> bool:
        """True for a vlm."""
        return self.rest is not None


def text(model_type: str, **fields: Any) -> dict[str, Any]:
    """Return a text config."""
    return {**TEXT, "model_type": model_type, **fields}


def nested(model_type: str, vision: Mapping[str, Any], text: Mapping[str, Any], **fields: Any) -> Family:
    """Return a family whose tower has a plain text class of its own name."""
    known = {
        key: fields.pop(key) for key in ("base", "name", "layouts", "factor", "tolerance", "tied_base") if key in fields
    }
    tied = text["tie_word_embeddings"]
    return Family(
        model_type,
        text,
        {"vision_config": dict(vision), "tie_word_embeddings": tied, **fields},
        known.pop("base", {}),
        **known,
    )


LLAMA, QWEN2, QWEN3, MISTRAL = text("llama"), text("qwen2"), text("qwen3", head_dim=4), text("mistral", head_dim=4)
ONE: tuple[Layout, ...] = ("native",)
TOKEN = {"image_token_id": IMAGE}
INDEX = {"image_token_index": IMAGE}
LLAVA = {**INDEX, "vision_feature_layer": -1}
PINS = {"image_grid_pinpoints": [[8, 8]]}
COHERE = {"tie_word_embeddings": True, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
GEMMA3_ROPE = {"sliding_attention": {"rope_type": "default", "rope_theta": 100.0}, "full_attention": ROPE}
MOE = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROUTED = {
    "n_routed_experts": 3,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
HYBRID = {
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MOLMO_VIT = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "image_size": [8, 8],
    "patch_size": 4,
}
MOLMO_ADAPTER = {
    "vision_feature_layer": [0, 1],
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 24,
    "text_hidden_size": 16,
}
