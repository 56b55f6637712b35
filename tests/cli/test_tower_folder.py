"""VILA's layout: the text tower is a checkpoint of its own, in a folder beside the rest of the vlm."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from mergelab.checkpoints.headers import open_checkpoint
from mergelab.cli import main
from mergelab.errors import DamagedFileError
from tests.builders import hand_made, tiny_llama

HALF = "{name: r, pair: bench, method: linear, parameters: {weights: {base: 0.5, vlm: 0.5}}}"


def vila(folder: Path, start: Path, **llm: object) -> Path:
    """Write a repository as VILA's save_pretrained does: config.json, llm/, vision_tower/, mm_projector/."""
    folder.mkdir()
    tiny_llama(folder / "llm", start=start, seed=2, **llm)  # type: ignore[arg-type]
    settings = {"model_type": "llava_llama", "architectures": ["LlavaLlamaModel"], "llm_cfg": {"model_type": "llama"}}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "trainer_state.json").write_text("{}")
    hand_made(folder / "vision_tower", {"vision_model.weight": torch.randn(3, 3)}, config={"model_type": "siglip"})
    hand_made(folder / "mm_projector", {"layers.1.weight": torch.randn(3, 3)}, config={"model_type": "v2l_projector"})
    (folder / "mm_projector" / "code").mkdir()
    (folder / "mm_projector" / "code" / "base_projector.py").write_text("print('never run')\n")
    return folder


def typed(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path, Path]:
    base = tiny_llama(tmp_path / "base")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(HALF)
    return base, vila(tmp_path / "vila", base, max_shard_size="5KB"), recipe


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_tower_is_read_from_its_folder(pair: tuple[Path, Path, Path]) -> None:
    checkpoint = open_checkpoint(pair[1])
    assert checkpoint.repository == pair[1] and checkpoint.folder == pair[1] / "llm"
    assert checkpoint.tensors.keys() == weights(pair[1] / "llm").keys()
    assert checkpoint.config["model_type"] == "llama"


def test_weights_beside_the_folder_win(pair: tuple[Path, Path, Path]) -> None:
    save_file({"model.norm.weight": torch.ones(4)}, pair[1] / "model.safetensors")
    assert open_checkpoint(pair[1]).repository is None


def test_check_names_the_folder(pair: tuple[Path, Path, Path]) -> None:
    done = typed("check", "--base", pair[0], "--vlm", pair[1])
    assert done.exit_code == 0, done.output
    assert "llm/ model." in done.stdout and "verdict: child" in done.stdout
    assert "its tower is a checkpoint of its own" in done.stdout
    record = json.loads(typed("check", "--base", pair[0], "--vlm", pair[1], "--json").stdout)
    assert record["models"]["vlm"]["folder"] == str(pair[1] / "llm")
    assert record["merged"] == len(weights(pair[0]))


def test_merge_as_vlm_is_the_whole_repository_with_another_tower(pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, vlm, recipe = pair
    out = tmp_path / "merged"
    done = typed("merge", recipe, "--base", base, "--vlm", vlm, "--out", out, "--as", "vlm")
    assert done.exit_code == 0, done.output
    before, after = content(vlm), content(out)
    assert after.keys() - before.keys() == {"llm/mergelab.json"} and before.keys() <= after.keys()
    changed = {name for name in before if before[name] != after[name]}
    assert changed and all(name.startswith("llm/model") for name in changed - {"llm/config.json"})
    assert json.loads(after["llm/config.json"]) == json.loads(before["llm/config.json"])
    mine, theirs, merged = weights(base), weights(vlm / "llm"), weights(out / "llm")
    assert merged.keys() == theirs.keys()
    for name, tensor in merged.items():
        expected = 0.5 * mine[name] + 0.5 * theirs[name]
        rows = slice(None) if expected.shape[0] != 32 else slice(0, 22)  # rows that no token uses are the vlm's
        assert torch.equal(tensor[rows], expected[rows]), name
    assert open_checkpoint(out).repository == out
    _, info = LlamaForCausalLM.from_pretrained(out / "llm", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "merged", "recipe.yaml", "vila"]


def test_text_outputs_are_plain_checkpoints(pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, vlm, recipe = pair
    done = typed("merge", recipe, "--base", base, "--vlm", vlm, "--out", tmp_path / "text", "--as", "text")
    assert done.exit_code == 0, done.output
    done = typed("export-tower", vlm, "--base", base, "--out", tmp_path / "tower")
    assert done.exit_code == 0, done.output
    theirs, tower = weights(vlm / "llm"), weights(tmp_path / "tower")
    assert theirs.keys() == tower.keys() and all(torch.equal(tower[name], theirs[name]) for name in theirs)
    for out in ("text", "tower"):
        _, info = LlamaForCausalLM.from_pretrained(tmp_path / out, output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert not (tmp_path / out / "vision_tower").exists()


def test_damage_inside_the_folder_is_named(pair: tuple[Path, Path, Path]) -> None:
    shard = next((pair[1] / "llm").glob("*.safetensors"))
    os.truncate(shard, shard.stat().st_size - 7)
    with pytest.raises(DamagedFileError, match=rf"{pair[1]}/llm.*\n.*{shard.name}: is 7 bytes too short"):
        open_checkpoint(pair[1])


def test_link_to_a_folder_is_not_followed_out_of_the_repository(pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
    (pair[1] / "elsewhere").symlink_to(tmp_path)
    done = typed("merge", pair[2], "--base", pair[0], "--vlm", pair[1], "--out", tmp_path / "merged")
    assert done.exit_code == 5 and "elsewhere" in done.stderr
    assert not (tmp_path / "merged").exists()


def test_forced_dtype_is_in_the_config_of_the_repository_too(pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, vlm, recipe = pair
    settings = json.loads((vlm / "config.json").read_text()) | {"model_dtype": "torch.float32"}
    settings["llm_cfg"]["torch_dtype"] = "float32"
    (vlm / "config.json").write_text(json.dumps(settings))
    recipe.write_text(HALF.replace("}}}", "}}, output_dtype: bfloat16}"))
    done = typed("merge", recipe, "--base", base, "--vlm", vlm, "--out", tmp_path / "merged", "--as", "vlm")
    assert done.exit_code == 0, done.output
    written = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert written == settings | {
        "model_dtype": "torch.bfloat16",
        "llm_cfg": settings["llm_cfg"] | {"torch_dtype": "bfloat16"},
    }
    assert json.loads((tmp_path / "merged" / "llm" / "config.json").read_text())["dtype"] == "bfloat16"
