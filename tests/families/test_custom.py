"""Layouts without a class in transformers: a real text model stored by hand as each family stores its tower.

What is written as text must load in the plain class without a key too many or too few, and answer as the model that
was stored; so must the live model, into which the same tensors are streamed.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from mergelab.checkpoints.fingerprint import fingerprint_checkpoint
from mergelab.checkpoints.headers import open_checkpoint
from mergelab.config import Pair
from mergelab.engine.targets import hash_live
from mergelab.sweeps.identity import MAPPING
from mergelab.sweeps.loading import tower_of
from mergelab.sweeps.models import open_models
from mergelab.sweeps.writing import write_tower
from tests.builders import hand_made
from tests.families.checkpoints import load
from tests.towers import stored
from tests.towers.names import UNKNOWN_PREFIX
from tests.towers.stored import EXPERTS, GROUPS, HEADS, HIDDEN, INTER, LAYERS, ROWS, SIZE, Tensors, renamed

TEXT: dict[str, Any] = {
    "vocab_size": ROWS, "hidden_size": HIDDEN, "intermediate_size": INTER, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": SIZE, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
IDS = torch.tensor([[1, 5, 9, 13, 17, 21, 3, 4, 4, 22], [1, 8, 2, 7, 19, 23, 6, 5, 5, 11]])
TOKENS = ("<pad>", "<s>", "</s>", "<unk>", *(f"word{number}" for number in range(4, ROWS)))


@dataclass(frozen=True)
class Custom:
    """A text model of transformers, and how a family stores it."""

    text: str
    """Its model_type."""
    store: Callable[[Tensors], Tensors]
    config: Callable[[dict[str, Any]], dict[str, Any]]
    """The vlm's config, from that of the text model."""
    fields: dict[str, Any] = field(default_factory=dict)


