"""`mergelab check`, `mergelab export-tower` and `--accept-unrelated` as typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, LlavaForConditionalGeneration

from mergelab.checkpoints.safetensors_format import read_headers
from mergelab.cli import main
from tests.builders import IMAGE_TOKEN, WORDS, hand_made, text_tensors, tiny_llama, tiny_llava


def typed(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied ancestor, an untied base, a vlm tuned from base, and a stranger."""
    folder = tmp_path_factory.mktemp("models")
    tiny_llama(folder / "ancestor", tie_word_embeddings=True)
    tiny_llama(folder / "base", start=folder / "ancestor", seed=1, noise=0.1)
    tiny_llava(folder / "vlm", start=folder / "base", seed=2)
    tiny_llama(folder / "stranger", seed=7)
    return folder


def test_check_prints_what_fits(folder: Path) -> None:
    done = typed("check", "--base", folder / "base", "--vlm", folder / "vlm", "--ancestor", folder / "ancestor")
    assert done.exit_code == 0, done.output
    assert "language_model.model." in done.stdout
    assert "ancestor: matched 20, virtual 1, explained 0, missing 0" in done.stdout
    assert f"only in vlm: '{IMAGE_TOKEN}' {len(WORDS)}" in done.stdout
    assert "verdict: child: the tower drifted from base" in done.stdout
    assert done.stderr == ""


def test_check_as_json(folder: Path) -> None:
    done = typed("check", "--base", folder / "base", "--vlm", folder / "vlm", "--json")
    assert done.exit_code == 0, done.output
    record = json.loads(done.stdout)
    assert record["fits"] is True
    assert record["ancestry"]["verdict"] == "child"
    assert record["coverage"] == {"base": {"matched": 21, "virtual": 0, "explained": 0, "missing": 0}}
    assert record["models"]["vlm"]["parts"]["tower"] == record["merged"] == 21
    assert record["merged"] + record["copied"] == len(read_headers(folder / "vlm" / "model.safetensors")[0])
    assert record["models"]["vlm"]["dtypes"] == {"F32": 21}


def test_check_of_unrelated_models_ends_with_4(folder: Path) -> None:
    done = typed("check", "--base", folder / "stranger", "--vlm", folder / "vlm")
    assert done.exit_code == 4
    assert "verdict: unrelated" in done.stdout
    again = typed("check", "--base", folder / "stranger", "--vlm", folder / "vlm", "--json")
    assert again.exit_code == 4 and json.loads(again.stdout)["fits"] is False


def test_check_of_other_shapes_ends_with_4(folder: Path, tmp_path: Path) -> None:
    deeper = tiny_llama(tmp_path / "deeper", num_hidden_layers=3)
    done = typed("check", "--base", deeper, "--vlm", folder / "vlm", "--json")
    assert done.exit_code == 4
    record = json.loads(done.stdout)
    assert record["fits"] is False and "base has 3 layers, vlm 2" in record["problem"]


def test_check_names_config_differences(folder: Path, tmp_path: Path) -> None:
    other = tiny_llava(tmp_path / "vlm", start=folder / "base", seed=2, rms_norm_eps=1e-3)
    done = typed("check", "--base", folder / "base", "--vlm", other)
    assert done.exit_code == 0 and "config rms_norm_eps: base 1e-06, vlm 0.001" in done.stdout


def test_merge_of_unrelated_models_needs_the_flag(folder: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("{name: r, pair: bench, method: linear, parameters: {weights: {base: 0.5, vlm: 0.5}}}")
    command = ("merge", recipe, "--base", folder / "stranger", "--vlm", folder / "vlm", "--out", tmp_path / "out")
    refused = typed(*command)
    assert refused.exit_code == 4 and "--accept-unrelated" in refused.stderr
    assert not (tmp_path / "out").exists()
    done = typed(*command, "--accept-unrelated")
    assert done.exit_code == 0, done.output
    manifest = json.loads((tmp_path / "out" / "mergelab.json").read_text())
    assert manifest["ancestry"]["verdict"] == "unrelated"
    assert manifest["ancestry"]["accepted_unrelated"] is True


def test_exported_tower_is_the_vlm_on_text(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "tower"
    done = typed("export-tower", folder / "vlm", "--base", folder / "base", "--out", out)
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{out}\n"
    assert (out / "tokenizer.json").read_bytes() == (folder / "base" / "tokenizer.json").read_bytes()
    stored = load_file(folder / "vlm" / "model.safetensors")
    for name, tensor in load_file(out / "model.safetensors").items():
        assert torch.equal(tensor, stored[f"language_model.{name}"])
    model, info = LlamaForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        whole = LlavaForConditionalGeneration.from_pretrained(folder / "vlm")(tokens).logits
        assert torch.equal(model(tokens).logits, whole)


def test_export_into_a_full_folder_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    done = typed("export-tower", folder / "vlm", "--base", folder / "base", "--out", tmp_path)
    assert done.exit_code == 8 and [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_headers_are_checked_without_torch_and_tensor_data(tmp_path: Path) -> None:
    import subprocess
    import sys

    for seed, role in enumerate(("base", "vlm")):
        hand_made(tmp_path / role, text_tensors(num_layers=90, seed=seed), config={"model_type": "qwen3"})
    code = (
        "import sys\n"
        "from mergelab.config import pair_from_folders\n"
        "from mergelab.sweeps.check import check_record\n"
        "from mergelab.sweeps.models import open_models\n"
        "record = check_record(open_models(pair_from_folders(sys.argv[1] + '/base', sys.argv[1] + '/vlm')))\n"
        "assert record['merged'] == 993, record['merged']\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    tensors = load_file(tmp_path / "vlm" / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in tensors.items() if ".77." not in name}, tmp_path / "vlm/model.safetensors"
    )
    done_wrong = typed("check", "--base", tmp_path / "base", "--vlm", tmp_path / "vlm")
    assert done_wrong.exit_code == 4 and "model.layers.77." in done_wrong.stderr
