"""An exported point through `mergekit-yaml` itself: its files hold our weights."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from mergelab.cli import main


def mergelab(*arguments: object) -> None:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, (result.output, result.exception)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "values"), [("task_arithmetic", "{lambda: 0.7}"), ("ties", "{density: 0.5}")])
def test_mergekit_yaml_writes_the_weights_of_the_point(tmp_path: Path, method: str, values: str) -> None:
    tower = ("--set", "parameters={weights: {base: 0, vlm: 1}}", "--as", "text", "--out", tmp_path / "tower")
    mergelab("merge", "linear", *tower)
    folder = "package:bench/data/pair"
    (tmp_path / "texts.yaml").write_text(f"name: texts\nbase: {folder}/base\nancestor: {folder}/ancestor\nvlm: tower\n")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"name: a\npair: ./texts.yaml\nmethod: {method}\nparameters: {values}\noutput_dtype: float32\n")
    mergelab("export-mergekit", recipe, "--out", tmp_path / "theirs.yaml")
    mergelab("merge", recipe, "--as", "text", "--out", tmp_path / "ours")
    command = [sys.executable, "-m", "mergekit.scripts.run_yaml", tmp_path / "theirs.yaml", tmp_path / "theirs"]
    subprocess.run(list(map(str, command)), check=True, capture_output=True)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    different = sum(int((~torch.isclose(ours[name], theirs[name], rtol=1e-5, atol=1e-6)).sum()) for name in ours)
    # Equal magnitudes at the threshold of bfloat16 models are the one difference that the export names.
    assert different <= (0 if method == "task_arithmetic" else 0.002 * sum(t.numel() for t in ours.values()))
