"""The shapes of the bench pair: a Llama of 968,320 parameters and a LLaVA of 1,088,704 around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
)

from mergelab.bench.pictures import CELL, NUM_CELLS, SIZE
from mergelab.bench.tokenizer import BOS, EOS, PAD, VOCABULARY_SIZE

INITIAL_SPREAD = 0.02


def text_config() -> LlamaConfig:
    """Return the configuration of the text model."""
    return LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        initializer_range=INITIAL_SPREAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )


def vision_config() -> CLIPVisionConfig:
    """Return the configuration of the vision tower: 36x36 pixels, one patch per cell of the grid."""
    return CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=SIZE,
        patch_size=CELL,
        projection_dim=64,
    )


def llava_config(text: PreTrainedConfig, vision: CLIPVisionConfig, image_token: int) -> LlavaConfig:
    """Return a LLaVA that reads nine features a picture from the LAST layer of the vision tower.

    The default layer, -2, would silently drop half of a two-layer tower. The class token is dropped. The tie
    flag is set at both levels: transformers reads the outer one when it ties, other tools the inner one.
    """
    token_ids: dict[str, Any] = {name: getattr(text, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return LlavaConfig(
        text_config=text,
        vision_config=vision,
        image_token_index=image_token,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        image_seq_length=NUM_CELLS,
        tie_word_embeddings=bool(text.tie_word_embeddings),
        **token_ids,
    )


def greedy_generation(bos: int | None, eos: int | None, pad: int | None) -> GenerationConfig:
    """Return the generation settings of every checkpoint made here: greedy, nothing else changed."""
    return GenerationConfig(do_sample=False, bos_token_id=bos, eos_token_id=eos, pad_token_id=pad)


def new_text_model() -> LlamaForCausalLM:
    """Build the text model with random weights from torch's global generator."""
    return LlamaForCausalLM(text_config())


def new_vision_tower() -> CLIPVisionModel:
    """Build the vision tower with random weights from torch's global generator."""
    return CLIPVisionModel(vision_config())


def assemble_vlm(text: PreTrainedModel, vision: CLIPVisionModel, image_token: int) -> LlavaForConditionalGeneration:
    """Build a LLaVA from copies of ``text`` and ``vision`` with a projector of random weights."""
    vlm = LlavaForConditionalGeneration(llava_config(text.config, vision.config, image_token))
    vlm.model.language_model.load_state_dict(text.base_model.state_dict())
    vlm.model.vision_tower.load_state_dict(vision.state_dict())
    vlm.tie_weights()
    if not text.config.tie_word_embeddings:
        vlm.lm_head.load_state_dict(text.get_output_embeddings().state_dict())
    return vlm


@contextmanager
def cpu_threads(num: int) -> Iterator[None]:
    """Let torch use ``num`` CPU threads inside the block, and as many as before after it."""
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)
