import pytest

from mergelab.towers.kinds import module_kind


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("model.embed_tokens.weight", (16, 8), "embedding"),
        ("lm_head.weight", (16, 8), "head"),
        ("lm_head.bias", (16,), "bias"),
        ("model.norm.weight", (8,), "norm"),
        ("model.layers.0.input_layernorm.weight", (8,), "norm"),
        ("model.layers.0.input_layernorm.bias", (8,), "bias"),
        ("model.layers.0.self_attn.q_norm.weight", (4,), "norm"),
        ("model.layers.0.self_attn.q_proj.weight", (8, 8), "attention"),
        ("model.layers.0.self_attn.q_proj.bias", (8,), "bias"),
        ("model.layers.0.linear_attn.in_proj_qkv.weight", (8, 8), "attention"),
        ("model.layers.0.linear_attn.A_log", (4,), "other"),
        ("model.layers.0.linear_attn.conv1d.weight", (8, 1, 4), "other"),
        ("model.layers.0.mlp.up_proj.weight", (12, 8), "mlp"),
        ("model.layers.0.mlp.experts.3.up_proj.weight", (12, 8), "mlp"),
        ("model.layers.0.mlp.experts.gate_up_proj", (4, 24, 8), "other"),
        ("model.layers.0.feed_forward.w1.weight", (12, 8), "mlp"),
        ("model.layers.0.layer_scalar", (), "other"),
        ("model.layers.0.layer_scalar", (1,), "other"),
    ],
)
def test_kind_follows_name_and_dimensions(name: str, shape: tuple[int, ...], kind: str) -> None:
    assert module_kind(name, shape) == kind
