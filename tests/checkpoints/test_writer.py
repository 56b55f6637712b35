"""The writer: what it writes is read back bit for bit, and nothing half-written ever looks like a result."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mergelab.checkpoints import output_folder, writer
from mergelab.checkpoints.headers import open_checkpoint
from mergelab.checkpoints.reader import DTYPE_CODES, read_tensor
from mergelab.checkpoints.writer import CheckpointWriter, TensorPlan
from mergelab.errors import MachineError, OutputFolderError
from tests.builders import text_tensors, tiny_llama
from tests.checkpoints.test_reader import EVERY_DTYPE


def plans(tensors: dict[str, torch.Tensor]) -> list[TensorPlan]:
    return [TensorPlan(name, DTYPE_CODES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()]


def write_all(final: Path, tensors: dict[str, torch.Tensor], shard_bytes: int = 10**9, block: int = 10**9) -> Path:
    """Write ``tensors`` in blocks of ``block`` entries, in a seeded random order."""
    blocks = [(name, start) for name, tensor in tensors.items() for start in range(0, tensor.numel(), block)]
    random.Random(0).shuffle(blocks)
    with CheckpointWriter(final, plans(tensors), shard_bytes) as target:
        for name, start in blocks:
            target.write(name, start, tensors[name].reshape(-1)[start : start + block])
        target.add_file("config.json", b"{}")
    return final


@pytest.mark.parametrize("shard_bytes", [1, 700, 10**9])
@pytest.mark.parametrize("block", [7, 10**9])
def test_blocks_in_any_order_give_the_tensors(tmp_path: Path, shard_bytes: int, block: int) -> None:
    tensors = text_tensors()
    folder = write_all(tmp_path / "out", tensors, shard_bytes, block)
    checkpoint = open_checkpoint(folder)
    assert list(checkpoint.tensors) == sorted(tensors)
    assert all(torch.equal(read_tensor(header), tensors[name]) for name, header in checkpoint.tensors.items())
    assert (len(checkpoint.shards) > 1) == (shard_bytes < 10**9)
    theirs = {name: tensor for shard in checkpoint.shards for name, tensor in load_file(shard).items()}
    assert all(torch.equal(theirs[name], tensor) for name, tensor in tensors.items())


def test_every_dtype_and_odd_shapes_survive(tmp_path: Path) -> None:
    folder = write_all(tmp_path / "out", EVERY_DTYPE)
    for name, header in open_checkpoint(folder).tensors.items():
        found = read_tensor(header)
        assert found.shape == EVERY_DTYPE[name].shape
        flat = [tensor.reshape(-1).view(torch.uint8) for tensor in (found, EVERY_DTYPE[name])]
        assert torch.equal(*flat)


def test_same_tensors_give_the_same_files(tmp_path: Path) -> None:
    tensors = text_tensors()
    first = write_all(tmp_path / "first", tensors, 700)
    second = write_all(tmp_path / "second", dict(reversed(tensors.items())), 700, block=5)
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)


@pytest.mark.parametrize("shard_bytes", [4000, 10**9], ids=["sharded", "single"])
def test_transformers_loads_what_was_written(tmp_path: Path, shard_bytes: int) -> None:
    source = tiny_llama(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    with CheckpointWriter(tmp_path / "out", plans(tensors), shard_bytes) as target:
        for name, tensor in tensors.items():
            target.write(name, 0, tensor.reshape(-1))
        target.copy_file(source / "config.json")
        target.copy_file(source / "tokenizer.json", "renamed.json")
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in tensors.items())
    assert (tmp_path / "out" / "renamed.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_files_are_readable_by_all_and_names_are_those_of_transformers(tmp_path: Path) -> None:
    folder = write_all(tmp_path / "out", text_tensors(), 1000)
    shards = sorted(folder.glob("*.safetensors"))
    count = len(shards)
    assert [path.name for path in shards] == [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(2 * tensor.numel() for tensor in text_tensors().values())
    assert max(path.stat().st_size for path in shards) < 1000 + 2000


def forget(target: CheckpointWriter) -> None:
    target.write("a", 0, torch.zeros(3))


def double(target: CheckpointWriter) -> None:
    target.write("a", 0, torch.zeros(3))
    target.write("a", 2, torch.zeros(2))


@pytest.mark.parametrize("mistake", [forget, double])
def test_gaps_and_doubled_blocks_refuse_to_commit(tmp_path: Path, mistake: object) -> None:
    with (
        pytest.raises(ValueError, match="a at entry 3 of 4"),
        CheckpointWriter(tmp_path / "out", [TensorPlan("a", "F32", (2, 2))]) as target,
    ):
        mistake(target)  # type: ignore[operator]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("start", "block", "words"),
    [
        (0, torch.zeros(5), "entries 0 to 5 of 4"),
        (-1, torch.zeros(2), "entries -1"),
        (0, torch.zeros(4, dtype=torch.float64), "expected a flat block of torch.float32"),
        (0, torch.zeros(2, 2), "expected a flat block"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(tmp_path: Path, start: int, block: torch.Tensor, words: str) -> None:
    with (
        pytest.raises(ValueError, match=words),
        CheckpointWriter(tmp_path / "out", [TensorPlan("a", "F32", (2, 2))]) as target,
    ):
        target.write("a", start, block)


def test_an_error_inside_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="boom"),
        CheckpointWriter(tmp_path / "out", [TensorPlan("a", "F32", (2, 2))]),
    ):
        assert len(list(tmp_path.iterdir())) == 1
        raise RuntimeError("boom")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../x", "a/b", "", "..", "model.safetensors", "model.safetensors.index.json"])
def test_side_files_cannot_leave_the_folder_or_replace_weights(tmp_path: Path, name: str) -> None:
    with (
        pytest.raises(ValueError, match="cannot be added"),
        CheckpointWriter(tmp_path / "out", [TensorPlan("a", "F32", (0,))]) as target,
    ):
        target.add_file(name, b"x")
    assert list(tmp_path.iterdir()) == []


def test_folder_with_content_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").write_text("mine")
    with pytest.raises(OutputFolderError, match=r"precious\.txt"):
        CheckpointWriter(tmp_path / "out", [])
    assert (tmp_path / "out" / "precious.txt").read_text() == "mine"


@pytest.mark.parametrize("kind", ["file", "link"])
def test_file_or_link_as_output_is_refused(tmp_path: Path, kind: str) -> None:
    final = tmp_path / "out"
    if kind == "file":
        final.write_text("x")
    else:
        (tmp_path / "target").mkdir()
        final.symlink_to(tmp_path / "target")
    with pytest.raises(OutputFolderError, match="found a file or link"):
        CheckpointWriter(final, [])


def test_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert open_checkpoint(write_all(tmp_path / "out", text_tensors())).tensors


def test_disk_space_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=10**6)
    monkeypatch.setattr(output_folder.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(MachineError, match=r"needs 0\.217 GB of disk space, 0\.001 GB are free"):
        CheckpointWriter(tmp_path / "deep" / "out", [TensorPlan("a", "F32", (50_000_000,))])
    assert list(tmp_path.iterdir()) == []


def test_disk_that_fills_up_is_named_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int, data: memoryview, position: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with (
        pytest.raises(MachineError, match="No space left"),
        CheckpointWriter(tmp_path / "out", [TensorPlan("a", "F32", (2,))]) as target,
    ):
        monkeypatch.setattr(writer.os, "pwrite", full)
        target.write("a", 0, torch.zeros(2))
    assert list(tmp_path.iterdir()) == []


DIES = """
import os, signal, sys, torch
from pathlib import Path
from mergelab.checkpoints.writer import CheckpointWriter, TensorPlan
plans = [TensorPlan(name, "F32", (4,)) for name in "ab"]
with CheckpointWriter(Path(sys.argv[1]), plans, 16) as target:
    target.write("a", 0, torch.zeros(4))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_writer_leaves_no_result_and_the_same_command_succeeds(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", DIES, str(tmp_path / "out")], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]
    write_all(tmp_path / "out", text_tensors())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_room_of_what_a_killed_run_left_counts_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = tmp_path / ".out.partial" / "llm"
    left.mkdir(parents=True)
    with (left / "model.safetensors").open("wb") as file:
        file.write(os.urandom(4_000_000))
        os.fsync(file.fileno())
    usage = shutil.disk_usage(tmp_path)._replace(free=writer.SPARE_BYTES + 100_000)
    monkeypatch.setattr(output_folder.shutil, "disk_usage", lambda path: usage)
    tensors = {"a": torch.ones(1_000_000)}
    assert open_checkpoint(write_all(tmp_path / "out", tensors)).tensors
    with pytest.raises(MachineError, match="disk space"):
        write_all(tmp_path / "more", tensors)
