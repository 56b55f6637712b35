"""A pair on disk, diagnosed as a user does it: numbers, files, refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from mergelab.cli import main
from tests.builders import tiny_llama, tiny_llava


def mergelab(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pair")
    ancestor = tiny_llama(root / "ancestor", seed=0)
    base = tiny_llama(root / "base", seed=1, start=ancestor, noise=1.0)
    vlm = tiny_llava(root / "vlm", seed=2, start=base, noise=1.0)
    prompts = root / "prompts.jsonl"
    texts = ["what is the colour of a cat ?", "one two three : answer .", "red blue green a dog"]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return {"ancestor": ancestor, "base": base, "vlm": vlm, "prompts": prompts}


def arguments(pair: dict[str, Path], *more: object, **changed: Path) -> list[object]:
    found = {**pair, **changed}
    named = [part for name, path in found.items() for part in (f"--{name}", path)]
    return ["diagnose", *named, "--device", "cpu", *more]


@pytest.fixture(scope="module")
def record(pair: dict[str, Path]) -> dict[str, Any]:
    result = mergelab(*arguments(pair, "--json"))
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_sinks_are_those_of_the_sink_command(pair: dict[str, Path], record: dict[str, Any]) -> None:
    result = mergelab("sink", pair["base"], pair["ancestor"], "--prompts", pair["prompts"], "--device", "cpu", "--json")
    measured = {Path(found["model"]).name: found for found in json.loads(result.stdout)}
    assert set(record["models"]) == {"base", "tower", "ancestor"}
    for role in ("base", "ancestor"):
        assert record["models"][role]["sink_strength"] == measured[role]["sink_strength"]
        assert record["models"][role]["position0_share"] == measured[role]["position0_share"]
    assert record["token_counts"] == measured["base"]["token_counts"]
    assert record["models"]["tower"]["sink_strength"] != record["models"]["base"]["sink_strength"]


def test_displacement_and_lemma(record: dict[str, Any]) -> None:
    found = record["displacement"]
    assert found["b_gap"] > 0
    rows = [sum(count - 1 for count in record["token_counts"]) * 4 * layers for layers in (1, 2)]
    assert (found["num_rows"], found["lemma1"]["num_rows"]) == tuple(rows)
    assert found["lemma1"]["num_violations"] == 0
    assert list(found["per_layer"]) == ["0", "1"]
    assert {model["qk_norm"] for model in record["models"].values()} == {"none"}


def test_drift_equals_that_of_whole_tensors(pair: dict[str, Path], record: dict[str, Any]) -> None:
    base, vlm = (load_file(pair[role] / "model.safetensors") for role in ("base", "vlm"))
    names = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)]
    changes = [vlm[f"language_model.{name}"] - base[name] for name in names]
    moved = math.sqrt(sum(float(change.norm()) ** 2 for change in changes))
    before = math.sqrt(sum(float(base[name].norm()) ** 2 for name in names))
    found = record["drift"]["tower"]["q"]
    assert found["relative_frobenius"] == pytest.approx(moved / before, rel=1e-5)
    largest = [float(torch.linalg.svdvals(change)[0]) for change in changes]
    assert found["delta_operator_norm"] == pytest.approx(sum(largest) / 2, rel=1e-3)
    assert set(record["drift"]) == {"tower", "base"}
    kinds = {"q", "k", "v", "o", "gate", "up", "down", "norm", "embedding", "head"}
    assert set(record["drift"]["base"]) == kinds
    # Only rows of shared tokens count; the vlm's image token has no partner.
    tokens = slice(0, 22)
    change = vlm["language_model.model.embed_tokens.weight"][tokens] - base["model.embed_tokens.weight"][tokens]
    expected = float(change.norm() / base["model.embed_tokens.weight"][tokens].norm())
    assert record["drift"]["tower"]["embedding"]["relative_frobenius"] == pytest.approx(expected, rel=1e-5)


def test_a_copy_of_the_base_moved_nothing(pair: dict[str, Path], tmp_path: Path) -> None:
    copy = tiny_llava(tmp_path / "copy", seed=3, start=pair["base"], noise=0.0)
    result = mergelab(*arguments(pair, "--json", vlm=copy))
    found = json.loads(result.stdout)
    assert found["displacement"]["b_gap"] == 0
    assert found["models"]["tower"]["per_layer"] == found["models"]["base"]["per_layer"]
    drift = found["drift"]["tower"]
    assert all(drift[kind]["relative_frobenius"] == 0 for kind in ("q", "up", "norm", "embedding"))
    assert drift["q"]["stable_rank"] is None


def test_out_holds_record_and_figures(pair: dict[str, Path], tmp_path: Path) -> None:
    outs = [tmp_path / "first", tmp_path / "second"]
    for out in outs:
        result = mergelab(*arguments(pair, "--out", out))
        assert result.exit_code == 0, result.output
        assert "Lemma 1 checked on" in result.stdout
        assert sorted(path.name for path in out.iterdir()) == ["depth.svg", "diagnose.json", "heatmap.svg"]
    written = json.loads((outs[0] / "diagnose.json").read_text())
    assert written["displacement"]["lemma1"]["num_violations"] == 0
    for name, words in (("depth.svg", ["ancestor", "B_gap", "margin G - B"]), ("heatmap.svg", ["base", "tower"])):
        svg = (outs[0] / name).read_bytes()
        assert svg == (outs[1] / name).read_bytes()
        ElementTree.fromstring(svg)
        assert all(word in svg.decode() for word in words)


def test_folder_that_holds_something_is_refused_before_work(pair: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    result = mergelab(*arguments(pair, "--out", tmp_path))
    assert (result.exit_code, result.stdout) == (8, "")
    assert "thesis.tex" in result.stderr
    assert "Reading" not in result.stderr


def test_a_vlm_that_does_not_come_from_the_base_is_refused(pair: dict[str, Path], tmp_path: Path) -> None:
    stranger = tiny_llava(tmp_path / "stranger", seed=9)
    result = mergelab(*arguments(pair, "--out", tmp_path / "out", vlm=stranger))
    assert (result.exit_code, result.stdout) == (4, "")
    assert "nothing in common" in result.stderr
    assert not (tmp_path / "out").exists()


def test_weights_that_are_not_finite_leave_nothing_behind(pair: dict[str, Path], tmp_path: Path) -> None:
    broken = tiny_llava(tmp_path / "broken", seed=2, start=pair["base"])
    tensors = load_file(broken / "model.safetensors")
    tensors["language_model.model.layers.1.self_attn.q_proj.weight"][0, 0] = math.nan
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    result = mergelab(*arguments(pair, "--out", tmp_path / "out", vlm=broken))
    assert result.exit_code == 5, result.output
    assert "NaN" in result.stderr or "nan" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "given", [[], ["bench", "--base", "a", "--vlm", "b"], ["--base", "a"], ["bench", "--ancestor", "a"]]
)
def test_a_pair_is_given_in_one_way(given: list[str]) -> None:
    assert mergelab("diagnose", *given).exit_code == 2


def test_unknown_pair_is_named() -> None:
    result = mergelab("diagnose", "bnech")
    assert (result.exit_code, result.stdout) == (3, "")
    assert "bench" in result.stderr
