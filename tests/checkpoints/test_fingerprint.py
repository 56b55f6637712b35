"""One content hash for files and live tensors, blind to shards and order, and a cache that never lies."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mergelab.checkpoints import fingerprint
from mergelab.checkpoints.fingerprint import combine_hashes, fingerprint_checkpoint, hash_tensor
from mergelab.checkpoints.headers import open_checkpoint
from mergelab.errors import DamagedFileError
from tests.builders import hand_made, text_tensors
from tests.checkpoints.test_reader import EVERY_DTYPE

TENSORS = text_tensors()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "cache"
    monkeypatch.setenv("MERGELAB_CACHE_DIR", str(folder))
    yield folder


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fresh files be cached."""
    monkeypatch.setattr(fingerprint, "SETTLED_S", -3600.0)


def of_folder(folder: Path) -> str:
    return fingerprint_checkpoint(open_checkpoint(folder))


def of_tensors(tensors: dict[str, torch.Tensor]) -> str:
    return combine_hashes(hash_tensor(name, tensor) for name, tensor in tensors.items())


def test_resharding_and_order_do_not_change_it(tmp_path: Path) -> None:
    single = of_folder(hand_made(tmp_path / "one", TENSORS))
    items = list(TENSORS.items())
    sharded = of_folder(hand_made(tmp_path / "three", *(dict(items[start::3]) for start in range(3))))
    assert single == sharded
    assert len(single) == 64


@pytest.mark.parametrize("tensors", [TENSORS, EVERY_DTYPE], ids=["text", "every dtype"])
def test_live_tensors_have_the_hash_of_their_folder(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    assert of_tensors(tensors) == of_folder(hand_made(tmp_path / "m", tensors))


def test_strides_do_not_matter() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    assert hash_tensor("a", tensor.t().contiguous().t()) == hash_tensor("a", tensor)


def changed(what: str) -> dict[str, torch.Tensor]:
    tensors = {name: tensor.clone() for name, tensor in TENSORS.items()}
    norm = tensors.pop("model.norm.weight")
    if what == "value":
        norm[3] = -norm[3]
    elif what == "shape":
        norm = norm.reshape(2, 4)
    elif what == "dtype":
        norm = norm.view(torch.float16)
    tensors["model.other.weight" if what == "name" else "model.norm.weight"] = norm
    return tensors


@pytest.mark.parametrize("what", ["value", "shape", "dtype", "name"])
def test_every_part_counts(what: str) -> None:
    assert of_tensors(changed("nothing")) == of_tensors(TENSORS)
    assert of_tensors(changed(what)) != of_tensors(TENSORS)


def test_negative_zero_counts() -> None:
    assert hash_tensor("a", torch.tensor([0.0])) != hash_tensor("a", torch.tensor([-0.0]))


def test_second_call_reads_the_cache(tmp_path: Path, cache: Path, settled: None) -> None:
    folder = hand_made(tmp_path / "m", TENSORS)
    of_folder(folder)
    (entry,) = (cache / "fingerprints").iterdir()
    content = json.loads(entry.read_text())
    entry.write_text(json.dumps({**content, "fingerprint": "f" * 64}))
    assert of_folder(folder) == "f" * 64


@pytest.mark.parametrize("content", ["", "{", "[]", '{"key": 1, "fingerprint": "x"}'])
def test_damaged_cache_is_not_believed(tmp_path: Path, cache: Path, settled: None, content: str) -> None:
    folder = hand_made(tmp_path / "m", TENSORS)
    before = of_folder(folder)
    (entry,) = (cache / "fingerprints").iterdir()
    entry.write_text(content)
    assert of_folder(folder) == before


def test_rewritten_file_of_same_size_and_time_is_hashed_again(tmp_path: Path, settled: None) -> None:
    folder = hand_made(tmp_path / "m", TENSORS)
    before = of_folder(folder)
    file = folder / "model.safetensors"
    stat = file.stat()
    with file.open("r+b") as handle:
        handle.seek(-1, os.SEEK_END)
        last = handle.read(1)[0]
        handle.seek(-1, os.SEEK_END)
        handle.write(bytes([last ^ 1]))
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert file.stat().st_mtime_ns == stat.st_mtime_ns
    assert of_folder(folder) != before


def test_fresh_files_are_not_cached(tmp_path: Path, cache: Path) -> None:
    of_folder(hand_made(tmp_path / "m", TENSORS))
    assert not cache.exists()


def test_unwritable_cache_only_costs_time(tmp_path: Path, cache: Path, settled: None) -> None:
    folder = hand_made(tmp_path / "m", TENSORS)
    cache.write_text("a file where the cache folder should be")
    assert of_folder(folder) == of_tensors(TENSORS)


def test_file_cut_after_opening_is_named(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(hand_made(tmp_path / "m", TENSORS))
    os.truncate(checkpoint.shards[0], checkpoint.shards[0].stat().st_size - 5)
    with pytest.raises(DamagedFileError, match="ended while"):
        fingerprint_checkpoint(checkpoint)
