"""Opening a folder: what is accepted, and that every kind of damage is named before any work."""

import json
import os
import shutil
import struct
from pathlib import Path

import pytest
import torch

from mergelab.checkpoints.headers import open_checkpoint
from mergelab.errors import DamagedFileError
from tests.builders import hand_made, text_tensors, tiny_llama

INDEX = "model.safetensors.index.json"


def split_in(count: int) -> list[dict[str, torch.Tensor]]:
    """The hand-made text model over ``count`` shards; layers straddle them."""
    items = list(text_tensors().items())
    return [dict(items[start::count]) for start in range(count)]


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return hand_made(tmp_path / "sharded", *split_in(3))


def refusal(folder: Path) -> str:
    with pytest.raises(DamagedFileError) as caught:
        open_checkpoint(folder)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def edit_index(folder: Path, **changes: object) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"].update(changes)
    (folder / INDEX).write_text(json.dumps(index))


def test_sharded_folder_gives_every_tensor_in_name_order(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    expected = text_tensors()
    assert list(checkpoint.tensors) == sorted(expected)
    assert {name: header.shape for name, header in checkpoint.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in expected.items()
    }
    assert {header.dtype for header in checkpoint.tensors.values()} == {"BF16"}
    assert [shard.name for shard in checkpoint.shards] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert checkpoint.num_bytes == sum(2 * tensor.numel() for tensor in expected.values())
    assert checkpoint.config == {"model_type": "llama"}


def test_folder_that_transformers_wrote_opens(tmp_path: Path) -> None:
    single = open_checkpoint(tiny_llama(tmp_path / "single"))
    many = open_checkpoint(tiny_llama(tmp_path / "many", max_shard_size="5KB"))
    assert len(many.shards) > 1
    assert {n: h.shape for n, h in single.tensors.items()} == {n: h.shape for n, h in many.tensors.items()}


def test_files_that_the_index_does_not_list_are_left_alone(sharded: Path) -> None:
    (sharded / "consolidated.safetensors").write_bytes(b"not even a header")
    assert len(open_checkpoint(sharded).shards) == 3


def test_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-00003-of-00003.safetensors").unlink()
    assert "model-00003-of-00003.safetensors: missing" in refusal(sharded)


def test_shard_cut_by_seven_bytes_is_named_with_the_count(sharded: Path) -> None:
    shard = sharded / "model-00002-of-00003.safetensors"
    os.truncate(shard, shard.stat().st_size - 7)
    assert "model-00002-of-00003.safetensors: is 7 bytes too short" in refusal(sharded)


def test_surplus_bytes_are_refused(sharded: Path) -> None:
    shard = sharded / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes() + b"1234567")
    assert "has 7 bytes that no tensor owns" in refusal(sharded)


def test_index_that_maps_a_tensor_to_the_wrong_shard_is_refused(sharded: Path) -> None:
    name = next(iter(split_in(3)[0]))
    edit_index(sharded, **{name: "model-00002-of-00003.safetensors"})
    message = refusal(sharded)
    assert f"{name}: lies in model-00001-of-00003.safetensors, the index says model-00002" in message
    assert f"{name}: the index says model-00002-of-00003.safetensors, which does not hold it" in message


def test_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    first, second = split_in(2)
    name = next(iter(first))
    folder = hand_made(tmp_path / "doubled", first, {**second, name: first[name]})
    assert f"{name}: lies in model-00001-of-00002.safetensors and in model-00002" in refusal(folder)


def test_tensor_that_the_index_forgot_is_refused(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    del index["weight_map"]["model.norm.weight"]
    (sharded / INDEX).write_text(json.dumps(index))
    assert "the index does not list it" in refusal(sharded)


@pytest.mark.parametrize(
    "target",
    [
        "../other.safetensors",
        "/etc/passwd",
        "sub/model.safetensors",
        "model.bin",
        7,
        None,
        ["a"],
        "",
        "a\\b.safetensors",
    ],
)
def test_index_paths_outside_the_folder_are_refused(sharded: Path, target: object) -> None:
    edit_index(sharded, **{"model.norm.weight": target})
    assert "expected a .safetensors file of this folder" in refusal(sharded)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"weight_map": []}', '{"weight_map": {}}', "{}", "\xff"])
