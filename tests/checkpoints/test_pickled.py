"""Pickled weights: read where they lie, through weights-only loading, never run."""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from mergelab.checkpoints import pickled as pickled_module
from mergelab.checkpoints.headers import open_checkpoint
from mergelab.checkpoints.pickled import PLACE, load_without_data
from mergelab.checkpoints.reader import read_tensor
from mergelab.cli import main
from mergelab.errors import DamagedFileError, MachineError
from tests.builders import hand_made, text_tensors, tiny_llama, tiny_llava


def pickled(folder: Path, *shards: Any, old: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    names = [f"pytorch_model-{number}-of-{len(shards)}.bin" for number in range(1, len(shards) + 1)]
    if len(shards) == 1:
        names = ["pytorch_model.bin"]
    else:
        weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for name, shard in zip(names, shards, strict=True):
        torch.save(shard, folder / name, _use_new_zipfile_serialization=not old)
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(DamagedFileError) as caught:
        open_checkpoint(folder)
    return str(caught.value)


TENSORS = {
    **text_tensors(),
    "half": torch.randn(3, 5).half(),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
    "integers": torch.arange(7),
    "parameter": torch.nn.Parameter(torch.randn(4)),
    "part of a storage": torch.arange(20.0)[5:9],
}


@pytest.mark.parametrize("num_shards", [1, 3])
def test_tensors_are_those_that_were_saved(tmp_path: Path, num_shards: int) -> None:
    names = list(TENSORS)
    shards = [{name: TENSORS[name] for name in names[start::num_shards]} for start in range(num_shards)]
    checkpoint = open_checkpoint(pickled(tmp_path / "p", *shards))
    assert checkpoint.is_pickled
    assert list(checkpoint.tensors) == sorted(TENSORS)
    for name, tensor in TENSORS.items():
        read = read_tensor(checkpoint.tensors[name])
        assert read.dtype == tensor.dtype and torch.equal(read, tensor.detach()), name


def test_second_name_of_a_tied_tensor_is_dropped(tmp_path: Path) -> None:
    weight = torch.randn(4, 2)
    tied = {"embed": weight, "head": weight, "other shape": weight.view(2, 4)}
    assert list(open_checkpoint(pickled(tmp_path / "one", tied)).tensors) == ["embed", "other shape"]
    two = pickled(tmp_path / "two", tied, {"b": torch.ones(2)})
    assert list(open_checkpoint(two).tensors) == ["b", "embed", "other shape"]


def test_safetensors_win(tmp_path: Path) -> None:
    folder = hand_made(tmp_path / "both", text_tensors())
    torch.save({"x": torch.ones(1)}, folder / "pytorch_model.bin")
    checkpoint = open_checkpoint(folder)
    assert not checkpoint.is_pickled and "x" not in checkpoint.tensors


class Runs:
    """A pickle that would make a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_code_in_a_pickle_is_not_run(tmp_path: Path) -> None:
    folder = pickled(tmp_path / "evil", {"a": torch.ones(2), "b": Runs(tmp_path / "ran")})
    assert "pytorch_model.bin: torch's weights-only loading refuses it" in refusal(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([torch.ones(2)], "expected a mapping of names to tensors, found list"),
        ({1: torch.ones(2)}, "expected a mapping of names to tensors"),
        ({"model": {"a": torch.ones(2)}}, "model: expected a tensor, found dict"),
        ({"epoch": 3}, "epoch: expected a tensor, found int"),
        ({"turned": torch.randn(3, 4).t()}, "turned: its entries do not lie in order"),
        ({"sparse": torch.eye(3).to_sparse()}, "sparse: expected a tensor"),
    ],
)
def test_what_is_no_flat_mapping_is_refused(tmp_path: Path, content: Any, words: str) -> None:
    assert words in refusal(pickled(tmp_path / "p", content))


def test_old_compressed_and_truncated_files_are_refused(tmp_path: Path) -> None:
    assert "from before torch 1.6" in refusal(pickled(tmp_path / "old", {"a": torch.ones(2)}, old=True))
    folder = pickled(tmp_path / "p", {"a": torch.zeros(5000)})
    squeezed = tmp_path / "squeezed"
    shutil.copytree(folder, squeezed)
    with (
        zipfile.ZipFile(folder / "pytorch_model.bin") as source,
        zipfile.ZipFile(squeezed / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for entry in source.namelist():
            target.writestr(entry, source.read(entry))
    assert "compressed weights" in refusal(squeezed)
    os.truncate(folder / "pytorch_model.bin", 10000)
    assert "damaged or truncated" in refusal(folder)


def test_this_torch_says_where_data_lies(tmp_path: Path) -> None:
    """A new torch that fails here has renamed what mergelab.checkpoints.pickled reads; the versions named there end."""
    folder = pickled(tmp_path / "p", {"a": torch.arange(3.0)})
    tensor = load_without_data(folder / "pytorch_model.bin")["a"]
    assert hasattr(tensor.untyped_storage(), PLACE), f"torch {torch.__version__} has no {PLACE}"
    assert int(torch.__version__.split(".")[0]) == 2


def test_torch_that_does_not_say_where_data_lies_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pickled(tmp_path / "p", {"a": torch.ones(2)})
    monkeypatch.setattr(pickled_module, "PLACE", "_renamed")
    with pytest.raises(MachineError, match=rf"torch {re.escape(torch.__version__)} does not say.*convert it"):
        open_checkpoint(folder)


def test_place_that_the_archive_does_not_know_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pickled(tmp_path / "p", {"a": torch.ones(2), "b": torch.zeros(2)})
    true = pickled_module.stored_records
    monkeypatch.setattr(pickled_module, "stored_records", lambda path: {s + 8: e for s, e in true(path).items()})
    assert "a: bytes" in refusal(folder) and "not in one record" in refusal(folder)


def test_index_of_pickled_files_is_checked(tmp_path: Path) -> None:
    folder = pickled(tmp_path / "p", {"a": torch.ones(2)}, {"b": torch.ones(2)})
    (folder / "pytorch_model-2-of-2.bin").unlink()
    assert "pytorch_model-2-of-2.bin: missing, the index lists 1 tensors in it" in refusal(folder)
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../pytorch_model-1-of-2.bin"}}))
    assert "expected a .bin file of this folder" in refusal(folder)


def test_pickled_models_are_checked_and_merged_like_any_other(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "base")
    vlm = tiny_llava(tmp_path / "vlm", start=base)
    folders = []
    for folder in (base, vlm):
        copy = Path(shutil.copytree(folder, tmp_path / f"pickled-{folder.name}"))
        torch.save(load_file(copy / "model.safetensors"), copy / "pytorch_model.bin")
        (copy / "model.safetensors").unlink()
        folders.append(copy)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("{name: r, pair: bench, method: linear, parameters: {weights: {base: 0.5, vlm: 0.5}}}")
    written = []
    for number, (first, second) in enumerate(((base, vlm), folders)):
        out = tmp_path / f"out{number}"
        command = ["merge", recipe, "--base", first, "--vlm", second, "--out", out]
        done = CliRunner().invoke(main, [str(part) for part in command])
        assert done.exit_code == 0, done.output
        assert ("vlm: pytorch_model.bin is pickled" in done.stderr) == (number == 1)
        assert not list(out.glob("*.bin"))
        written.append((out / "model.safetensors").read_bytes())
    assert written[0] == written[1]
