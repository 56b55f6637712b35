"""What transformers' own loaders make of a vlm's folder: the reasons for our configs and exports.

These are facts about the installed transformers. A failure here means that it changed, and that what is built on the
fact has to be looked at again.
"""

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from mergelab.live.model import quiet_transformers
from tests.families.catalogue import FAMILIES
from tests.families.checkpoints import Build
from tests.families.family import Family

TEXT_CLASS = {"qwen3_5", "qwen3_5_moe", "llama4", "mllama"}
WHOLE_CLASS = {"gemma3", "gemma4"}
KEY_MAPPING = {
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^model\.language_model\.": "model.",
    r"^model\.text_model\.": "model.",
}
VLMS = [pytest.param(family, id=family.id) for family in FAMILIES if family.sees_pictures]


@pytest.mark.parametrize("family", VLMS)
def test_causal_lm_loader_on_a_vlm(built: Build, family: Family) -> None:
    folder = built(family).folder(family.layouts[0])
    if family.model_type not in TEXT_CLASS | WHOLE_CLASS:
        with pytest.raises(ValueError, match="Unrecognized configuration class"):
            AutoModelForCausalLM.from_pretrained(folder)
        return
    with quiet_transformers():
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    assert (type(model) is type(built(family).vlm)) is (family.model_type in WHOLE_CLASS)


ALONE = {"llama4", "qwen3_5", "qwen3_5_moe", "minicpmv4_6"}
"""Their text classes know the names of the vlm."""
SAME_TYPE = [
    pytest.param(family, id=family.id)
    for family in FAMILIES
    if family.sees_pictures and "model_type" not in family.base and family.model_type not in ALONE
]


@pytest.mark.parametrize("family", SAME_TYPE)
def test_text_config_alone_leaves_the_tower_random_and_a_key_mapping_loads_it(built: Build, family: Family) -> None:
    folder = built(family).folder(family.layouts[0])
    settings = {"config": AutoConfig.from_pretrained(folder).get_text_config(), "output_loading_info": True}
    with quiet_transformers():
        model, info = AutoModelForCausalLM.from_pretrained(folder, **settings)
        _, mapped = AutoModelForCausalLM.from_pretrained(folder, key_mapping=KEY_MAPPING, **settings)
    towers = {name for name in model.state_dict() if name.startswith("model.")}
    assert info["missing_keys"] >= towers, "random without an error: why nothing here loads a vlm that way"
    assert not mapped["missing_keys"] and not mapped["mismatched_keys"]
