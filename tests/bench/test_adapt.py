"""Adapting a text model: the shared opening, the image token, and a short adaptation of the bench base."""

import json
import shutil
from random import Random

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaForCausalLM, LlavaForConditionalGeneration, PreTrainedTokenizerFast

from mergelab.bench.adapt import Tutor, adapt_vlm, hidden_after_opening, load_vision_tower, reserved_token
from mergelab.bench.build import pair_folder
from mergelab.bench.pictures import Scene
from mergelab.bench.train import collate
from mergelab.errors import DamagedFileError, OutputFolderError, PairingError


def word_tokenizer(**special: object) -> PreTrainedTokenizerFast:
    vocabulary = {"<a>": 0, "<b>": 1, "<c>": 2, "word": 3}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<a>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def test_the_image_token_is_the_last_special_token_that_nothing_uses():
    tokenizer = word_tokenizer(eos_token="<a>", additional_special_tokens=["<b>", "<c>"])
    assert reserved_token(tokenizer) == ("<c>", 2)
    tokenizer.chat_template = "<c>{{ messages[0]['content'] }}"
    assert reserved_token(tokenizer) == ("<b>", 1)
    bench = AutoTokenizer.from_pretrained(pair_folder() / "base")
    assert reserved_token(bench) == ("<image>", 4)


def test_a_base_without_a_token_to_spare_is_refused():
    tokenizer = word_tokenizer(eos_token="<a>")
    with pytest.raises(PairingError, match=r"expected a special token that nothing uses(.|\n)*'<a>'"):
        reserved_token(tokenizer)


@pytest.mark.parametrize("pictures", [0, 2, 3], ids=["text only", "mixed", "pictures only"])
def test_the_shared_opening_changes_nothing(pictures):
    """Values and gradients equal those of the plain pass, on every position that is not padding."""
    tokenizer = AutoTokenizer.from_pretrained(pair_folder() / "vlm")
    vlm = LlavaForConditionalGeneration.from_pretrained(pair_folder() / "vlm", dtype=torch.float32)
    tutor = Tutor(tokenizer, "<image>", Random(0))
    scenes = tutor.scenes(pictures)
    rows = [tutor.picture_row(scene) for scene in scenes] + [tutor.text_row() for _ in range(3 - pictures)]
    ids, labels = collate(rows, pad=0)
    pixels = tutor.pixels(scenes, torch.device("cpu")) if scenes else None

    def loss_and_gradient(hidden):
        vlm.zero_grad()
        kept = labels[:, -hidden.shape[1] :] >= 0
        hidden[kept].square().mean().backward()
        return hidden[kept].detach(), vlm.model.language_model.layers[0].self_attn.k_proj.weight.grad.clone()

    plain = loss_and_gradient(vlm.model(input_ids=ids, pixel_values=pixels, use_cache=False).last_hidden_state)
    shared_hidden = hidden_after_opening(vlm, ids, pixels)
    assert shared_hidden.shape[1] < ids.shape[1]
    shared = loss_and_gradient(shared_hidden)
    torch.testing.assert_close(shared[0], plain[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(shared[1], plain[1], atol=1e-4, rtol=1e-3)


def test_rows_are_the_bases_template_with_the_loss_on_the_answer():
    tokenizer = AutoTokenizer.from_pretrained(pair_folder() / "base")
    row = Tutor(tokenizer, "<image>", Random(0)).picture_row(Scene("circle", "red", (4,)))
    given, answer = tokenizer.decode(row.ids[: row.num_given]), tokenizer.decode(row.ids[row.num_given :])
    assert given.startswith("<s><|user|>" + "<image>" * 9)
    assert given.endswith("?<|bot|>")
    assert answer.endswith(".</s>")


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    out = tmp_path_factory.mktemp("adapt") / "vlm"
    lines: list[str] = []
    report = adapt_vlm(pair_folder() / "base", out, steps=2, progress=lines.append)
    return out, report, lines


def test_an_adapted_vlm_loads_with_the_bases_rows_and_tokenizer(adapted):
    out, report, _ = adapted
    vlm, info = LlavaForConditionalGeneration.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert vlm.dtype == torch.bfloat16
    assert vlm.config.image_token_id == 4
    assert vlm.get_input_embeddings().weight.shape == (640, 128)
    assert (out / "tokenizer.json").read_bytes() == (pair_folder() / "base" / "tokenizer.json").read_bytes()
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o644}
    assert json.loads((out / "ADAPT.json").read_text())["image_token"] == report.image_token == "<image>"


def test_adaptation_freezes_vision_tower_and_embeddings_and_moves_the_rest(adapted):
    out, report, lines = adapted
    vlm = LlavaForConditionalGeneration.from_pretrained(out, dtype=torch.float32)
    shipped = load_vision_tower().state_dict()
    for name, tensor in vlm.model.vision_tower.state_dict().items():
        assert torch.equal(tensor, shipped[name]), name
    base = LlamaForCausalLM.from_pretrained(pair_folder() / "base", dtype=torch.float32)
    assert torch.equal(vlm.get_input_embeddings().weight, base.get_input_embeddings().weight)
    name = "layers.0.mlp.up_proj.weight"
    assert not torch.equal(vlm.model.language_model.state_dict()[name], base.model.state_dict()[name])
    assert report.stages[0].loss < 0.3
    assert any(line.startswith("vlm: step 2 of 2") for line in lines)


def test_a_folder_that_is_no_model_is_refused(tmp_path):
    with pytest.raises(DamagedFileError, match="none"):
        adapt_vlm(tmp_path / "none", tmp_path / "out", progress=lambda line: None)
    broken = tmp_path / "broken"
    shutil.copytree(pair_folder() / "base", broken)
    (broken / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(DamagedFileError, match=r"model\.safetensors"):
        adapt_vlm(broken, tmp_path / "out", progress=lambda line: None)
    mute = tmp_path / "mute"
    shutil.copytree(pair_folder() / "base", mute)
    (mute / "chat_template.jinja").unlink()
    with pytest.raises(DamagedFileError, match="expected a tokenizer with a chat template"):
        adapt_vlm(mute, tmp_path / "out", progress=lambda line: None)
    assert not (tmp_path / "out").exists()


def test_a_used_output_folder_is_refused(tmp_path):
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(OutputFolderError):
        adapt_vlm(pair_folder() / "base", tmp_path, progress=lambda line: None)
