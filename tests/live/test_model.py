"""The live model: two views, one storage, nothing random, and the vlm's own function on text."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from mergelab.checkpoints.headers import open_checkpoint
from mergelab.engine.outlets import check_outlets
from mergelab.engine.plan import plan_jobs
from mergelab.errors import DamagedFileError, PairingError
from mergelab.live.configs import tower_config
from mergelab.live.model import LiveModel, build_tower, load_text_model, tower_shapes
from mergelab.towers.pairing import pair_checkpoints
from tests.builders import TEXT_SIZE, tiny_llama, tiny_llava

VISION = {"depth": 1, "num_heads": 2, "intermediate_size": 32}


def qwen_vl(folder: Path, kind: str, tied: bool) -> Path:
    """Write a tiny Qwen vlm with multimodal rotary embeddings."""
    rope = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [1, 1, 0]}
    text = {**TEXT_SIZE, "tie_word_embeddings": tied, "rope_parameters": rope}
    classes: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "qwen2_vl": (Qwen2VLConfig, Qwen2VLForConditionalGeneration, {"embed_dim": 16, "hidden_size": 16}),
        "qwen2_5_vl": (
            Qwen2_5_VLConfig,
            Qwen2_5_VLForConditionalGeneration,
            {"hidden_size": 16, "out_hidden_size": 16},
        ),
        "qwen3_vl": (
            Qwen3VLConfig,
            Qwen3VLForConditionalGeneration,
            {"hidden_size": 16, "out_hidden_size": 16},
        ),
    }
    config_class, model_class, vision = classes[kind]
    if kind == "qwen3_vl":
        text["head_dim"] = 4
    torch.manual_seed(3)
    config = config_class(text_config=text, vision_config={**VISION, **vision}, tie_word_embeddings=tied)
    model_class(config).save_pretrained(folder)
    return folder


def build(folder: Path, kind: str, tied: bool) -> Path:
    return tiny_llava(folder, tie_word_embeddings=tied) if kind == "llava" else qwen_vl(folder, kind, tied)


def text_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits


def logits_of_both(live: LiveModel) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.arange(3, 19).view(2, 8)
    assert live.vlm is not None
    return text_logits(live.text, ids), text_logits(live.vlm, ids)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", ["llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_views_share_weights_before_and_after_a_write(tmp_path: Path, kind: str, tied: bool) -> None:
    folder = build(tmp_path / "vlm", kind, tied)
    live = build_tower(tower_config(folder, has_head=not tied), "cpu", torch.float32, folder)
    before, before_vlm = logits_of_both(live)
    assert torch.equal(before, before_vlm)
    for tensor in live.tensors().values():
        tensor.mul_(1.5)
    after, after_vlm = logits_of_both(live)
    assert torch.equal(after, after_vlm)
    assert not torch.allclose(before, after), "the write must have reached the forward pass"


def test_tied_head_appears_once_as_the_embedding(tmp_path: Path) -> None:
    folder = tiny_llava(tmp_path / "vlm", tie_word_embeddings=True)
    live = build_tower(tower_config(folder, has_head=False), "cpu", torch.float32, folder)
    assert "model.embed_tokens.weight" in live.tensors()
    assert "lm_head.weight" not in live.tensors()
    assert live.text.lm_head.weight.data_ptr() == live.tensors()["model.embed_tokens.weight"].data_ptr()


def test_tower_without_picture_view_equals_the_one_with(tmp_path: Path) -> None:
    folder = tiny_llava(tmp_path / "vlm")
    config = tower_config(folder, has_head=True)
    full = build_tower(config, "cpu", torch.float32, folder)
    bare = build_tower(config, "cpu", torch.float32)
    assert bare.vlm is None
    for name, tensor in full.tensors().items():
        bare.tensors()[name].copy_(tensor)
    ids = torch.arange(3, 11).view(1, 8)
    assert torch.equal(text_logits(bare.text, ids), text_logits(full.text, ids))


def tiny_gemma() -> Gemma3TextConfig:
    size = {key: TEXT_SIZE[key] for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    return Gemma3TextConfig(**size, num_attention_heads=2, num_key_value_heads=1, head_dim=8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_buffers_that_a_class_computes_are_computed_without_its_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    config = tiny_gemma()
    Gemma3ForCausalLM(config).save_pretrained(tmp_path)
    bare = dict(build_tower(config, "cpu", dtype).text.named_buffers())
    real = dict(load_text_model(tmp_path, "cpu", dtype).text.named_buffers())
    assert "model.embed_tokens.embed_scale" in bare
    assert bare.keys() == real.keys()
    assert all(bare[name].dtype == buffer.dtype and torch.equal(bare[name], buffer) for name, buffer in real.items())


def test_buffers_that_nobody_computes_are_refused_not_random(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gemma3ForCausalLM, "_init_weights", lambda self, module: None)
    with pytest.raises(PairingError, match="embed_scale"):
        build_tower(tiny_gemma(), "cpu", torch.float32)


def test_plain_text_checkpoint_loads_with_its_own_config(tmp_path: Path) -> None:
    live = load_text_model(tiny_llama(tmp_path / "base", dtype=torch.bfloat16), "cpu", torch.bfloat16)
    assert live.vlm is None
    assert {tensor.dtype for tensor in live.tensors().values()} == {torch.bfloat16}


@pytest.mark.parametrize("change", ["missing", "extra"])
def test_incomplete_or_foreign_weights_are_refused_by_name(tmp_path: Path, change: str) -> None:
    folder = tiny_llama(tmp_path / "base")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    if change == "missing":
        del tensors[name]
    else:
        name = "model.layers.1.mlp.extra.weight"
        tensors[name] = torch.ones(2)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DamagedFileError, match=name):
        load_text_model(folder, "cpu", torch.float32)


def test_config_of_a_custom_tower_is_rewritten_and_its_rotary_base_kept(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "llava-original", rope_parameters={"rope_type": "default", "rope_theta": 77.0})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= {"model_type": "llava_llama", "architectures": ["LlavaLlamaForCausalLM"], "mm_projector_type": "mlp"}
    path.write_text(json.dumps(config))
    tower = tower_config(folder, has_head=True)
    assert tower.model_type == "llama"
    assert tower.architectures == ["LlamaForCausalLM"]
    assert tower.rope_parameters["rope_theta"] == 77.0
    assert not hasattr(tower, "mm_projector_type")


def test_unknown_model_type_is_refused_without_running_its_code(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "unknown")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "nobody_knows"}))
    with pytest.raises(PairingError, match="nobody_knows"):
        tower_config(folder, has_head=True)


def test_damaged_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(DamagedFileError, match=r"config\.json"):
        tower_config(tmp_path, has_head=True)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_config_that_does_not_describe_its_tower_is_refused_by_name(tmp_path: Path, tied: bool) -> None:
    folder = tiny_llava(tmp_path / "vlm", tie_word_embeddings=tied)
    config = tower_config(folder, has_head=not tied)
    checkpoints = {role: open_checkpoint(folder) for role in ("base", "vlm")}
    jobs = plan_jobs(pair_checkpoints(checkpoints), checkpoints)
    check_outlets(jobs, tower_shapes(config), "LlamaForCausalLM")
    config.num_hidden_layers = 3
    with pytest.raises(PairingError, match=r"layers\.2\.self_attn\.q_proj\.weight: the file has none, LlamaFor"):
        check_outlets(jobs, tower_shapes(config), "LlamaForCausalLM")
    config.num_hidden_layers, config.intermediate_size = 2, 32
    with pytest.raises(PairingError, match=r"gate_proj\.weight: the file has \(24, 16\), LlamaForCausalLM \(32, 16\)"):
        check_outlets(jobs, tower_shapes(config), "LlamaForCausalLM")
