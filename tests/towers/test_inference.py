"""Votes, shapes and roles: what names alone say about a tower of no known family."""

from __future__ import annotations

import re

import pytest

from mergelab.errors import PairingError
from mergelab.towers.inference import Inference, find_text_config, infer_tower, prediction_layers
from mergelab.towers.inferred_rule import role_rules
from tests.towers.names import EYE, FOREIGN, HIDDEN, INNER, KV, ROWS, UNKNOWN_PREFIX, Shapes, renamed, text_model

BASE = text_model()


def places(inference: Inference) -> dict[str, tuple[str, ...]]:
    return {place.name: place.candidates for place in inference.outside}


def test_unknown_prefix_is_found_by_its_layers() -> None:
    found = infer_tower(BASE, renamed(BASE, *UNKNOWN_PREFIX) | EYE)
    assert found.prefix == "foo.bar.llm.blocks"
    assert found.match.coverage == 1.0 and found.match.is_exact and found.missing == []
    assert found.match.layers == (0, 1, 2, 3)
    assert places(found) == {
        "model.embed_tokens.weight": ("foo.bar.llm.tok.weight",),
        "model.norm.weight": ("foo.bar.llm.last_norm.weight",),
        "lm_head.weight": ("foo.out_head.weight",),
    }
    assert found.runner_up == "" and found.runner_up_coverage == 0.0


def test_layers_may_lie_at_the_root() -> None:
    found = infer_tower(BASE, renamed(BASE, (r"^model\.", ""), ("^layers", "h")))
    assert found.prefix == "h" and found.missing == []


@pytest.mark.parametrize("native", [False, True])
def test_known_layouts_need_no_table(native: bool) -> None:
    prefix = "model.language_model." if native else "language_model.model."
    head = "lm_head." if native else "language_model.lm_head."
    tensors = renamed(BASE, ("^model.", prefix), ("^lm_head.", head)) | renamed(EYE, ("^foo.eye", "vision_tower"))
    found = infer_tower(BASE, tensors)
    assert found.prefix == f"{prefix}layers" and found.match.is_exact and found.missing == []
    assert places(found)["lm_head.weight"] == (f"{head}weight",)


def test_smaller_text_encoder_is_the_runner_up_not_the_tower() -> None:
    decoy = renamed(text_model(2, head=False), (r"^model\.", "foo.prompt_encoder."))
    found = infer_tower(BASE, renamed(BASE, *UNKNOWN_PREFIX) | decoy)
    assert found.prefix == "foo.bar.llm.blocks"
    assert found.runner_up == "foo.prompt_encoder.layers" and found.runner_up_coverage == 0.5
    assert places(found)["model.embed_tokens.weight"] != ("foo.prompt_encoder.embed_tokens.weight",)


def test_text_encoder_of_another_width_holds_nothing() -> None:
    decoy = renamed(text_model(4, hidden=12, inner=20, kv=4), (r"^model\.", "foo.prompt."), ("^lm_head", "foo.p.head"))
    found = infer_tower(BASE, renamed(BASE, *UNKNOWN_PREFIX) | decoy)
    assert found.prefix == "foo.bar.llm.blocks" and found.runner_up == ""


def test_vision_layers_of_equal_shapes_lose() -> None:
    """An encoder as deep and wide as the tower, with the same attention names, but two matrices in its mlp."""
    for name, is_rival in (("enc", True), ("vision_model", False)):
        same = {n: s for n, s in BASE.items() if "self_attn" in n or "layernorm" in n}
        eye = renamed(same, (r"^model\.", f"{name}."))
        eye |= {f"{name}.layers.{layer}.mlp.fc1.weight": (40, HIDDEN) for layer in range(4)}
        found = infer_tower(BASE, renamed(BASE, *FOREIGN) | eye)
        assert found.prefix == "foo.bar.llm.blocks" and found.match.coverage == 1.0
        assert found.runner_up == ("enc.layers" if is_rival else "")
        assert found.runner_up_coverage == (pytest.approx(6 / 9) if is_rival else 0.0)


def test_vision_tower_that_is_a_copy_of_the_tower_gives_way_by_its_word() -> None:
    copy = renamed(BASE, (r"^model\.", "a.vision_tower."), ("^lm_head", "a.vision_tower.head"))
    assert infer_tower(BASE, renamed(BASE, *UNKNOWN_PREFIX) | copy).prefix == "foo.bar.llm.blocks"


def test_two_equal_towers_are_refused_with_both_names() -> None:
    tensors = renamed(BASE, *UNKNOWN_PREFIX) | renamed(BASE, (r"^model\.", "tts.llm."), ("^lm_head", "tts.head"))
    with pytest.raises(PairingError, match="2 towers hold 100% of the base's layers each") as caught:
        infer_tower(BASE, tensors)
    assert "foo.bar.llm.blocks.*" in str(caught.value) and "tts.llm.layers.*" in str(caught.value)


