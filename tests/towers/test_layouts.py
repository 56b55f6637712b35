"""The prefix table against real classes of transformers in both layouts, and against hand-made odd ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CLIPVisionConfig,
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    InternVLConfig,
    InternVLForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaNextConfig,
    LlavaNextForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from mergelab.checkpoints.headers import open_checkpoint
from mergelab.errors import PairingError
from mergelab.towers.layouts import locate_tower
from tests.builders import TEXT_SIZE, VISION_SIZE, hand_made, text_tensors, tiny_llama, tiny_llava

ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0]}
QWEN_VISION = {
    "depth": 1, "hidden_size": 16, "embed_dim": 16, "num_heads": 2, "intermediate_size": 24,
    "out_hidden_size": 16, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 1,
    "deepstack_visual_indexes": [0], "num_position_embeddings": 16, "mlp_ratio": 2,
    "fullatt_block_indexes": [0],
}  # fmt: skip
IDEFICS_VISION = {k: VISION_SIZE[k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers")} | {
    "num_attention_heads": 2, "image_size": 8, "patch_size": 4,
}  # fmt: skip


def qwen(config: type, model: type) -> PreTrainedModel:
    return model(config(text_config={**TEXT_SIZE, "rope_parameters": ROPE}, vision_config=QWEN_VISION))


FAMILIES: dict[str, tuple[Callable[[], PreTrainedModel], Callable[[], PreTrainedModel], str, str]] = {
    "llava_next": (
        lambda: LlavaNextForConditionalGeneration(
            LlavaNextConfig(
                vision_config=CLIPVisionConfig(**VISION_SIZE).to_dict(),
                text_config=LlamaConfig(**TEXT_SIZE).to_dict(),
            )
        ),
        lambda: LlamaForCausalLM(LlamaConfig(**TEXT_SIZE)),
        "language_model.model.",
        "model.language_model.",
    ),
    "internvl": (
        lambda: InternVLForConditionalGeneration(
            InternVLConfig(
                vision_config={**IDEFICS_VISION, "image_size": [8, 8], "patch_size": [4, 4]},
                text_config=Qwen2Config(**TEXT_SIZE).to_dict(),
            )
        ),
        lambda: Qwen2ForCausalLM(Qwen2Config(**TEXT_SIZE)),
        "language_model.model.",
        "model.language_model.",
    ),
    "qwen2_vl": (
        lambda: qwen(Qwen2VLConfig, Qwen2VLForConditionalGeneration),
        lambda: Qwen2ForCausalLM(Qwen2Config(**TEXT_SIZE)),
        "model.",
        "model.language_model.",
    ),
    "qwen2_5_vl": (
        lambda: qwen(Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration),
        lambda: Qwen2ForCausalLM(Qwen2Config(**TEXT_SIZE)),
        "model.",
        "model.language_model.",
    ),
    "qwen3_vl": (
        lambda: qwen(Qwen3VLConfig, Qwen3VLForConditionalGeneration),
        lambda: Qwen3ForCausalLM(Qwen3Config(**TEXT_SIZE)),
        "model.language_model.",
        "model.language_model.",
    ),
    "smolvlm": (
        lambda: SmolVLMForConditionalGeneration(
            SmolVLMConfig(vision_config=IDEFICS_VISION, text_config=LlamaConfig(**TEXT_SIZE).to_dict())
        ),
        lambda: LlamaForCausalLM(LlamaConfig(**TEXT_SIZE)),
        "model.text_model.",
        "model.text_model.",
    ),
    "idefics3": (
        lambda: Idefics3ForConditionalGeneration(
            Idefics3Config(vision_config=IDEFICS_VISION, text_config=LlamaConfig(**TEXT_SIZE).to_dict())
        ),
        lambda: LlamaForCausalLM(LlamaConfig(**TEXT_SIZE)),
        "model.text_model.",
        "model.text_model.",
    ),
}  # fmt: skip


def located(folder: Path) -> tuple[Any, Any]:
    checkpoint = open_checkpoint(folder)
    return locate_tower(checkpoint.tensors, checkpoint.config), checkpoint


@pytest.mark.parametrize("native", [False, True], ids=["hub", "native"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tower_has_exactly_the_names_of_the_text_class(tmp_path: Path, family: str, native: bool) -> None:
    make, make_text, hub_layout, native_layout = FAMILIES[family]
    model = make()
    model.save_pretrained(tmp_path, save_original_format=not native)
    tower, checkpoint = located(tmp_path)
    text = make_text().state_dict()
    expected = {name: tuple(tensor.shape) for name, tensor in text.items()}
    if not tower.has_head:
        del expected["lm_head.weight"]
    found = {name: checkpoint.tensors[stored].shape for name, stored in tower.stored.items()}
    assert found == expected
    assert tower.layout == (native_layout if native else hub_layout)
    assert tower.text_config["num_hidden_layers"] == 2
    assert set(tower.roles) == set(checkpoint.tensors)
    roles = {"tower", "vision", "projector"}
    assert set(tower.roles.values()) == roles
    assert not [name for name, role in tower.roles.items() if role == "tower" and "vis" in name]


@pytest.mark.parametrize("native", [False, True], ids=["hub", "native"])
def test_llava_of_the_builder(tmp_path: Path, native: bool) -> None:
    tower, _ = located(tiny_llava(tmp_path, native=native))
    assert tower.layout == ("model.language_model." if native else "language_model.model.")
    assert tower.has_head
    assert len(tower.stored) == 21


@pytest.mark.parametrize("tied", [False, True])
def test_plain_text_checkpoint_is_all_tower(tmp_path: Path, tied: bool) -> None:
    tower, checkpoint = located(tiny_llama(tmp_path, tie_word_embeddings=tied))
    assert tower.layout == "model."
    assert dict(tower.stored) == {name: name for name in checkpoint.tensors}
    assert tower.has_head is not tied
    assert set(tower.roles.values()) == {"tower"}


def by_hand(tmp_path: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Any:
    return located(hand_made(tmp_path / "m", tensors, config={"model_type": "any", **config}))[0]


SOME = torch.zeros(3, 3)


@pytest.mark.parametrize(
    ("prefix", "head", "layout", "others"),
    [
        (
            "language_model.model.",
            "language_model.lm_head.",
            "language_model.model.",
            {"mlp1.0.weight": "projector"},
        ),
        ("llm.model.", "llm.lm_head.", "llm.model.", {"vpm.x": "vision", "resampler.kv": "projector"}),
        (
            "language.model.",
            "language.lm_head.",
            "llm.model.",
            {"view_seperator": "projector", "vision.a": "vision"},
        ),
        (
            "model.",
            "lm_head.",
            "model.",
            {
                "model.vision_tower.layers.0.w": "vision",
                "model.mm_projector.0.weight": "projector",
                "model.image_newline": "projector",
                "model.layers.0.self_attn.rotary_emb.inv_freq": "extra",
            },
        ),
        # What transformers 5.4 and 5.5 wrote.
        (
            "model.language_model.language_model.language_model.",
            "lm_head.",
            "model.language_model.",
            {
                "model.language_model.visual.blocks.0.w": "vision",
                "model.language_model.visual.merger.w": "projector",
                "mtp.layers.0.self_attn.q_proj.weight": "extra",
            },
        ),
        (
            "language_model.language_model.model.",
            "lm_head.",
            "language_model.model.",
            {"vision_model.a": "vision"},
        ),
    ],
    ids=["internvl custom", "minicpm-v", "deepseek-vl2", "llava original", "doubled 5.5", "doubled root 1"],
)
def test_layouts_by_hand(tmp_path: Path, prefix: str, head: str, layout: str, others: dict[str, str]) -> None:
    tower = by_hand(tmp_path, text_tensors(prefix, head) | {name: SOME.clone() for name in others})
    assert tower.layout == layout
    assert set(tower.stored) == set(text_tensors())
    assert {name: tower.roles[name] for name in others} == others


def refusal(tmp_path: Path, tensors: dict[str, torch.Tensor], **config: Any) -> str:
    with pytest.raises(PairingError) as caught:
        by_hand(tmp_path, tensors, **config)
    return str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.up_proj.weight_scale_inv",
        "model.layers.0.mlp.experts.gate_up_proj_blocks",
        "model.layers.0.mlp.experts.gate_up_proj_blocks_blocks",
        "model.layers.0.mlp.up_proj.weight.absmax",
    ],
)
def test_quantised_weights_are_refused_by_name(tmp_path: Path, name: str) -> None:
    message = refusal(tmp_path, text_tensors() | {name: SOME.clone()})
    assert f"{name}: these are quantised weights" in message
    assert "Use the unquantised checkpoint" in message


def test_model_saved_without_its_head_class_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, text_tensors("", None))
    assert "the names have no prefix" in message
    assert "AutoModelForCausalLM" in message


def test_no_tower_is_refused_with_what_was_tried(tmp_path: Path) -> None:
    message = refusal(tmp_path, {"transformer.h.0.attn.weight": SOME})
    assert "language_model.model.layers.0.*" in message
    assert "found transformer.h.0.attn.weight" in message


def test_unknown_roles_are_listed_together(tmp_path: Path) -> None:
    message = refusal(tmp_path, text_tensors() | {"audio.a": SOME.clone(), "model.tts.b": SOME.clone()})
    assert "names that cannot be placed: 2." in message
    assert "audio.a: F32 (3, 3), unknown role" in message
    assert "model.tts.b: F32 (3, 3), unknown role" in message


def test_two_towers_are_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, text_tensors() | text_tensors("model.language_model.", None))
    assert "two text towers: model.* (" in message
    assert "means model.embed_tokens.weight, and so does model.embed_tokens.weight" in message


def test_head_that_is_neither_stored_nor_tied_is_refused(tmp_path: Path) -> None:
    message = refusal(tmp_path, text_tensors(head=None), tie_word_embeddings=False)
    assert "lm_head.weight: not stored although the config says tie_word_embeddings false" in message


@pytest.mark.parametrize("config", [{}, {"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}}])
def test_head_may_be_absent_when_one_flag_ties_or_none_is_stated(tmp_path: Path, config: dict[str, Any]) -> None:
    assert not by_hand(tmp_path, text_tensors(head=None), **config).has_head


def test_stored_head_beats_the_flag(tmp_path: Path) -> None:
    assert by_hand(tmp_path, text_tensors(), tie_word_embeddings=True).has_head


def test_names_of_the_base_widen_the_grammar(tmp_path: Path) -> None:
    tensors = text_tensors() | {"model.gate.weight": SOME}
    assert "model.gate.weight: F32 (3, 3), unknown role" in refusal(tmp_path, tensors)
    checkpoint = open_checkpoint(tmp_path / "m")
    assert "model.gate.weight" in locate_tower(checkpoint.tensors, {}, {"model.gate.weight"}).stored
