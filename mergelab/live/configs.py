"""The plain causal-LM config of a tower, from whatever config its vlm carries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from mergelab.errors import DamagedFileError, MergelabError, PairingError
from mergelab.strict_json import read_object, shown
from mergelab.towers.detection import family_of_type
from mergelab.towers.rules import Family
from mergelab.towers.text_config import derived_config, nested_config

PLAIN_TYPES = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
    "mllama_text_model": "llama",
}
"""Text configs inside a vlm that no causal-LM class answers to, and the class whose function equals theirs on text.

Three equal position rows make multimodal rotary embeddings the plain ones, and Mllama skips its inserted layers.
"""


def read_config(folder: Path) -> dict[str, Any]:
    """Return ``config.json`` of a checkpoint folder.

    Raises:
        DamagedFileError: It is missing or not a JSON object.
    """
    path = folder / "config.json"
    try:
        return read_object(path)
    except FileNotFoundError:
        raise DamagedFileError(f"{path}: missing. A checkpoint folder needs its config.json.") from None
    except (OSError, ValueError) as error:
        raise DamagedFileError(f"{path}: not readable as JSON ({error}). Fetch the file again.") from error


@contextmanager
def naming_config_errors(folder: Path) -> Iterator[None]:
    """Turn whatever transformers raises for a config it cannot use into a DamagedFileError that names the file."""
    try:
        yield
    except (MergelabError, MemoryError):
        raise
    except Exception as error:  # its checks raise many kinds, some of their own
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise DamagedFileError(
            f"{folder / 'config.json'}: transformers cannot use it: {shown(' '.join(lines[:2]))} Fetch the file again."
        ) from error


def has_vlm_class(folder: Path, family: Family | None = None) -> bool:
    """Return True if transformers has a class that loads the whole vlm.

    Old files of the original LLaVA code say ``llava`` as those of transformers do; their keys, and so their ``family``,
    tell them apart.
    """
    model_type = str(read_config(folder).get("model_type") or "")
    collides = family is not None and bool(family.export) and model_type not in family.detect.model_type
    return model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES and not collides


def tower_config(folder: Path, has_head: bool, family: Family | None = None) -> PretrainedConfig:
    """Return the config under which a tower loads as an ordinary causal LM.

    The rotary base, epsilons and windows are the tower's own. Multimodal rotary sections are dropped, which on
    text changes nothing. A stored head tensor decides tying, not the flag.

    Args:
        folder: The vlm's folder (or that of a plain text checkpoint).
        has_head: True if the tower has its own output head.
        family: The tower's family; None: told by the model_type alone.

    Raises:
        PairingError: No causal-LM class is known for this kind of tower.
        DamagedFileError: The config says what transformers cannot use.
    """
    raw = read_config(folder)
    with naming_config_errors(folder):
        return _tower_config(folder, raw, has_head, family)


def _tower_config(folder: Path, raw: dict[str, Any], has_head: bool, family: Family | None) -> PretrainedConfig:
    model_type = str(raw.get("model_type") or "")
    derived = derived_config(raw, family or family_of_type(model_type))
    if derived is None and model_type not in CONFIG_MAPPING:
        derived = nested_config(raw)
    if derived is not None and derived["model_type"] in CONFIG_MAPPING:
        text = CONFIG_MAPPING[derived["model_type"]](**derived)
    elif model_type in CONFIG_MAPPING:
        text = AutoConfig.from_pretrained(folder).get_text_config(decoder=True)
    else:
        raise PairingError(
            f"{folder / 'config.json'}: model_type {model_type or '(none)'} is not one transformers knows, and its own "
            "code is not run. Use the transformers-native conversion of this model."
        )
    plain_type = _plain_type(text)
    if plain_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise PairingError(
            f"{folder / 'config.json'}: a tower of type {text.model_type} has no causal-LM class in transformers, "
            "so its text ability cannot be measured apart from the vlm. `mergelab merge --as vlm` is possible."
        )
    fields = _plain_fields(text, plain_type)
    config = CONFIG_MAPPING[plain_type](**fields)
    config.tie_word_embeddings = not has_head
    config.architectures = [_class_name(plain_type)]
    return config


def _plain_type(text: PretrainedConfig) -> str:
    """Return the type of the causal LM whose function equals the tower's."""
    if text.model_type == "molmo2_text":
        return "olmo3" if text.norm_after else "qwen3"
    return PLAIN_TYPES.get(text.model_type, text.model_type)


def _plain_fields(text: PretrainedConfig, plain_type: str) -> dict[str, Any]:
    """Return the fields of the tower's causal-LM config."""
    fields = {key: value for key, value in text.to_dict().items() if key not in ("model_type", "architectures")}
    if fields.get("rope_parameters"):
        fields["rope_parameters"] = _plain_rope(fields["rope_parameters"])
    if plain_type != text.model_type:
        if fields.get("use_sliding_window") is False:
            fields.pop("layer_types", None)
        if fields.get("head_dim") is None:  # the plain class may have another default than the quotient
            fields["head_dim"] = text.hidden_size // text.num_attention_heads
    if text.model_type in ("gemma", "gemma2"):
        # PaliGemma asks for whole attention within pictures. The plain class makes causal masks all the same, but its
        # sdpa leaves an all-true one out and then looks ahead.
        fields.pop("use_bidirectional_attention", None)
    if text.model_type == "qwen3_vl_moe_text":
        fields["norm_topk_prob"] = True  # its router always does
    if text.model_type == "mllama_text_model":
        fields["num_hidden_layers"] -= len(fields.pop("cross_attention_layers"))
    if text.model_type == "molmo2_text":
        _plain_molmo2(fields, plain_type)
    return fields


def _plain_molmo2(fields: dict[str, Any], plain_type: str) -> None:
    """Turn Molmo2's fields into those of Qwen3 or Olmo3.

    Olmo3 reads rotary settings per layer type and ignores flat ones. Molmo2 has no windows, so they are opened wider
    than the context; the layer types only say which layers scale their frequencies.
    """
    scaled = set(fields.pop("rope_scaling_layers"))
    for key in ("additional_vocab_size", "qk_norm_type", "norm_after"):
        fields.pop(key)
    if plain_type != "olmo3":
        return
    rope, layers = fields["rope_parameters"], range(fields["num_hidden_layers"])
    plain = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    fields["layer_types"] = ["full_attention" if layer in scaled else "sliding_attention" for layer in layers]
    fields["rope_parameters"] = {"full_attention": rope, "sliding_attention": plain}
    fields["sliding_window"] = fields["max_position_embeddings"] + 1


def _class_name(model_type: str) -> str:
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    return name if isinstance(name, str) else name[0]


def _plain_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """Drop what only multimodal rotary embeddings read."""
    plain = {k: v for k, v in rope.items() if k not in ("mrope_section", "mrope_interleaved", "type")}
    if plain.get("rope_type") == "mrope":
        plain["rope_type"] = "default"
    return plain
