"""Every vlm that transformers registers has a text config, or is refused by the name of its tower."""

import json
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from mergelab.errors import DamagedFileError, PairingError
from mergelab.live.configs import PLAIN_TYPES, has_vlm_class, read_config, tower_config
from mergelab.live.model import quiet_transformers

BY_FUNCTION = {*PLAIN_TYPES, "molmo2_text"}


@pytest.mark.parametrize("model_type", sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES))
def test_registered_vlm_has_a_text_config_or_is_refused_by_name(tmp_path: Path, model_type: str) -> None:
    with quiet_transformers():
        config = CONFIG_MAPPING[model_type]()
        config.save_pretrained(tmp_path)
        text = config.get_text_config(decoder=True)
        if text.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or text.model_type in BY_FUNCTION:
            found = tower_config(tmp_path, has_head=True)
            assert found.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
            assert found.hidden_size == text.hidden_size
            assert not found.tie_word_embeddings
        else:
            with pytest.raises(PairingError, match=rf"tower of type {text.model_type} has no causal-LM class"):
                tower_config(tmp_path, has_head=True)


def test_molmo2_on_olmo3_sees_its_whole_context(tmp_path: Path) -> None:
    """The plain class has windows in 3 of 4 layers, Molmo2 none; the tiny models are too short to show it."""
    config = CONFIG_MAPPING["molmo2"](text_config={"norm_after": True, "qk_norm_type": "olmo"})
    config.save_pretrained(tmp_path)
    found = tower_config(tmp_path, has_head=True)
    assert found.model_type == "olmo3"
    assert found.sliding_window > found.max_position_embeddings == config.text_config.max_position_embeddings


@pytest.mark.parametrize("kind", [["llava"], {"llava": 1}, 3, None])
def test_model_type_that_is_no_text_is_no_class(tmp_path: Path, kind: object) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    assert not has_vlm_class(tmp_path)
    with pytest.raises(PairingError, match="is not one transformers knows"):
        tower_config(tmp_path, has_head=True)


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '{"a": ' + "[" * 100_000, "[]"])
def test_config_is_read_as_strictly_as_checkpoints_are(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(DamagedFileError, match=r"config\.json: not readable as JSON \("):
        read_config(tmp_path)
