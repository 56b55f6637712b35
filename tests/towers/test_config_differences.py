from typing import Any

import pytest

from mergelab.towers.config_differences import config_differences, head_problems

QWEN3 = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
}


def test_equal_configs_have_no_notes() -> None:
    assert config_differences(QWEN3, dict(QWEN3)) == []


@pytest.mark.parametrize(
    ("base", "vlm", "note"),
    [
        ({"rope_theta": 1e6}, {"rope_theta": 5e6}, "config rope_theta: base 1000000.0, vlm 5000000.0"),
        (
            {"rope_theta": 1e6},
            {"rope_parameters": {"rope_theta": 5e6, "rope_type": "default"}},
            "config rope_theta: base 1000000.0, vlm 5000000.0",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0}},
            {"rope_theta": 1.0},
            "config rope_type: base yarn, vlm default",
        ),
        ({"rms_norm_eps": 1e-5}, {"rms_norm_eps": 1e-6}, "config rms_norm_eps: base 1e-05, vlm 1e-06"),
        (QWEN3, {**QWEN3, "head_dim": None, "hidden_size": 32}, "config head_dim: base 16, vlm 8"),
        ({"sliding_window": 512}, {"sliding_window": 4096}, "config sliding_window: base 512, vlm 4096"),
        (
            {"tie_word_embeddings": True},
            {"tie_word_embeddings": False},
            "config tie_word_embeddings: base True, vlm False",
        ),
        (
            {"logit_scale": 0.0625},
            {},
            "config fields that only one side states: logit_scale (only base: 0.0625)",
        ),
        ({}, {"hidden_act": "silu"}, "config fields that only one side states: hidden_act (only vlm: silu)"),
    ],
)
def test_differences_are_noted(base: dict[str, Any], vlm: dict[str, Any], note: str) -> None:
    assert config_differences(base, vlm) == [note]


def test_multimodal_rope_is_default_rope_on_text() -> None:
    vlm = {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
    assert config_differences({"rope_theta": 1e6}, vlm) == []


def test_rope_of_each_layer_type_is_compared_as_a_whole() -> None:
    rope = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 1e4}}
    assert config_differences({"rope_parameters": rope}, {"rope_parameters": rope}) == []
    other = {**rope, "full_attention": {"rope_theta": 1e4}}
    assert "config rope_type" in config_differences({"rope_parameters": rope}, {"rope_parameters": other})[0]


def test_other_heads_of_equal_shape_are_problems_only_when_both_state_them() -> None:
    other = {**QWEN3, "num_attention_heads": 8}
    assert head_problems("ancestor", QWEN3, other) == ["config num_attention_heads: ancestor 4, vlm 8"]
    assert head_problems("base", QWEN3, {"num_attention_heads": 4}) == []
    assert head_problems("base", QWEN3, {}) == []