def test_broken_index_is_refused(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_bytes(content.encode("latin-1"))
    assert INDEX in refusal(sharded)


def test_two_checkpoints_in_one_folder_are_refused(sharded: Path) -> None:
    shutil.copy(sharded / "model-00001-of-00003.safetensors", sharded / "model.safetensors")
    assert "holds two checkpoints" in refusal(sharded)


def test_all_problems_come_in_one_message(sharded: Path) -> None:
    (sharded / "model-00003-of-00003.safetensors").unlink()
    os.truncate(sharded / "model-00001-of-00003.safetensors", 20)
    (sharded / "config.json").write_text("{")
    message = refusal(sharded)
    assert "config.json: not valid JSON" in message
    assert "model-00003-of-00003.safetensors: missing" in message
    assert "model-00001-of-00003.safetensors: states a header" in message
    assert message.endswith("or give another folder.")


def test_missing_folder_and_file_instead_of_folder(tmp_path: Path) -> None:
    assert "found nothing" in refusal(tmp_path / "nowhere")
    (tmp_path / "file").write_text("x")
    assert "found a file" in refusal(tmp_path / "file")


def test_missing_config_is_refused(sharded: Path) -> None:
    (sharded / "config.json").unlink()
    assert "config.json: missing" in refusal(sharded)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pytorch_model.bin", "pytorch_model.bin: damaged or truncated, or in the format from before torch 1.6"),
        ("model.pt", "is pickled under a name that is not read"),
        ("model-q4.gguf", "is a GGUF file"),
        ("adapter_model.safetensors", "is not named by either"),
        ("notes.txt", "no weights: neither"),
    ],
)
def test_other_weight_formats_are_named(tmp_path: Path, name: str, words: str) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / name).write_bytes(b"x")
    assert words in refusal(folder)


def test_git_lfs_pointer_is_named(tmp_path: Path) -> None:
    folder = hand_made(tmp_path / "lfs", text_tensors())
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "is a Git LFS pointer" in refusal(folder)


@pytest.mark.parametrize("nested", [False, True], ids=["top", "nested"])
def test_quantised_checkpoint_is_refused_with_config_and_tensors(tmp_path: Path, nested: bool) -> None:
    settings = {"quantization_config": {"quant_method": "bitsandbytes"}}
    packed = {"model.layers.0.mlp.up_proj.weight": torch.zeros(32, 1, dtype=torch.uint8)}
    folder = hand_made(tmp_path / "q", packed, config={"text_config": settings} if nested else settings)
    message = refusal(folder)
    assert "quantization_config 'bitsandbytes'" in message
    assert "model.layers.0.mlp.up_proj.weight: packed as U8 (32, 1)" in message


def header_file(path: Path, header: bytes, data: bytes = b"") -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


ENTRY = '{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"", "header is not valid"),
        (b"[]", "expected a JSON object"),
        (b"\xff\xfe", "header is not valid"),
        (b"[" * 100_000, "header is not valid"),
        (b'{"a":' + ENTRY.encode() + b',"a":' + ENTRY.encode() + b"}", "'a' stands twice"),
        (b'{"\\ud800":' + ENTRY.encode() + b"}", "not valid Unicode"),
        (b'{"a":7}', "expected exactly the keys"),
        (b'{"a":{"dtype":"F32","shape":[2]}}', "expected exactly the keys"),
        (b'{"a":{"dtype":"F33","shape":[2],"data_offsets":[0,8]}}', "unknown dtype 'F33'"),
        (b'{"a":{"dtype":["F32"],"shape":[2],"data_offsets":[0,8]}}', "unknown dtype"),
        (b'{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}', "not a list of sizes"),
        (b'{"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}', "not a list of sizes"),
        (b'{"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}}', "not a list of sizes"),
        (b'{"a":{"dtype":"F32","shape":[99999999999999999999],"data_offsets":[0,8]}}', "not a list of sizes"),
        (
            b'{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,8]}}',
            "needs 73786976294838206464",
        ),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}', "are not a range"),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[-8,0]}}', "are not a range"),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0]}}', "are not two integers"),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,"8"]}}', "are not two integers"),
        (b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}', "needs 12 bytes, data_offsets give 8"),
        (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', "leaves a hole"),
        (
            b'{"a":' + ENTRY.encode() + b',"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
            "overlaps the tensor before it",
        ),
        (
            b'{"__metadata__":{"format":1},"a":' + ENTRY.encode() + b"}",
            "__metadata__ must map strings to strings",
        ),
        (b'{"__metadata__":{}}', "has 8 bytes that no tensor owns"),
    ],
)
def test_absurd_headers_are_refused(tmp_path: Path, header: bytes, words: str) -> None:
    folder = hand_made(tmp_path / "absurd", text_tensors())
    header_file(folder / "model.safetensors", header, b"\0" * 8)
    assert words in refusal(folder)


@pytest.mark.parametrize("length", [100_000_001, 2**63, 2**64 - 1, 1000])
def test_absurd_header_lengths_are_refused(tmp_path: Path, length: int) -> None:
    folder = hand_made(tmp_path / "absurd", text_tensors())
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", length) + b"{}")
    assert "states a header of" in refusal(folder)


@pytest.mark.parametrize("content", [b"", b"1234567"])
def test_files_shorter_than_a_header_are_refused(tmp_path: Path, content: bytes) -> None:
    folder = hand_made(tmp_path / "short", text_tensors())
    (folder / "model.safetensors").write_bytes(content)
    assert f"has {len(content)} bytes" in refusal(folder)


def test_empty_and_scalar_tensors_open(tmp_path: Path) -> None:
    folder = hand_made(tmp_path / "odd", {"a": torch.zeros(0, 8), "b": torch.tensor(3.0), "c": torch.zeros(3)})
    shapes = {name: header.shape for name, header in open_checkpoint(folder).tensors.items()}
    assert shapes == {"a": (0, 8), "b": (), "c": (3,)}
