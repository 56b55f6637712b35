"""What modules are called in tables."""

import pytest

from mergelab.towers.kinds import module_kind
from mergelab.towers.names import module_name


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("model.layers.11.self_attn.q_proj.weight", (4, 4), ("q", 11)),
        ("model.layers.0.self_attn.qkv_proj.weight", (4, 4), ("qkv", 0)),
        ("model.layers.0.mlp.gate_up_proj.weight", (4, 4), ("gate_up", 0)),
        ("model.layers.0.mlp.up_proj.weight", (4, 4), ("up", 0)),
        ("model.layers.2.mlp.experts.7.up_proj.weight", (4, 4), ("mlp.experts.N.up_proj.weight", 2)),
        ("model.layers.2.linear_attn.in_proj_a.weight", (4, 4), ("linear_attn.in_proj_a.weight", 2)),
        ("model.layers.1.self_attn.q_norm.weight", (4,), ("norm", 1)),
        ("model.layers.1.self_attn.q_proj.bias", (4,), ("bias", 1)),
        ("model.norm.weight", (4,), ("norm", None)),
        ("model.embed_tokens.weight", (4, 4), ("embedding", None)),
        ("lm_head.weight", (4, 4), ("head", None)),
    ],
)
def test_names(name: str, shape: tuple[int, ...], expected: tuple[str, int | None]) -> None:
    assert module_name(name, module_kind(name, shape)) == expected
