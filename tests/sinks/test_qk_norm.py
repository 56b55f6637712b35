"""The kind of QK norm on real model classes."""

from typing import Any

import pytest

from mergelab.sinks.qk_norm import qk_norm_kind
from tests.sinks.models import tiny


def kind_of(family: str, **overrides: Any) -> str:
    model = tiny(family, **overrides)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return qk_norm_kind(shapes, model.config.get_text_config().to_dict())


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *((family, "none") for family in ("llama", "mistral", "qwen2", "phi3")),
        *((family, "per head") for family in ("qwen3", "gemma3_text")),
        *((family, "layerwise") for family in ("olmo2", "olmo3")),
    ],
)
def test_kind_of_families(family: str, kind: str) -> None:
    assert kind_of(family) == kind


def test_gains_of_every_head_are_per_head() -> None:
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    names = [f"model.layers.0.self_attn.{part}_norm.weight" for part in "qk"]
    assert qk_norm_kind({names[0]: (4, 8), names[1]: (2, 8)}, config) == "per head"
    assert qk_norm_kind({names[0]: (32,), names[1]: (16,)}, config) == "layerwise"
    assert qk_norm_kind({names[0]: (32,), names[1]: (8,)}, config) == "unknown"
    assert qk_norm_kind({names[0]: (5,)}, config) == "unknown"
    assert qk_norm_kind({names[0]: (8,)}, {}) == "unknown"
