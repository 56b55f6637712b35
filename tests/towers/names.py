"""Names and shapes of text models and of vlms made from them, by hand."""

from __future__ import annotations

import re

Shapes = dict[str, tuple[int, ...]]

HIDDEN, KV, INNER, ROWS = 16, 8, 24, 32
"""Sizes that tell most tensors apart by their shape."""


def text_model(
    num_layers: int = 4,
    *,
    biases: bool = False,
    head: bool = True,
    experts: int = 0,
    hidden: int = HIDDEN,
    kv: int = KV,
    inner: int = INNER,
) -> Shapes:
    """Return a Llama by default: canonical name -> shape."""
    shapes: Shapes = {"model.embed_tokens.weight": (ROWS, hidden)}
    for layer in range(num_layers):
        start = f"model.layers.{layer}."
        for name, rows in (("q", hidden), ("k", kv), ("v", kv)):
            shapes[f"{start}self_attn.{name}_proj.weight"] = (rows, hidden)
            if biases:
                shapes[f"{start}self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{start}self_attn.o_proj.weight"] = (hidden, hidden)
        for place in [f"experts.{number}." for number in range(experts)] or [""]:
            shapes[f"{start}mlp.{place}gate_proj.weight"] = (inner, hidden)
            shapes[f"{start}mlp.{place}up_proj.weight"] = (inner, hidden)
            shapes[f"{start}mlp.{place}down_proj.weight"] = (hidden, inner)
        if experts:
            shapes[f"{start}mlp.gate.weight"] = (experts, hidden)
        shapes |= {f"{start}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    shapes["model.norm.weight"] = (hidden,)
    if head:
        shapes["lm_head.weight"] = (ROWS, hidden)
    return shapes


def renamed(shapes: Shapes, *rules: tuple[str, str]) -> Shapes:
    """Return the same shapes under names changed by regular expressions, in order."""
    result = {}
    for name, shape in shapes.items():
        for pattern, replacement in rules:
            name = re.sub(pattern, replacement, name)
        result[name] = shape
    assert len(result) == len(shapes)
    return result


UNKNOWN_PREFIX = (
    (r"^model\.layers\.", "foo.bar.llm.blocks."),
    (r"^model\.embed_tokens\.", "foo.bar.llm.tok."),
    (r"^model\.norm\.", "foo.bar.llm.last_norm."),
    (r"^lm_head\.", "foo.out_head."),
)
"""A prefix that nobody knows, above the base's own leaves."""

FOREIGN = (
    *UNKNOWN_PREFIX,
    (r"\.self_attn\.o_proj\.", ".att.wo."),
    (r"\.mlp\.down_proj\.", ".ff.w2."),
    (r"\.input_layernorm\.", ".ln_1."),
    (r"\.post_attention_layernorm\.", ".ln_2."),
)
"""Other leaves too."""

EYE: Shapes = {
    "foo.eye.patch.weight": (16, 3, 4, 4),
    "foo.eye.blocks.0.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
    "foo.eye.blocks.0.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
    "foo.eye.blocks.0.input_layernorm.weight": (HIDDEN,),
}
"""Something that sees, with tensors like the tower's."""