def flat(model_type: str, **more: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a config that has the text model's fields at the top, under another type."""
    return lambda text: {**text, **more, "model_type": model_type, "mm_vision_tower": "clip", "auto_map": {"x": "y"}}


def inside(model_type: str, key: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a config that keeps the text model's in a section."""
    return lambda text: {"model_type": model_type, key: {**text, "_name_or_path": "stale", "auto_map": {"x": "y"}}}


def olmo_style(text: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of Molmo: gate and up counted together, other names."""
    kept = {
        key: value for key, value in text.items() if key not in ("rms_norm_eps", "num_experts", "num_experts_per_tok")
    }
    after = text["model_type"] == "olmo2"
    return {
        **kept, "model_type": "molmo", "intermediate_size": 2 * INTER, "layer_norm_eps": text["rms_norm_eps"],
        "qkv_bias": text["model_type"] == "qwen2", "norm_after": after, "additional_vocab_size": 4,
        "moe_num_experts": text.get("num_experts"), "moe_top_k": text.get("num_experts_per_tok"),
    }  # fmt: skip


def molmo_after(tensors: Tensors) -> Tensors:
    """Return the names of a tower with norms after its blocks."""
    return stored.molmo(
        renamed(tensors, ("post_attention_layernorm", "input_layernorm"), ("post_feedforward", "post_attention"))
    )


def internlm2_config(text: dict[str, Any]) -> dict[str, Any]:
    own = {**text, "model_type": "internlm2", "bias": False, "attn_implementation": "eager", "auto_map": {"x": "y"}}
    return {"model_type": "internvl_chat", "llm_config": own}


def beside(*rules: tuple[str, str]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: (
        renamed(tensors, *rules) | {"vision_model.x.weight": torch.ones(3), "mlp1.0.weight": torch.ones(3)}
    )


CUSTOM = {
    "internlm2": Custom("llama", stored.internlm2, internlm2_config),
    "molmo": Custom("qwen2", stored.molmo, olmo_style),
    "molmo-olmo2": Custom("olmo2", molmo_after, olmo_style, {"num_attention_heads": 4, "num_key_value_heads": 4}),
    "molmoe": Custom(
        "olmoe", stored.molmo, olmo_style,
        {"num_experts": EXPERTS, "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 4},
    ),
    "phi4mm": Custom("phi3", stored.phi4, flat("phi4mm", vision_lora={"r": 2}, img_processor=None)),
    "phi3-vision": Custom("phi3", stored.phi3_vision, flat("phi3_v", img_processor={"x": 1}, embd_layer={"y": 2})),
    "wings": Custom("qwen2", stored.wings, flat("wings_qwen2")),
    "cambrian": Custom("llama", stored.cambrian, flat("cambrian_llama", vision_tower_aux_token_len_list=[1])),
    "minicpm-o": Custom("qwen2", stored.minicpm_o, flat("minicpmo", version="2.6")),
    "minicpm-v": Custom("qwen3", stored.minicpm_o, flat("minicpmv", version=4.5)),
    "llava": Custom(
        "llama", lambda t: t | {"model.mm_projector.0.weight": torch.ones(3, 3)}, flat("llava", mm_hidden_size=3)
    ),
    "llava-qwen": Custom(
        "qwen2", lambda t: t | {"model.mm_projector.0.weight": torch.ones(3, 3)}, flat("llava_qwen", mm_hidden_size=3)
    ),
    "internvl": Custom("qwen2", beside(("^", "language_model.")), inside("internvl_chat", "llm_config")),
    "ovis": Custom(
        "qwen3",
        lambda t: renamed(t, ("^", "llm.")) | {"visual_tokenizer.x": torch.ones(3), "vte.weight": torch.ones(3)},
        inside("ovis", "llm_config"),
    ),
    "deepseek-vl": Custom(
        "llama",
        lambda t: renamed(t, ("^", "language_model.")) | {"vision_model.x": torch.ones(3), "aligner.x": torch.ones(3)},
        inside("multi_modality", "language_config"),
    ),
    "nvila-hf": Custom(
        "qwen2",
        lambda t: renamed(t, ("^", "llm.")) | {"vision_tower.x": torch.ones(3), "mm_projector.x": torch.ones(3)},
        inside("something_new", "llm_cfg"),
    ),
}  # fmt: skip


@pytest.fixture(params=CUSTOM)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[PreTrainedModel, Path, Path]:
    """Return the text model, its own folder, and the folder of a vlm that has it as its tower."""
    custom = CUSTOM[request.param]
    torch.manual_seed(0)
    config = CONFIG_MAPPING[custom.text](**{**TEXT, **custom.fields})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases begin as ones and zeros, which hides a mix-up
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "plain")
    tensors = load_file(tmp_path / "plain" / "model.safetensors")
    hand_made(tmp_path / "base", tensors, config=model.config.to_dict(), tokens=TOKENS)
    vlm = {name: tensor.float().contiguous() for name, tensor in custom.store(tensors).items()}
    hand_made(tmp_path / "vlm", vlm, config=custom.config(model.config.to_dict()), tokens=TOKENS)
    return model, tmp_path / "base", tmp_path / "vlm"


@torch.no_grad()
def answers(model: PreTrainedModel) -> torch.Tensor:
    return model(input_ids=IDS).logits


def test_exported_and_live_tower_answer_as_the_model_that_was_stored(
    case: tuple[PreTrainedModel, Path, Path], tmp_path: Path
) -> None:
    model, base, vlm = case
    pair = Pair(name="custom", base=str(base), vlm=str(vlm))
    models = open_models(pair)
    write_tower(pair, models, tmp_path / "tower")
    exported = load(AutoModelForCausalLM, tmp_path / "tower")
    assert type(exported) is type(model)
    assert torch.equal(answers(exported), answers(model))
    tower = models.pairing.towers["vlm"]
    live = tower_of(models.checkpoints["vlm"], tower, "cpu", torch.float32)
    live.text.set_attn_implementation("eager")
    assert torch.equal(answers(live.text), answers(model))
    assert hash_live(live.tensors()) == fingerprint_checkpoint(open_checkpoint(tmp_path / "tower"))


def test_live_tower_of_a_kept_rule_is_the_exported_one(tmp_path: Path) -> None:
    """Only the rule reads these names, so the streamed tower must be read by it as well."""
    torch.manual_seed(0)
    text = CONFIG_MAPPING["llama"](**TEXT)
    model = AutoModelForCausalLM.from_config(text)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    base = hand_made(tmp_path / "base", tensors, config=text.to_dict(), tokens=TOKENS)
    foreign = {name: tensor.clone() for name, tensor in renamed(tensors, *UNKNOWN_PREFIX).items()}
    foreign["foo.eye.patch.weight"] = torch.ones(3, 3)
    config = {"model_type": "something_new", "odd": {"text": text.to_dict()}}
    vlm = hand_made(tmp_path / "vlm", foreign, config=config, tokens=TOKENS)
    inferred = open_models(Pair(name="custom", base=str(base), vlm=str(vlm)), accept_inferred=True)
    assert inferred.report is not None
    (tmp_path / "rule.yaml").write_text(inferred.report.rule)
    pair = Pair(name="custom", base=str(base), vlm=str(vlm), family=str(tmp_path / "rule.yaml"))
    for place, models in enumerate((inferred, open_models(pair))):
        out = tmp_path / f"tower{place}"
        write_tower(pair, models, out)
        live = tower_of(models.checkpoints["vlm"], models.pairing.towers["vlm"], "cpu", torch.float32)
        assert hash_live(live.tensors()) == fingerprint_checkpoint(open_checkpoint(out))
        manifest = json.loads((out / "mergelab.json").read_text())
        assert manifest["fingerprints"][MAPPING] == models.mapping != ""
        assert (manifest["inferred"] is None) == (models.report is None)
