"""A vlm whose names nobody knows, as typed: report, rule, flag, and what is written in the end."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from mergelab.cli import main
from mergelab.towers.rules import parse_family
from tests.builders import tiny_llama, tiny_llava

RECIPE = "{name: r, pair: bench, method: linear, parameters: {weights: {base: 0.5, vlm: 0.5}}}"
RENAMES = (
    (r"^language_model\.model\.layers\.", "foo.bar.llm.blocks."),
    (r"^language_model\.model\.embed_tokens", "foo.bar.llm.tok_emb"),
    (r"^language_model\.model\.norm", "foo.bar.llm.ln_f"),
    (r"^language_model\.lm_head", "foo.bar.out_head"),
    (r"^vision_tower\.", "foo.eye."),
    (r"^multi_modal_projector\.", "foo.bridge."),
    (r"\.o_proj\.", ".wo."),
)


def typed(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def foreign(folder: Path, **more: torch.Tensor) -> None:
    """Rename the tensors of a llava in place, and add some."""
    path = folder / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(path).items():
        for pattern, replacement in RENAMES:
            name = re.sub(pattern, replacement, name)
        tensors[name] = tensor
    save_file(tensors | more, path, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, a vlm of unknown names, one with a tensor in its layers that no base has, and a recipe."""
    folder = tmp_path_factory.mktemp("models")
    tiny_llama(folder / "base")
    for name in ("vlm", "odd"):
        tiny_llava(folder / name, start=folder / "base", seed=2)
    foreign(folder / "vlm")
    foreign(folder / "odd", **{"foo.bar.llm.blocks.1.pool.weight": torch.ones(5, 5)})
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


def pair(folder: Path, vlm: str = "vlm") -> tuple[object, ...]:
    return "--base", folder / "base", "--vlm", folder / vlm


def test_check_reports_the_inference_and_prints_its_rule(folder: Path) -> None:
    done = typed("check", *pair(folder))
    assert done.exit_code == 0, done.output
    text = " ".join(done.stdout.split())
    assert "family: inferred, high confidence, from the layers foo.bar.llm.blocks.*" in text
    assert "base: matched 21, tied 0, explained 0, missing 0" in text
    assert re.search(r"vlm: tower 21, extra 0, vision \d+, projector 4, other 0, unknown 0", text)
    assert "operation: self_attn.wo = self_attn.o_proj" in text
    rule = done.stdout.split("---\n")[1]
    assert parse_family(yaml.safe_load(rule), "rule").checked == "inferred"
    assert "vlm: of no known family; its names were mapped by inference, with high confidence" in done.stderr


def test_report_as_json(folder: Path) -> None:
    done = typed("check", *pair(folder), "--json")
    record = json.loads(done.stdout)
    assert record["fits"] is True and record["ancestry"]["verdict"] == "child"
    assert record["inferred"]["verdict"] == "high" and record["inferred"]["reasons"] == []
    assert parse_family(yaml.safe_load(record["inferred"]["rule"]), "rule")


def test_known_family_has_no_report(folder: Path, tmp_path: Path) -> None:
    tiny_llava(tmp_path / "vlm", start=folder / "base")
    done = typed("check", "--base", folder / "base", "--vlm", tmp_path / "vlm", "--json")
    assert json.loads(done.stdout)["inferred"] is None
    again = typed("check", "--base", folder / "base", "--vlm", tmp_path / "vlm", "--save-rule", tmp_path / "rule.yaml")
    assert "nothing was inferred" in again.stderr and not (tmp_path / "rule.yaml").exists()


def test_kept_rule_stands_in_for_the_inference(folder: Path, tmp_path: Path) -> None:
    rule = tmp_path / "rule.yaml"
    assert typed("check", *pair(folder), "--save-rule", rule).exit_code == 0
    refused = typed("check", *pair(folder), "--save-rule", rule)
    assert refused.exit_code == 2 and "the file exists" in refused.stderr
    document = {"name": "mine", "base": str(folder / "base"), "vlm": str(folder / "vlm"), "family": "rule.yaml"}
    (tmp_path / "pair.yaml").write_text(yaml.safe_dump(document))
    plans = [
        json.loads(typed("plan", folder / "recipe.yaml", *chosen, "--json").stdout)
        for chosen in (pair(folder), ("--pair", tmp_path / "pair.yaml"))
    ]
    assert plans[0]["tensors"] == plans[1]["tensors"] and plans[0]["copied"] == plans[1]["copied"]
    checked = json.loads(typed("check", tmp_path / "pair.yaml", "--json").stdout)
    assert checked["inferred"] is None and checked["fits"] is True


