"""The total pairing: relatives pair completely, everything else is refused with every leftover."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mergelab.checkpoints.headers import open_checkpoint
from mergelab.errors import PairingError
from mergelab.towers.pairing import MustEqual, Pairing, pair_checkpoints
from tests.builders import WORDS, hand_made, text_tensors, tiny_llama, tiny_llava
from tests.towers.stored import molmo, plain

VISION = {
    "model.visual.blocks.0.attn.qkv.weight": torch.zeros(24, 8),
    "model.visual.merger.linear_fc1.weight": torch.zeros(8, 8),
}


def pair(**folders: Path) -> Pairing:
    return pair_checkpoints({role: open_checkpoint(folder) for role, folder in folders.items()})


def refusal(**folders: Path) -> str:
    with pytest.raises(PairingError) as caught:
        pair(**folders)
    return str(caught.value)


def base_by_hand(folder: Path, **changes: Any) -> Path:
    return hand_made(folder, text_tensors(num_layers=12) | changes.pop("tensors", {}), **changes)


def vlm_by_hand(folder: Path, drop: str = "", tensors: Any = (), **changes: Any) -> Path:
    found = text_tensors("model.language_model.", num_layers=12, seed=1) | VISION | dict(tensors)
    found.pop(drop, None)
    return hand_made(folder, found, **changes)


@pytest.mark.parametrize("native", [False, True], ids=["hub", "native"])
def test_real_relatives_pair_completely(tmp_path: Path, native: bool) -> None:
    ancestor = tiny_llama(tmp_path / "ancestor")
    base = tiny_llama(tmp_path / "base", start=ancestor, seed=2, max_shard_size="5KB")
    vlm = tiny_llava(tmp_path / "vlm", start=ancestor, native=native)
    pairing = pair(ancestor=ancestor, base=base, vlm=vlm)
    stored = open_checkpoint(vlm).tensors
    assert {tensor.name for tensor in pairing.tensors} == set(open_checkpoint(base).tensors)
    assert {tensor.stored["vlm"] for tensor in pairing.tensors} | set(pairing.copied) == set(stored)
    assert all("vision" in name or "projector" in name for name in pairing.copied)
    assert pairing.explained == {} and pairing.must_equal == ()
    assert pairing.layouts["base"] == "model."
    assert pairing.tensors[0].name == "model.embed_tokens.weight"
    assert [t.name for t in pairing.tensors][-2:] == ["model.norm.weight", "lm_head.weight"]
    for tensor in pairing.tensors:
        assert tensor.stored["base"] == tensor.stored["ancestor"] == tensor.name
        assert tensor.shape == stored[tensor.stored["vlm"]].shape
        assert (tensor.rows is None) == (tensor.kind not in ("embedding", "head"))
    assert pairing.vocabulary["model.embed_tokens.weight"] == {
        "by": "token", "shared": len(WORDS), "vlm_only": 1, "base_only": 0, "padding": 9,
    }  # fmt: skip


def test_layers_come_in_number_order(tmp_path: Path) -> None:
    pairing = pair(base=base_by_hand(tmp_path / "b"), vlm=vlm_by_hand(tmp_path / "v"))
    layers = [int(t.name.split(".")[2]) for t in pairing.tensors if "layers" in t.name]
    assert layers == sorted(layers) and max(layers) == 11


def test_plain_text_checkpoint_may_stand_as_vlm(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "base")
    pairing = pair(base=base, vlm=tiny_llama(tmp_path / "vlm", start=base, dtype=torch.bfloat16))
    assert pairing.copied == ()
    assert {tensor.dtype for tensor in pairing.tensors} == {"BF16"}


def test_pair_without_tokenizer_files_is_by_index_and_says_so(tmp_path: Path) -> None:
    pairing = pair(base=base_by_hand(tmp_path / "b"), vlm=vlm_by_hand(tmp_path / "v"))
    assert all(tensor.rows is None for tensor in pairing.tensors)
    assert pairing.vocabulary["lm_head.weight"]["by"] == "index"
    assert any("no readable tokenizer files" in note for note in pairing.notes)


# F12: tensors that one side lacks.


def test_tensor_that_the_vlm_lacks_is_refused(tmp_path: Path) -> None:
    name = "model.layers.3.self_attn.q_norm.weight"
    vlm = vlm_by_hand(tmp_path / "v", drop=name.replace("model.", "model.language_model."))
    message = refusal(base=base_by_hand(tmp_path / "b"), vlm=vlm)
    assert f"{name}: base BF16 (4,), vlm has none" in message
    assert "Problems: 1." in message


@pytest.mark.parametrize(
    "name", ["model.language_model.layers.0.extra.bias", "model.language_model.layers.3.linear_attn.A_log"]
)
def test_tensor_that_the_base_lacks_is_refused(tmp_path: Path, name: str) -> None:
    message = refusal(
        base=base_by_hand(tmp_path / "b"), vlm=vlm_by_hand(tmp_path / "v", tensors={name: torch.zeros(4)})
    )
    assert f"{name.replace('language_model.', '')}: base has none, vlm F32 (4,)" in message


def test_buffers_are_explained_on_either_side(tmp_path: Path) -> None:
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    pairing = pair(base=base_by_hand(tmp_path / "b", tensors=buffer), vlm=vlm_by_hand(tmp_path / "v"))
    assert list(pairing.explained) == ["base: model.layers.0.self_attn.rotary_emb.inv_freq"]
    stored = "model.language_model.rotary_emb.inv_freq"
    pairing = pair(base=tmp_path / "b", vlm=vlm_by_hand(tmp_path / "v2", tensors={stored: torch.zeros(2)}))
    assert stored in pairing.copied


def test_multi_token_prediction_layer_of_the_base_is_explained(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 12, "num_nextn_predict_layers": 1}
    base = hand_made(tmp_path / "b", text_tensors(num_layers=13), config=config)
    vlm = vlm_by_hand(tmp_path / "v")
    pairing = pair(base=base, vlm=vlm)
    assert len(pairing.explained) == 11
    assert all(".layers.12." in name for name in pairing.explained)
    (base / "config.json").write_text('{"num_hidden_layers": 13}')
    assert "base has 13 layers, vlm 12" in refusal(base=base, vlm=vlm)


def test_multimodal_base_pairs_by_its_tower(tmp_path: Path) -> None:
    pairing = pair(base=vlm_by_hand(tmp_path / "b"), vlm=vlm_by_hand(tmp_path / "v"))
    assert pairing.explained["base: model.visual.blocks.0.attn.qkv.weight"] == "vision, not text"


# F13: tied heads.


def test_tied_base_stands_in_with_its_embedding(tmp_path: Path) -> None:
    base = hand_made(tmp_path / "b", text_tensors(num_layers=12, head=None), config={"tie_word_embeddings": True})
    head = pair(base=base, vlm=vlm_by_hand(tmp_path / "v")).tensors[-1]
    assert (head.name, head.kind, head.virtual) == ("lm_head.weight", "head", ("base",))
    assert head.stored == {"base": "model.embed_tokens.weight", "vlm": "lm_head.weight"}


def test_stray_head_under_tie_flags_counts_as_untied(tmp_path: Path) -> None:
    tied = {"tie_word_embeddings": True}
    base = hand_made(tmp_path / "b", text_tensors(num_layers=12, head=None), config=tied)
    pairing = pair(base=base, vlm=vlm_by_hand(tmp_path / "v", config=tied))
    assert pairing.tensors[-1].virtual == ("base",)
    assert any(note.startswith("vlm: config says tie_word_embeddings (True,)") for note in pairing.notes)


def test_flags_that_disagree_are_noted(tmp_path: Path) -> None:
    config = {"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}}
    pairing = pair(base=base_by_hand(tmp_path / "b"), vlm=vlm_by_hand(tmp_path / "v", config=config))
    assert any("(True, False), the file has a head, so it is untied" in note for note in pairing.notes)


def test_head_that_the_tied_vlm_lacks_must_equal_the_embedding(tmp_path: Path) -> None:
    vlm = vlm_by_hand(tmp_path / "v", drop="lm_head.weight", config={"tie_word_embeddings": True})
    pairing = pair(base=base_by_hand(tmp_path / "b"), ancestor=base_by_hand(tmp_path / "a"), vlm=vlm)
    assert "lm_head.weight" not in {tensor.name for tensor in pairing.tensors}
    assert set(pairing.explained) == {"base: lm_head.weight", "ancestor: lm_head.weight"}
    assert pairing.must_equal == tuple(
        MustEqual(
            (role, "lm_head.weight"),
            (role, "model.embed_tokens.weight"),
            f"the vlm stores no head, so the head of {role} must equal its embedding",
        )
        for role in ("base", "ancestor")
    )


# F14: vocabularies.


@pytest.mark.parametrize(("rows", "padding"), [(18, 1), (24, 7)])
def test_more_rows_pair_by_token(tmp_path: Path, rows: int, padding: int) -> None:
    names = [f"w{n}" for n in range(16)]
    base = base_by_hand(tmp_path / "b", tokens=names)
    tensors = {name: torch.zeros(rows, 8) for name in ("model.language_model.embed_tokens.weight", "lm_head.weight")}
    pairing = pair(base=base, vlm=vlm_by_hand(tmp_path / "v", tensors=tensors, tokens=[*names, "<image>"]))
    embedding = pairing.tensors[0]
    assert embedding.shape == (rows, 8)
    assert embedding.rows is not None
    assert embedding.rows.rows == {"base": range(16), "vlm": range(16)}
    assert (embedding.rows.num_vlm_only, embedding.rows.num_padding) == (1, padding)


def test_more_rows_without_tokenizer_files_are_refused(tmp_path: Path) -> None:
    tensors = {"lm_head.weight": torch.zeros(18, 8)}
    message = refusal(base=base_by_hand(tmp_path / "b"), vlm=vlm_by_hand(tmp_path / "v", tensors=tensors))
    assert "lm_head.weight: row counts differ (base 16, vlm 18)" in message


# F19: integers and packed numbers.


def test_integer_buffers_are_copied_if_equal(tmp_path: Path) -> None:
    name, buffer = "layers.0.self_attn.counts", torch.arange(8)
    base = base_by_hand(tmp_path / "b", tensors={f"model.{name}": buffer})
    vlm = vlm_by_hand(tmp_path / "v", tensors={f"model.language_model.{name}": buffer})
    pairing = pair(base=base, vlm=vlm)
    assert f"model.language_model.{name}" in pairing.copied
    (condition,) = pairing.must_equal
    assert condition.first == ("base", f"model.{name}")
    assert condition.second == ("vlm", f"model.language_model.{name}")


def test_integer_against_float_is_refused(tmp_path: Path) -> None:
    name = "layers.0.self_attn.counts"
    base = base_by_hand(tmp_path / "b", tensors={f"model.{name}": torch.arange(8)})
    vlm = vlm_by_hand(tmp_path / "v", tensors={f"model.language_model.{name}": torch.zeros(8)})
    assert f"model.{name}: base I64, vlm F32" in refusal(base=base, vlm=vlm)


@pytest.mark.parametrize(("dtype", "code"), [(torch.uint8, "U8"), (torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")])
def test_packed_tensors_are_refused_by_name(tmp_path: Path, dtype: torch.dtype, code: str) -> None:
    name = "model.language_model.layers.0.mlp.up_proj.weight"
    vlm = vlm_by_hand(tmp_path / "v", tensors={name: torch.zeros(12, 8).to(dtype)})
    message = refusal(base=base_by_hand(tmp_path / "b"), vlm=vlm)
    assert f"{name}: vlm {code} (12, 8), expected F32, F16 or BF16" in message


def test_output_dtype_is_the_vlms(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "b", dtype=torch.bfloat16)
    pairing = pair(base=base, vlm=tiny_llava(tmp_path / "v"))
    assert {tensor.dtype for tensor in pairing.tensors} == {"F32"}


# A vlm that does not belong to the base.


def test_other_model_is_refused_with_shapes_layers_and_count(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "base", hidden_size=32, num_hidden_layers=3)
    message = refusal(base=base, vlm=tiny_llava(tmp_path / "vlm"))
    assert f"vlm {tmp_path / 'vlm'} does not fit base {base}. Problems: " in message
    assert "base has 3 layers, vlm 2" in message
    assert "model.embed_tokens.weight: base (32, 32), vlm (32, 16)" in message
    assert "more)" in message
    assert message.endswith("Pick the base this vlm was tuned from.")


def test_problems_of_base_and_ancestor_come_together(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "b", intermediate_size=32)
    ancestor = tiny_llama(tmp_path / "a", num_hidden_layers=1)
    message = refusal(base=base, ancestor=ancestor, vlm=tiny_llava(tmp_path / "v"))
    assert "does not fit base" in message and "does not fit ancestor" in message


def test_checkpoints_without_towers_come_together(tmp_path: Path) -> None:
    odd = {"x.weight": torch.zeros(2)}
    message = refusal(base=hand_made(tmp_path / "b", odd), vlm=hand_made(tmp_path / "v", odd))
    assert f"base {tmp_path / 'b'}: no text tower" in message
    assert f"vlm {tmp_path / 'v'}: no text tower" in message


def test_other_head_counts_of_equal_shape_are_refused(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "b", num_attention_heads=2, num_key_value_heads=1)
    assert "config num_attention_heads: base 2, vlm 4" in refusal(base=base, vlm=tiny_llava(tmp_path / "v"))


def test_experts_that_no_rule_cuts_are_refused_by_name(tmp_path: Path) -> None:
    split = {f"model.layers.0.mlp.experts.{e}.up_proj.weight": torch.zeros(4, 8) for e in range(2)}
    fused = {"model.language_model.layers.0.mlp.experts.gate_up_proj": torch.zeros(2, 8, 8)}
    message = refusal(base=base_by_hand(tmp_path / "b", tensors=split), vlm=vlm_by_hand(tmp_path / "v", tensors=fused))
    assert "Perhaps experts are stored in a form that no family file describes." in message


def test_config_differences_are_noted(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "b")
    vlm = tiny_llava(tmp_path / "v")
    config = json.loads((vlm / "config.json").read_text())
    config["text_config"]["rope_parameters"]["rope_theta"] = 5e6
    (vlm / "config.json").write_text(json.dumps(config))
    assert "config rope_theta: base 10000.0, vlm 5000000.0" in pair(base=base, vlm=vlm).notes


LOADED = "import sys; import {module}; print('torch' in sys.modules)"
ROOMS = [
    "mergelab.towers.pairing",
    "mergelab.checkpoints.headers",
    "mergelab.checkpoints.hub",
    "mergelab.checkpoints.fingerprint",
]


@pytest.mark.parametrize(
    ("module", "loads"), [*((room, False) for room in ROOMS), ("mergelab.checkpoints.reader", True)]
)
def test_names_and_headers_need_no_torch(module: str, loads: bool) -> None:
    """The last case shows that the check can fail."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED.format(module=module)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(loads)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.embed_tokens.weight", (16,)),
        ("model.embed_tokens.weight", ()),
        ("model.embed_tokens.weight", (16, 0)),
        ("lm_head.weight", (128,)),
        ("lm_head.bias", ()),
        ("lm_head.bias", (16, 1)),
    ],
)
def test_table_of_a_wrong_rank_is_refused_by_name(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    base = base_by_hand(tmp_path / "b", tensors={name: torch.zeros(shape)})
    message = refusal(base=base, vlm=vlm_by_hand(tmp_path / "v"))
    assert f"{name}: shape {shape}, expected " in message


def test_fused_tensor_that_is_a_single_number_is_refused_by_name(tmp_path: Path) -> None:
    name = "model.transformer.blocks.0.att_proj.bias"
    vlm = {**molmo(plain(qk_norm=False, qkv_bias=True)), name: torch.zeros(())}
    found = hand_made(tmp_path / "v", vlm, config={"model_type": "molmo"})
    assert "att_proj.bias: a single number" in refusal(base=base_by_hand(tmp_path / "b"), vlm=found)


def test_weight_beside_the_fused_tensor_that_holds_it_is_refused(tmp_path: Path) -> None:
    tensors = plain(qk_norm=False, qkv_bias=True)
    name = "model.transformer.blocks.0.self_attn.q_proj.weight"
    vlm = {**molmo(tensors), name: tensors["model.layers.0.self_attn.q_proj.weight"].clone()}
    found = hand_made(tmp_path / "v", vlm, config={"model_type": "molmo"})
    message = refusal(base=hand_made(tmp_path / "b", tensors), vlm=found)
    assert f"is stored twice: as {name} and as model.transformer.blocks.0.att_proj.weight[q_proj]" in message


def test_name_that_is_stored_corrupted_as_well_is_refused(tmp_path: Path) -> None:
    corrupted = {name.replace("model.", "model.language_model.", 1): tensor.clone() for name, tensor in VISION.items()}
    message = refusal(base=base_by_hand(tmp_path / "b"), vlm=vlm_by_hand(tmp_path / "v", tensors=corrupted))
    assert "Problems: 2." in message and "stored twice, once under a corrupted name" in message
    assert all(name in message for name in (*VISION, *corrupted))