def test_stranger_has_no_tower() -> None:
    with pytest.raises(PairingError, match="no stack of layers holds half of the base's tensors; the best, "):
        infer_tower(BASE, renamed(text_model(hidden=20, kv=4, inner=28), *UNKNOWN_PREFIX))
    with pytest.raises(PairingError, match="there are no numbered layers"):
        infer_tower(BASE, {"a.weight": (3, 3)})


def test_tensor_that_is_not_there_is_missing_by_name() -> None:
    tensors = renamed(BASE, *UNKNOWN_PREFIX)
    for layer in range(4):
        del tensors[f"foo.bar.llm.blocks.{layer}.mlp.up_proj.weight"]
    del tensors["foo.bar.llm.last_norm.weight"]
    found = infer_tower(BASE, tensors)
    assert found.missing == ["model.norm.weight", "model.layers.*.mlp.up_proj.weight"]


def test_inserted_layers_are_dropped_in_order() -> None:
    tensors: Shapes = {}
    for layer, old in enumerate((0, None, 1, 2, None, 3)):
        if old is None:  # as Mllama: no self-attention, an mlp of the same shapes
            tensors |= {n.replace("layers.0", f"layers.{layer}"): s for n, s in BASE.items() if "layers.0.mlp" in n}
            tensors[f"model.layers.{layer}.cross_attn.q_proj.weight"] = (HIDDEN, HIDDEN)
        else:
            start = f"model.layers.{old}."
            tensors |= {n.replace(start, f"model.layers.{layer}."): s for n, s in BASE.items() if n.startswith(start)}
    tensors |= {n: s for n, s in BASE.items() if "layers" not in n}
    found = infer_tower(BASE, tensors)
    assert found.match.layers == (0, 2, 3, 5) and found.dropped == (1, 4) and found.missing == []
    roles = found.roles(tensors, {n: n for n in places(found)})
    assert set(roles.values()) == {"extra"} and all(n.startswith(("model.layers.1.", "model.layers.4.")) for n in roles)


def test_more_layers_of_one_kind_are_not_guessed_away() -> None:
    found = infer_tower(BASE, renamed(text_model(5), *UNKNOWN_PREFIX))
    assert found.match.layers == () and found.dropped == ()


def test_layers_for_multi_token_prediction_may_lack() -> None:
    names = prediction_layers(BASE, {"num_hidden_layers": 3, "num_nextn_predict_layers": 1})
    assert names == {name for name in BASE if ".layers.3." in name}
    assert prediction_layers(BASE, {"num_hidden_layers": 3}) == set()
    found = infer_tower(BASE, renamed(text_model(3), *UNKNOWN_PREFIX), names)
    assert found.missing == [] and set(found.optional) == names


def test_fused_projections_are_found_by_the_sum_of_rows() -> None:
    base = text_model(biases=True)
    tensors = {n: s for n, s in renamed(base, *FOREIGN).items() if not re.search(r"[qkv]_proj|gate_proj|up_proj", n)}
    for layer in range(4):
        start = f"foo.bar.llm.blocks.{layer}."
        tensors |= {f"{start}att.wqkv.weight": (HIDDEN + 2 * KV, HIDDEN), f"{start}att.wqkv.bias": (HIDDEN + 2 * KV,)}
        tensors[f"{start}ff.w13.weight"] = (2 * INNER, HIDDEN)
    found = infer_tower(base, tensors)
    assert found.missing == [] and found.match.coverage == 1.0
    assert {operation.text for operation in found.match.settled} == {
        "att.wo = self_attn.o_proj", "ff.w2 = mlp.down_proj",
    }  # fmt: skip
    ways = {choice.text: [option[0].how for option in choice.options] for choice in found.match.choices}
    assert ways == {
        "ln_1, ln_2": ["rename"] * 2,
        "att.wqkv": ["rows"] * 6 + ["grouped"],
        "ff.w13": ["rows"] * 2,
    }


def test_key_and_value_fused_beside_query() -> None:
    tensors = {n: s for n, s in BASE.items() if not re.search(r"[kv]_proj", n)}
    tensors |= {f"model.layers.{layer}.self_attn.kv.weight": (2 * KV, HIDDEN) for layer in range(4)}
    (choice,) = infer_tower(BASE, tensors).match.choices
    assert [option[0].text for option in choice.options] == [
        "self_attn.kv = self_attn.k_proj|self_attn.v_proj",
        "self_attn.kv = self_attn.v_proj|self_attn.k_proj",
    ]


@pytest.mark.parametrize(("transposed", "how"), [(False, "stacked"), (True, "transposed")])
def test_stacked_experts_in_both_orientations(transposed: bool, how: str) -> None:
    base = text_model(experts=3)
    tensors = {n: s for n, s in base.items() if ".experts." not in n}
    for layer in range(4):
        for name, rows, columns in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
            shape = (3, columns, rows) if transposed else (3, rows, columns)
            tensors[f"model.layers.{layer}.mlp.experts.{name}"] = shape
    found = infer_tower(base, tensors)
    assert found.missing == [] and found.match.coverage == 1.0
    assert [operation.how for operation in found.match.settled] == [how]
    (choice,) = found.match.choices
    assert {(option[0].how, option[0].interleaved) for option in choice.options} == {(how, False), (how, True)}