def test_family_of_a_pair_is_known_or_valid(folder: Path, tmp_path: Path) -> None:
    document = {"name": "mine", "base": str(folder / "base"), "vlm": str(folder / "vlm"), "family": "molmo22"}
    (tmp_path / "pair.yaml").write_text(yaml.safe_dump(document))
    done = typed("check", tmp_path / "pair.yaml")
    assert done.exit_code == 3 and "family molmo22: no family has this name (did you mean `molmo2`?)" in done.stderr
    (tmp_path / "bad.yaml").write_text("family: x\ndetect: {keys_al: [a]}\nsplit: 3\n")
    (tmp_path / "pair.yaml").write_text(yaml.safe_dump(document | {"family": "bad.yaml"}))
    done = typed("check", tmp_path / "pair.yaml")
    assert done.exit_code == 3 and "detect.keys_al: unknown key" in done.stderr and "split: expected" in done.stderr


def test_low_confidence_ends_with_4_and_names_the_flag(folder: Path, tmp_path: Path) -> None:
    rule = tmp_path / "rule.yaml"
    done = typed("check", *pair(folder, "odd"), "--save-rule", rule)
    assert done.exit_code == 4
    assert "family: inferred, low confidence" in done.stdout and "unknown 1" in done.stdout
    assert "--accept-inferred" in done.stderr and "foo.bar.llm.blocks.1.pool.weight" in done.stderr
    assert done.stdout.split("---\n")[1] == rule.read_text()
    as_json = json.loads(typed("check", *pair(folder, "odd"), "--json").stdout)
    assert as_json["fits"] is False and as_json["inferred"]["unknown"] == ["foo.bar.llm.blocks.1.pool.weight"]
    accepted = typed("check", *pair(folder, "odd"), "--accept-inferred")
    assert accepted.exit_code == 0 and "verdict: child" in accepted.stdout


@pytest.mark.parametrize(
    "command",
    [
        ("merge", "recipe.yaml", "--out", "out"),
        ("run", "recipe.yaml", "--out", "out"),
        ("plan", "recipe.yaml"),
        ("diagnose", "--out", "out"),
        ("export-tower", "odd", "--out", "out"),
    ],
    ids=lambda command: command[0],
)
def test_every_command_asks_before_it_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str]
) -> None:
    monkeypatch.chdir(folder)
    models = ("--base", "base") if command[0] == "export-tower" else ("--base", "base", "--vlm", "odd")
    done = typed(*command, *models)
    assert done.exit_code == 4 and "--accept-inferred" in done.stderr
    assert not (folder / "out").exists()
    assert "--accept-inferred" in typed(command[0], "--help").stdout


def test_doctor_says_that_a_run_needs_the_flag(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    found = {
        one["what"]: one for one in json.loads(typed("doctor", "recipe.yaml", *pair(folder, "odd"), "--json").stdout)
    }
    assert "--accept-inferred" in found["pairing"]["found"]


def test_merge_keeps_the_names_of_the_vlm(folder: Path, tmp_path: Path) -> None:
    done = typed("merge", folder / "recipe.yaml", *pair(folder, "odd"), "--out", tmp_path / "out", "--accept-inferred")
    assert done.exit_code == 0, done.output
    merged, vlm = load_file(tmp_path / "out" / "model.safetensors"), load_file(folder / "odd" / "model.safetensors")
    base = load_file(folder / "base" / "model.safetensors")
    assert merged.keys() == vlm.keys()
    half = (base["model.layers.1.self_attn.o_proj.weight"] + vlm["foo.bar.llm.blocks.1.self_attn.wo.weight"]) / 2
    assert torch.allclose(merged["foo.bar.llm.blocks.1.self_attn.wo.weight"], half)
    assert torch.equal(merged["foo.bar.llm.blocks.1.pool.weight"], torch.ones(5, 5))
    manifest = json.loads((tmp_path / "out" / "mergelab.json").read_text())
    assert manifest["inferred"]["verdict"] == "low" and "rename" in manifest["inferred"]["rule"]


def test_exported_tower_has_the_names_of_base(folder: Path, tmp_path: Path) -> None:
    done = typed("export-tower", folder / "vlm", "--base", folder / "base", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    _, info = LlamaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    vlm = load_file(folder / "vlm" / "model.safetensors")
    tower = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(tower["model.layers.0.self_attn.o_proj.weight"], vlm["foo.bar.llm.blocks.0.self_attn.wo.weight"])


def test_config_that_transformers_does_not_know_is_exported_as_bases_class(folder: Path, tmp_path: Path) -> None:
    """The text config lies under a key of its own and names no class; base's class is the one that fits."""
    shutil.copytree(folder / "vlm", tmp_path / "vlm")
    config = json.loads((tmp_path / "vlm" / "config.json").read_text())
    text = {key: value for key, value in config["text_config"].items() if key != "model_type"}
    (tmp_path / "vlm" / "config.json").write_text(json.dumps({"model_type": "weird", "brain": {"lang": text}}))
    done = typed("export-tower", tmp_path / "vlm", "--base", folder / "base", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    model, info = LlamaForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.num_hidden_layers == 2
    checked = json.loads(
        typed("check", "--base", folder / "base", "--vlm", tmp_path / "vlm", "--json", "--no-digest").stdout
    )
    rule = yaml.safe_load(checked["inferred"]["rule"])
    assert rule["text_config"] == ["brain.lang"] and rule["export"][0]["model_type"] == "llama"
