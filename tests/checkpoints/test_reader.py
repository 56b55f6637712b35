"""Tensors and flat ranges of entries, as safetensors itself reads them."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mergelab.checkpoints.headers import open_checkpoint
from mergelab.checkpoints.reader import read_entries, read_tensor, torch_dtype
from mergelab.errors import DamagedFileError
from tests.builders import hand_made, text_tensors

EVERY_DTYPE = {
    "f64": torch.arange(6, dtype=torch.float64).reshape(2, 3),
    "f32": torch.tensor([[1.5, -0.0], [float("inf"), float("nan")]]),
    "f16": torch.tensor(3.0, dtype=torch.float16),
    "bf16": torch.arange(7).to(torch.bfloat16),
    "i64": torch.tensor([-(2**40), 5]),
    "bool": torch.tensor([True, False, True]),
    "u8": torch.arange(3, dtype=torch.uint8),
    "f8": torch.ones(3).to(torch.float8_e4m3fn),
    "empty": torch.zeros(0, 8, dtype=torch.bfloat16),
}


def test_every_dtype_is_read_bit_for_bit(tmp_path: Path) -> None:
    folder = hand_made(tmp_path / "m", EVERY_DTYPE)
    expected = load_file(folder / "model.safetensors")
    for name, header in open_checkpoint(folder).tensors.items():
        found = read_tensor(header)
        assert (found.dtype, found.shape) == (expected[name].dtype, expected[name].shape)
        flat = [tensor.reshape(-1).view(torch.uint8) for tensor in (found, expected[name])]
        assert torch.equal(*flat), name


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (0, 1), (3, 11), (0, 96), (95, 96), (96, 96)])
def test_ranges_are_slices_of_the_flat_tensor(tmp_path: Path, start: int, stop: int) -> None:
    tensors = text_tensors()
    header = open_checkpoint(hand_made(tmp_path / "m", tensors)).tensors["model.layers.1.mlp.down_proj.weight"]
    found = read_entries(header, start, stop)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, tensors[header.name].reshape(-1)[start:stop])


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (5, 4), (0, 97)])
def test_ranges_outside_the_tensor_are_refused(tmp_path: Path, start: int, stop: int) -> None:
    header = open_checkpoint(hand_made(tmp_path / "m", text_tensors())).tensors["model.layers.1.mlp.down_proj.weight"]
    with pytest.raises(ValueError, match="of 96"):
        read_entries(header, start, stop)


def test_what_is_read_is_ours_to_write(tmp_path: Path) -> None:
    folder = hand_made(tmp_path / "m", text_tensors())
    before = (folder / "model.safetensors").read_bytes()
    read_tensor(open_checkpoint(folder).tensors["model.norm.weight"]).fill_(7)
    assert (folder / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("fate", ["cut", "gone"])
def test_file_that_changed_after_opening_is_named(tmp_path: Path, fate: str) -> None:
    folder = hand_made(tmp_path / "m", text_tensors())
    header = max(open_checkpoint(folder).tensors.values(), key=lambda tensor: tensor.end)
    if fate == "cut":
        os.truncate(header.path, header.end - 1)
    else:
        header.path.unlink()
    with pytest.raises(DamagedFileError, match=header.name):
        read_tensor(header)


def test_dtypes_without_a_torch_twin_are_named() -> None:
    with pytest.raises(DamagedFileError, match="F6_E2M3"):
        torch_dtype("F6_E2M3")
