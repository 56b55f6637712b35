"""The layouts of families, made by hand from one known tower: what our rules must undo, written without them.

Every function takes the tensors of a plain text model and returns them under the names and in the shapes in which a
family stores them, together with tensors of the vlm that are not of the tower.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]

HIDDEN, HEADS, GROUPS, SIZE, INTER, ROWS, LAYERS, EXPERTS = 16, 8, 2, 4, 12, 24, 4, 3
"""Heads of 4 in groups of 4: 32 query rows, 8 key rows."""


def plain(
    seed: int = 0,
    *,
    experts: bool = False,
    qk_norm: bool = True,
    qkv_bias: bool = False,
    expert_bias: bool = False,
    norm_after: bool = False,
    fused: bool = False,
    num_layers: int = LAYERS,
) -> Tensors:
    """Return the tensors of a plain text model in bfloat16."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (ROWS, HIDDEN)}
    for layer in range(num_layers):
        start = f"model.layers.{layer}."
        rows = {"q": HEADS * SIZE, "k": GROUPS * SIZE, "v": GROUPS * SIZE}
        if fused:
            shapes[f"{start}self_attn.qkv_proj.weight"] = (sum(rows.values()), HIDDEN)
        else:
            shapes |= {f"{start}self_attn.{kind}_proj.weight": (count, HIDDEN) for kind, count in rows.items()}
        if qkv_bias:
            shapes |= {f"{start}self_attn.{kind}_proj.bias": (count,) for kind, count in rows.items()}
        shapes[f"{start}self_attn.o_proj.weight"] = (HIDDEN, HEADS * SIZE)
        if qk_norm:
            shapes |= {f"{start}self_attn.{kind}_norm.weight": (SIZE,) for kind in "qk"}
        norms = ("post_attention", "post_feedforward") if norm_after else ("input", "post_attention")
        shapes |= {f"{start}{kind}_layernorm.weight": (HIDDEN,) for kind in norms}
        for expert in range(EXPERTS) if experts else ():
            inside = f"{start}mlp.experts.{expert}."
            shapes |= {f"{inside}{kind}_proj.weight": (INTER, HIDDEN) for kind in ("gate", "up")}
            shapes[f"{inside}down_proj.weight"] = (HIDDEN, INTER)
            if expert_bias:
                shapes |= {f"{inside}{kind}_proj.bias": (INTER,) for kind in ("gate", "up")}
                shapes[f"{inside}down_proj.bias"] = (HIDDEN,)
        if experts:
            shapes[f"{start}mlp.gate.weight"] = (EXPERTS, HIDDEN)
        elif fused:
            shapes[f"{start}mlp.gate_up_proj.weight"] = (2 * INTER, HIDDEN)
            shapes[f"{start}mlp.down_proj.weight"] = (HIDDEN, INTER)
        else:
            shapes |= {f"{start}mlp.{kind}_proj.weight": (INTER, HIDDEN) for kind in ("gate", "up")}
            shapes[f"{start}mlp.down_proj.weight"] = (HIDDEN, INTER)
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (ROWS, HIDDEN)}
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()}