def test_norm_of_the_same_name_is_no_proof_where_another_is_missing() -> None:
    """As Molmo2 over Olmo3: the vlm's norms bear the names of Llama's, and one of them is another norm of the base."""
    base = renamed(BASE, ("post_attention", "post_feedforward"), ("input", "post_attention"))
    found = infer_tower(base, BASE)
    (choice,) = found.match.choices
    assert [[(op.source.name, op.parts[0].name) for op in option] for option in choice.options] == [
        [("input_layernorm", "post_attention_layernorm"), ("post_attention_layernorm", "post_feedforward_layernorm")],
        [("post_attention_layernorm", "post_attention_layernorm"), ("input_layernorm", "post_feedforward_layernorm")],
    ]


def test_single_table_is_the_embedding_and_its_head_is_tied() -> None:
    tensors = {n: s for n, s in renamed(BASE, *UNKNOWN_PREFIX).items() if "out_head" not in n}
    found = infer_tower(BASE, tensors)
    assert places(found)["model.embed_tokens.weight"] == ("foo.bar.llm.tok.weight",)
    assert places(found)["lm_head.weight"] == () and found.missing == []


def test_head_that_a_tied_base_lacks_is_found_by_its_word() -> None:
    found = infer_tower(text_model(head=False), renamed(BASE, *UNKNOWN_PREFIX))
    assert places(found)["lm_head.weight"] == ("foo.out_head.weight",)


def test_tables_without_a_word_stay_open() -> None:
    tensors = renamed(BASE, *UNKNOWN_PREFIX[:1], (r"^model\.embed_tokens", "foo.a"), (r"^model\.norm", "foo.n"))
    found = infer_tower(BASE, renamed(tensors, ("^lm_head", "foo.b")))
    assert places(found)["model.embed_tokens.weight"] == ("foo.a.weight", "foo.b.weight")


def test_every_other_tensor_has_a_role() -> None:
    tensors = renamed(BASE, *UNKNOWN_PREFIX) | EYE
    tensors |= {
        "foo.bar.llm.tok_new.weight": (4, HIDDEN),
        "foo.bar.llm.rotary_emb.inv_freq": (2,),
        "foo.bar.llm.strange.weight": (3, 3),
        "foo.bar.llm.blocks.2.pool.weight": (5, 5),
        "foo.mm_projector.0.weight": (HIDDEN, 9),
        "foo.talker.layers.0.w.weight": (7, 7),
        "visual.merger.mlp.0.weight": (4, 4),
    }
    found = infer_tower(BASE, tensors)
    outside = {name: candidates[0] for name, candidates in places(found).items()}
    roles = found.roles(tensors, outside)
    assert roles == {
        **dict.fromkeys(EYE, "vision"),
        "foo.bar.llm.tok_new.weight": "extra",
        "foo.bar.llm.rotary_emb.inv_freq": "extra",
        "foo.bar.llm.strange.weight": "unknown",
        "foo.bar.llm.blocks.2.pool.weight": "unknown",
        "foo.mm_projector.0.weight": "projector",
        "foo.talker.layers.0.w.weight": "other",
        "visual.merger.mlp.0.weight": "projector",
    }
    rules = role_rules(found, tensors, roles)
    for name in tensors:
        said = {role for role, patterns in rules.items() if any(re.search(pattern, name) for pattern in patterns)}
        expected = {"other": "extra", "unknown": "extra"}.get(roles.get(name, ""), roles.get(name))
        assert said == ({expected} if expected else set()), name
    assert rules["vision"] == [r"^foo\.eye\."]


def test_tables_of_other_rows_count_as_embedding_only_near_the_bases() -> None:
    tensors = renamed(BASE, *UNKNOWN_PREFIX) | {"foo.bar.llm.positions.weight": (ROWS // 2, HIDDEN)}
    assert places(infer_tower(BASE, tensors))["model.embed_tokens.weight"] == ("foo.bar.llm.tok.weight",)


def test_text_config_is_found_by_depth_and_width() -> None:
    match = infer_tower(BASE, BASE).match
    size = {"num_hidden_layers": 4, "hidden_size": HIDDEN}
    config = {"vision": {**size, "hidden_size": 3}, "parts": {"lang": {**size, "x": {}}}}
    assert find_text_config(config, match, HIDDEN) == "parts.lang"
    assert find_text_config({"vision": config["vision"]}, match, HIDDEN) == ""


def test_head_is_not_taken_for_an_embedding_that_speaks_of_pictures() -> None:
    """As Phi-3-vision, which keeps its embedding among its picture modules."""
    tensors = renamed(BASE, (r"^model\.embed_tokens", "model.vision_embed_tokens.wte"))
    found = places(infer_tower(BASE, tensors))
    assert found["model.embed_tokens.weight"] == ("model.vision_embed_tokens.wte.weight",)
    assert found["lm_head.weight"] == ("lm_head.weight",)
