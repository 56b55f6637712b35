"""`mergelab run` and `mergelab merge` on families whose tower is taken apart, as typed."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from mergelab.checkpoints.fingerprint import fingerprint_checkpoint
from mergelab.checkpoints.headers import open_checkpoint
from mergelab.cli import main
from mergelab.records import read_run
from tests.families.catalogue import FAMILIES
from tests.families.checkpoints import Build
from tests.families.family import Layout

CHECK = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}


@pytest.mark.parametrize(("name", "layout"), [("qwen3_vl_moe", "transposed"), ("molmo2-olmo3", "hub")])
def test_run_merges_into_live_experts_what_merge_writes(
    built: Build, name: str, layout: Layout, tmp_path: Path
) -> None:
    """Base stores experts one by one, the vlm stacked, the live model stacked another way."""
    known = built(next(family for family in FAMILIES if family.id == name))
    data = tmp_path / "ifeval.jsonl"
    data.write_text("".join(json.dumps({"key": n, "prompt": f"word{n + 5} word9", **CHECK}) + "\n" for n in range(2)))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "name: tiny\npair: bench\nmethod: ties\nparameters: {density: 0.5}\nzero_point: base\n"
        f"evals: {{tasks: [ifeval], data: {{ifeval: {data}}}, max_gen_toks: {{ifeval: 3}}, batch_size: 2}}\n"
    )
    pair = ["--base", str(known.base), "--vlm", str(known.folder(layout)), "--accept-unrelated"]
    done = CliRunner().invoke(
        main, ["run", str(recipe), *pair, "--out", str(tmp_path / "run"), "--device", "cpu", "--no-cache"]
    )
    assert done.exit_code == 0, (done.output, done.exception)
    run = read_run(tmp_path / "run")
    hashes = {(point.role, point.point["method"]): point.point["weights_hash"] for point in run.points}
    parents = {point.role: point.point["weights_hash"] for point in run.points if point.role in ("base", "vlm")}
    copies = {
        point.point["parameters"]["of"]: point.point["weights_hash"]
        for point in run.points
        if point.point["method"] == "copy"
    }
    assert copies["vlm"] == parents["vlm"]  # base's copy has the vlm's rows for the tokens that base lacks
    done = CliRunner().invoke(
        main, ["merge", str(recipe), *pair, "--as", "text", "--out", str(tmp_path / "text"), "--device", "cpu"]
    )
    assert done.exit_code == 0, (done.output, done.exception)
    text = open_checkpoint(tmp_path / "text")
    assert hashes["merge", "ties"] == fingerprint_checkpoint(text)
    assert set(load_file(known.base / "model.safetensors")) == set(text.tensors)
    assert all(torch.isfinite(t).all() for t in load_file(tmp_path / "text" / "model.safetensors").values())