def moved(tensors: Tensors, seed: int, drift: float = 0.1) -> Tensors:
    """Return a relative: every tensor moved a little."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (tensor.float() * (1 + drift * torch.randn(tensor.shape, generator=generator))).to(tensor.dtype)
        for name, tensor in tensors.items()
    }


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(99)).to(torch.bfloat16)


PICTURES = {"vision_tower.blocks.0.weight": noise(3, 5), "multi_modal_projector.linear_1.weight": noise(5, 3)}


def renamed(tensors: Mapping[str, torch.Tensor], *rules: tuple[str, str]) -> Tensors:
    found = {}
    for name, tensor in tensors.items():
        own = name
        for pattern, replacement in rules:
            own = re.sub(pattern, replacement, own)
        found[own] = tensor
    return found


def take(tensors: Tensors, layer: int, *names: str) -> list[torch.Tensor]:
    return [tensors.pop(f"model.layers.{layer}.{name}") for name in names]


def molmo2(tensors: Tensors, *, gate_first: bool = False) -> Tensors:
    left, found = dict(tensors), {}
    for layer in range(LAYERS):
        start = f"model.transformer.blocks.{layer}."
        q, k, v = take(left, layer, *(f"self_attn.{kind}_proj.weight" for kind in "qkv"))
        gate, up = take(left, layer, "mlp.gate_proj.weight", "mlp.up_proj.weight")
        found[f"{start}self_attn.att_proj.weight"] = torch.cat([q, k, v])
        found[f"{start}mlp.ff_proj.weight"] = torch.cat([gate, up] if gate_first else [up, gate])
    after = any("post_feedforward" in name for name in left)
    found |= renamed(
        left,
        (r"^model\.layers\.", "model.transformer.blocks."),
        (r"^model\.norm\.", "model.transformer.ln_f."),
        (r"^model\.embed_tokens\.weight", "model.transformer.wte.embedding"),
        (r"self_attn\.o_proj", "self_attn.attn_out"),
        (r"mlp\.down_proj", "mlp.ff_out"),
        *([(r"post_attention_layernorm", "attn_norm"), (r"post_feedforward_layernorm", "ff_norm")] if after else []),
        (r"input_layernorm", "attn_norm"),
        (r"post_attention_layernorm", "ff_norm"),
    )
    return found | {
        "model.transformer.wte.new_embedding": noise(4, HIDDEN),
        "model.vision_backbone.image_vit.transformer.resblocks.0.attention.wq.weight": noise(3, 3),
        "model.vision_backbone.image_projector.w1.weight": noise(3, 5),
    }


def molmo(tensors: Tensors) -> Tensors:
    left, found = dict(tensors), {}
    for layer in range(LAYERS):
        start = f"model.transformer.blocks.{layer}."
        q, k, v = take(left, layer, *(f"self_attn.{kind}_proj.weight" for kind in "qkv"))
        found[f"{start}att_proj.weight"] = torch.cat([q, k, v])
        if f"model.layers.{layer}.self_attn.q_proj.bias" in left:
            biases = take(left, layer, *(f"self_attn.{kind}_proj.bias" for kind in "qkv"))
            found[f"{start}att_proj.bias"] = torch.cat(biases)
        if f"model.layers.{layer}.mlp.gate_proj.weight" in left:
            gate, up = take(left, layer, "mlp.gate_proj.weight", "mlp.up_proj.weight")
            found[f"{start}ff_proj.weight"] = torch.cat([up, gate])
            continue
        experts = [
            take(left, layer, *(f"mlp.experts.{expert}.{kind}_proj.weight" for kind in ("gate", "up", "down")))
            for expert in range(EXPERTS)
        ]
        inside = f"{start}ffn.experts.mlp."
        found[f"{inside}w1"] = torch.cat([gate for gate, _, _ in experts])
        found[f"{inside}v1"] = torch.cat([up for _, up, _ in experts])
        found[f"{inside}w2"] = torch.cat([down.T for _, _, down in experts]).contiguous()
    found |= renamed(
        left,
        (r"^lm_head\.", "model.transformer.ff_out."),
        (r"^model\.layers\.", "model.transformer.blocks."),
        (r"^model\.norm\.", "model.transformer.ln_f."),
        (r"^model\.embed_tokens\.weight", "model.transformer.wte.embedding"),
        (r"self_attn\.o_proj", "attn_out"),
        (r"self_attn\.([qk]_norm)", r"\1"),
        (r"mlp\.down_proj", "ff_out"),
        (r"mlp\.gate\.", "ffn.router.layer."),
        (r"input_layernorm", "attn_norm"),
        (r"post_attention_layernorm", "ff_norm"),
    )
    return found | {
        "model.transformer.wte.new_embedding": noise(4, HIDDEN),
        "model.vision_backbone.image_vit.class_embedding": noise(3),
        "model.vision_backbone.image_pooling_2d.wq.weight": noise(3, 5),
    }


def internlm2(tensors: Tensors, prefix: str = "language_model.", *, contiguous: bool = False) -> Tensors:
    left, found = dict(tensors), {}
    for layer in range(LAYERS):
        q, k, v = take(left, layer, *(f"self_attn.{kind}_proj.weight" for kind in "qkv"))
        per_group = [torch.cat([one.view(GROUPS, -1, HIDDEN)[group] for one in (q, k, v)]) for group in range(GROUPS)]
        wqkv = torch.cat([q, k, v]) if contiguous else torch.cat(per_group)
        found[f"{prefix}model.layers.{layer}.attention.wqkv.weight"] = wqkv
    found |= renamed(
        left,
        (r"^model\.embed_tokens", "model.tok_embeddings"),
        (r"^lm_head", "output"),
        (r"self_attn\.o_proj", "attention.wo"),
        (r"mlp\.gate_proj", "feed_forward.w1"),
        (r"mlp\.up_proj", "feed_forward.w3"),
        (r"mlp\.down_proj", "feed_forward.w2"),
        (r"input_layernorm", "attention_norm"),
        (r"post_attention_layernorm", "ffn_norm"),
        (r"^", prefix),
    )
    vision = {"vision_model.encoder.layers.0.attn.qkv.weight": noise(3, 3), "mlp1.0.weight": noise(3)}
    return renamed(found, (rf"^{prefix}{prefix}", prefix)) | (vision if prefix else {})


def stacked(tensors: Tensors, *, transposed: bool, interleaved: bool = False, up_first: bool = False) -> Tensors:
    left, found = dict(tensors), {}
    for layer in range(LAYERS):
        for leaf in ("weight", "bias"):
            if f"model.layers.{layer}.mlp.experts.0.gate_proj.{leaf}" not in left:
                continue
            gates, ups, downs = [], [], []
            for expert in range(EXPERTS):
                gate, up, down = take(
                    left, layer, *(f"mlp.experts.{expert}.{kind}_proj.{leaf}" for kind in ("gate", "up", "down"))
                )
                gates.append(gate), ups.append(up), downs.append(down)
            pairs = [(up, gate) if up_first else (gate, up) for gate, up in zip(gates, ups, strict=True)]
            both = [torch.stack(pair, dim=1).flatten(0, 1) if interleaved else torch.cat(pair) for pair in pairs]
            gate_up, down = torch.stack(both), torch.stack(downs)
            if leaf == "weight" and transposed:
                gate_up, down = gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
            suffix = "" if leaf == "weight" else "_bias"
            inside = f"model.layers.{layer}.mlp.experts."
            found |= {f"{inside}gate_up_proj{suffix}": gate_up, f"{inside}down_proj{suffix}": down}
    return found | left


def in_vlm(prefix: str = "model.language_model.", head: str = "lm_head.") -> Callable[[Tensors], Tensors]:
    """Return what puts a tower under a prefix and pictures beside it."""
    return lambda tensors: renamed(tensors, (r"^model\.", prefix), (r"^lm_head\.", head)) | PICTURES


def mllama(tensors: Tensors) -> Tensors:
    """Cross-attention layers at places 1 and 3 of six, and 3 more rows of the embedding."""
    places = [0, 2, 4, 5]
    found = {}
    for name, tensor in tensors.items():
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        own = name if layer is None else f"model.layers.{places[int(layer[1])]}.{name[layer.end() :]}"
        found[own] = tensor
    for place in (1, 3):
        start = f"model.layers.{place}."
        found |= {
            f"{start}cross_attn.q_proj.weight": noise(HEADS * SIZE, HIDDEN),
            f"{start}cross_attn_attn_gate": noise(1),
            f"{start}cross_attn_mlp_gate": noise(1),
            f"{start}input_layernorm.weight": noise(HIDDEN),
            f"{start}mlp.gate_proj.weight": noise(INTER, HIDDEN),
        }
    found = in_vlm("language_model.model.", "language_model.lm_head.")(found)
    embedding = "language_model.model.embed_tokens.weight"
    return found | {embedding: torch.cat([found[embedding], noise(3, HIDDEN)])}


def phi4(tensors: Tensors) -> Tensors:
    found = renamed(tensors, (r"((?:qkv|o|gate_up|down)_proj)\.weight$", r"\1.base_layer.weight"))
    for name in [*found]:
        if name.endswith(".base_layer.weight"):
            for kind in ("vision", "speech"):
                found[name.replace("base_layer", f"lora_A.{kind}")] = noise(2, HIDDEN)
                found[name.replace("base_layer", f"lora_B.{kind}")] = noise(HIDDEN, 2)
    return found | {
        "model.embed_tokens_extend.image_embed.img_processor.x.weight": noise(3, 3),
        "model.embed_tokens_extend.audio_embed.encoder.x.weight": noise(3, 3),
    }


def wings(tensors: Tensors) -> Tensors:
    inside = {
        f"model.layers.{layer}.{kind}.weight": noise(3, 3)
        for layer in range(LAYERS)
        for kind in ("attn_pool.q_proj", "attn_t_pool.q_proj", "reweight_module.linear")
    }
    return tensors | inside | {"model.vision_tower.x.weight": noise(3, 3), "model.mm_projector.0.weight": noise(3, 3)}


def cambrian(tensors: Tensors) -> Tensors:
    return tensors | {
        "model.vision_query": noise(1, 5),
        "model.vision_sampler_layers.0.layers.0.weight": noise(3, 3),
        "model.vision_sampler_0.layers.0.weight": noise(3, 3),
        "model.mm_projector_aux_0.0.weight": noise(3, 3),
        "model.mm_projector.0.weight": noise(3, 3),
        "model.image_newline": noise(5),
        "model.vision_tower_aux_list.0.vision_tower.x.weight": noise(3, 3),
    }


def phi3_vision(tensors: Tensors) -> Tensors:
    return renamed(tensors, (r"^model\.embed_tokens\.", "model.vision_embed_tokens.wte.")) | {
        "model.vision_embed_tokens.img_processor.vision_model.x.weight": noise(3, 3),
        "model.vision_embed_tokens.img_projection.0.weight": noise(3, 3),
        "model.vision_embed_tokens.glb_GN": noise(1, 1, 5),
    }


def minicpm_o(tensors: Tensors) -> Tensors:
    audio = ("apm.layers.0.x.weight", "tts.model.layers.0.mlp.x.weight", "audio_projection_layer.linear1.weight")
    return renamed(tensors, (r"^", "llm.")) | {
        "vpm.encoder.x.weight": noise(3, 3),
        "resampler.query": noise(3, 3),
        **{name: noise(3, 3) for name in audio},
    }


def repeated(tensors: Tensors) -> Tensors:
    """What transformers 5.4 and 5.5 made of Qwen3.5."""
    return renamed(tensors, (r"^model\.", "model.language_model.language_model.language_model.")) | {
        "model.language_model.visual.blocks.0.attn.qkv.weight": noise(3, 3),
        "model.language_model.visual.merger.linear_fc1.weight": noise(3, 3),
        "mtp.layers.0.mlp.experts.0.gate_proj.weight": noise(3, 3),
        "mtp.fc.weight": noise(3, 3),
    }


@dataclass(frozen=True)
class Layout:
    """One way to store a tower."""

    store: Callable[[Tensors], Tensors]
    family: str | None
    config: dict[str, Any] = field(default_factory=dict)
    base: dict[str, Any] = field(default_factory=dict)
    """What the plain text model is like."""
    wrong: Callable[[Tensors], Tensors] | None = None
    """The same with parts in another order, as a wrong rule would read it."""
    by_token: bool = False
    """Whether rows pair by token, because the vlm has more of them."""


TEXT = {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "hidden_size": HIDDEN, "head_dim": SIZE}
MOE: dict[str, Any] = {"experts": True}

LAYOUTS: dict[str, Layout] = {
    "molmo2": Layout(
        molmo2, "molmo2", {"model_type": "molmo2", "text_config": TEXT}, {}, lambda t: molmo2(t, gate_first=True)
    ),
    "molmo2 norm after": Layout(
        molmo2, "molmo2", {"model_type": "molmo2", "text_config": {**TEXT, "norm_after": True}}, {"norm_after": True}
    ),
    "molmo": Layout(molmo, "molmo", {"model_type": "molmo"}, {"qkv_bias": True, "qk_norm": False}),
    "molmoe": Layout(molmo, "molmoe", {"model_type": "molmo"}, MOE),
    "internvl with internlm2": Layout(
        internlm2,
        "internlm2",
        {"model_type": "internvl_chat", "llm_config": {**TEXT, "model_type": "internlm2"}},
        {"qk_norm": False},
        lambda t: internlm2(t, contiguous=True),
    ),
    "internlm2 alone": Layout(
        lambda t: internlm2(t, ""), "internlm2", {"model_type": "internlm2", **TEXT}, {"qk_norm": False}
    ),
    "mllama": Layout(
        mllama,
        "mllama",
        {"model_type": "mllama", "text_config": {"cross_attention_layers": [1, 3]}},
        {"qk_norm": False},
        by_token=True,
    ),
    "stacked experts": Layout(
        lambda t: in_vlm()(stacked(t, transposed=False)),
        "qwen3-vl-moe",
        {"model_type": "qwen3_vl_moe"},
        MOE,
        lambda t: in_vlm()(stacked(t, transposed=False, up_first=True)),
    ),
    "stacked experts, transposed": Layout(
        lambda t: in_vlm()(stacked(t, transposed=True)),
        "qwen3-vl-moe",
        {"model_type": "qwen3_vl_moe"},
        MOE,
        lambda t: in_vlm()(stacked(t, transposed=True, up_first=True)),
    ),
    "stacked experts, interleaved": Layout(
        lambda t: in_vlm("language_model.model.", "language_model.lm_head.")(
            stacked(t, transposed=True, interleaved=True)
        ),
        "gpt-oss",
        {"model_type": "internvl_chat"},
        {**MOE, "expert_bias": True},
        lambda t: in_vlm()(stacked(t, transposed=True)),
    ),
    "phi4 multimodal": Layout(phi4, "phi4-multimodal", {"model_type": "phi4mm"}, {"fused": True, "qk_norm": False}),
    "wings": Layout(wings, "wings", {"model_type": "wings_qwen2"}, {"qkv_bias": True, "qk_norm": False}),
    "cambrian": Layout(cambrian, "cambrian", {"model_type": "cambrian_llama"}, {"qk_norm": False}),
    "phi3 vision": Layout(phi3_vision, "phi3-vision", {"model_type": "phi3_v"}, {"fused": True, "qk_norm": False}),
    "minicpm-o": Layout(minicpm_o, "minicpm", {"model_type": "minicpmo"}, {"qkv_bias": True, "qk_norm": False}),
    "repeated prefix": Layout(repeated, "qwen3.5", {"model_type": "qwen3_5_moe"}, MOE),
    "nvila hf": Layout(
        lambda t: renamed(t, (r"^", "llm.")) | {"vision_tower.x": noise(3, 3), "mm_projector.0.x": noise(3)},
        None,
        {"model_type": "vila"},
        {"qk_norm": False},
    ),
    "llava original": Layout(
        lambda t: t | {"model.mm_projector.0.weight": noise(3, 3), "model.image_newline": noise(5)},
        "llava-original",
        {"model_type": "llava"},
        {"qk_norm": False},
    ),
}  # fmt: skip
