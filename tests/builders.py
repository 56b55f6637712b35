"""Tiny real checkpoints for tests: seeded, a few kilobytes, nothing downloaded.

Every builder writes a folder as ``save_pretrained`` does and returns it. ``start`` names a folder whose
text weights are copied and then moved by ``noise``, so that an ancestor, a base and a vlm can be true
relatives.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
)

SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>")
WORDS = (
    *SPECIAL_TOKENS,
    *("what", "is", "the", "colour", "of", "a", "cat", "dog", "red", "blue", "green"),
    *("answer", ":", ".", "?", "one", "two", "three"),
)
"""Tokens of the tiny tokenizer, in id order (22)."""

IMAGE_TOKEN = "<image>"
"""The one token that the tiny vlm has and its base lacks (id 22)."""

CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] + ' : ' + message['content'] + ' ' }}{% endfor %}"

TEXT_SIZE: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Defaults of the tiny text model; any of them may be overridden by keyword."""

VISION_SIZE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
    "projection_dim": 16,
}


def tiny_llama(
    folder: Path,
    *,
    seed: int = 0,
    start: Path | None = None,
    noise: float = 0.02,
    tokens: Sequence[str] | None = WORDS,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    **config: Any,
) -> Path:
    """Write a tiny ``LlamaForCausalLM`` (2 layers, 16 wide, 32 rows); ``tokens=None``: no tokenizer.

    ``config`` overrides fields of ``TEXT_SIZE``, for example ``num_hidden_layers=4`` or
    ``tie_word_embeddings=True``.
    """
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**TEXT_SIZE, **config}))
    return finish(model, folder, start=start, noise=noise, tokens=tokens, dtype=dtype, max_shard_size=max_shard_size)


def tiny_llava(
    folder: Path,
    *,
    seed: int = 1,
    start: Path | None = None,
    noise: float = 0.02,
    tokens: Sequence[str] | None = (*WORDS, IMAGE_TOKEN),
    dtype: torch.dtype = torch.float32,
    native: bool = False,
    max_shard_size: str = "1GB",
    **config: Any,
) -> Path:
    """Write a tiny ``LlavaForConditionalGeneration``: a small CLIP on a tower of the size of ``tiny_llama``.

    ``native=True`` saves the names that transformers has in memory (``model.language_model.``), otherwise
    those of the hub (``language_model.model.``). ``config`` overrides fields of the text config.
    """
    torch.manual_seed(seed)
    text = {**TEXT_SIZE, **config}
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=CLIPVisionConfig(**VISION_SIZE).to_dict(),
            text_config=LlamaConfig(**text).to_dict(),
            image_token_id=len(WORDS),
            image_seq_length=4,
            vision_feature_layer=-1,
            tie_word_embeddings=text["tie_word_embeddings"],
        )
    )
    return finish(
        model,
        folder,
        start=start,
        noise=noise,
        tokens=tokens,
        dtype=dtype,
        max_shard_size=max_shard_size,
        save_original_format=not native,
    )


def finish(
    model: PreTrainedModel,
    folder: Path,
    *,
    start: Path | None,
    noise: float,
    tokens: Sequence[str] | None,
    dtype: torch.dtype = torch.float32,
    **save: Any,
) -> Path:
    """Give ``model`` the text weights of ``start`` plus seeded noise, then save it with its tokenizer."""
    if start is not None:
        copy_text_weights(model, start, noise)
    model.to(dtype).save_pretrained(folder, **save)
    if tokens is not None:
        write_tokenizer(folder, tokens)
    return folder


def copy_text_weights(model: PreTrainedModel, start: Path, noise: float) -> None:
    """Overwrite the text weights of ``model`` with those of the plain checkpoint ``start``, plus noise.

    Rows beyond those of ``start`` keep their random values. The head of a tied ``start`` is its embedding.
    """
    source = {name: tensor for file in sorted(start.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    source.setdefault("lm_head.weight", source["model.embed_tokens.weight"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tensor = source.get(name.replace("model.language_model.", "model.").replace("model.text_model.", "model."))
            if tensor is None:
                continue
            rows = min(len(tensor), len(parameter))
            parameter[:rows] = tensor[:rows].float()
            parameter[:rows] += noise * tensor.float().std() * torch.randn(parameter[:rows].shape)


def write_tokenizer(folder: Path, tokens: Sequence[str], extra: Mapping[str, int] | None = None) -> None:
    """Write a word-level tokenizer that transformers loads: ``tokens`` in id order, ``extra`` added."""
    added = {token: number for number, token in enumerate(tokens) if token.startswith("<")} | dict(extra or {})
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": token, **flags} for token, number in added.items()],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {token: number for number, token in enumerate(tokens)},
            "unk_token": "<unk>",
        },
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "padding_side": "left",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def hand_made(
    folder: Path,
    *shards: Mapping[str, torch.Tensor],
    config: Mapping[str, Any] | None = None,
    tokens: Sequence[str] | None = None,
) -> Path:
    """Write a checkpoint of the given tensors, one mapping a shard; several shards get an index."""
    folder.mkdir(parents=True, exist_ok=True)
    weight_map = {}
    for number, tensors in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        save_file(dict(tensors), folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))
    if len(shards) > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
    if tokens is not None:
        write_tokenizer(folder, tokens)
    return folder


def text_tensors(
    prefix: str = "model.",
    head: str | None = "lm_head.",
    *,
    num_layers: int = 2,
    rows: int = 16,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, torch.Tensor]:
    """Return the tensors of a text model by hand: 8 wide, with q and k norms, under any prefix."""
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (rows, 8), "norm.weight": (8,)}
    for layer in range(num_layers):
        start = f"layers.{layer}."
        shapes |= {f"{start}self_attn.{name}_proj.weight": (8, 8) for name in "qkvo"}
        shapes |= {f"{start}self_attn.{name}_norm.weight": (4,) for name in "qk"}
        shapes |= {f"{start}{name}_layernorm.weight": (8,) for name in ("input", "post_attention")}
        shapes |= {f"{start}mlp.{name}_proj.weight": (12, 8) for name in ("gate", "up")}
        shapes |= {f"{start}mlp.down_proj.weight": (8, 12)}
    named = {prefix + name: shape for name, shape in shapes.items()}
    if head is not None:
        named[head + "weight"] = (rows, 8)
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in named.items()}
