"""Threads, blocks and held bytes change neither a byte nor a count; what fails leaves no folder and no thread."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from mergelab.checkpoints import writer as writer_module
from mergelab.checkpoints.reader import read_entries
from mergelab.engine import inputs as inputs_module
from mergelab.engine import merging as merging_module
from mergelab.engine import stream as stream_module
from mergelab.engine.export import Export, export_vlm
from mergelab.engine.inputs import Inputs
from mergelab.engine.loading import WHOLE_TENSOR_WORK
from mergelab.engine.pipeline import Gate
from mergelab.engine.plan import operation
from mergelab.engine.stream import stream
from mergelab.engine.targets import LiveTarget, hash_live
from mergelab.errors import DamagedFileError, MachineError, PairingError
from tests.builders import tiny_llama, tiny_llava
from tests.engine.test_stream import IDS, METHODS, Trio

SPAN = 64


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """bf16 models: rounding, ties at the threshold, and a row map between vlm and base."""
    root, bf16 = tmp_path_factory.mktemp("trio"), torch.bfloat16
    ancestor = tiny_llama(root / "ancestor", seed=0, dtype=bf16)
    base = tiny_llama(root / "base", seed=1, start=ancestor, noise=0.1, dtype=bf16)
    vlm = tiny_llava(root / "vlm", seed=2, start=base, noise=0.05, dtype=bf16)
    return {"ancestor": ancestor, "base": base, "vlm": vlm}


@pytest.fixture(scope="module")
def trio(folders: dict[str, Path]) -> Trio:
    return Trio(folders)


def mergelab_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("mergelab-")]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Any:
    yield
    assert mergelab_threads() == []


def live_merge(trio: Trio, method: str, values: dict[str, object], workers: int) -> tuple[str, dict[str, Any]]:
    live = trio.live()
    what = operation(method, values, "base" if method == "gaussian" else "ancestor", seed=3)
    found = stream(trio.jobs, what, Inputs(trio.checkpoints), LiveTarget(live), workers=workers)
    return hash_live(live), found.record()


@pytest.mark.parametrize(("method", "values"), METHODS, ids=IDS)
def test_threads_blocks_and_limits_change_neither_bytes_nor_record(
    trio: Trio, monkeypatch: pytest.MonkeyPatch, method: str, values: dict[str, object]
) -> None:
    monkeypatch.setattr(stream_module, "SPAN_ENTRIES", SPAN)
    expected = live_merge(trio, method, values, 1)
    for workers, block, limit in ((1, 1, 1), (2, 3 * SPAN, 10**9), (4, 10**6, 1), (4, SPAN, 4000)):
        monkeypatch.setattr(stream_module, "BLOCK_ENTRIES", block)
        monkeypatch.setattr(stream_module, "LIMIT_BYTES", limit)
        assert live_merge(trio, method, values, workers) == expected, (workers, block, limit)


def make_export(trio: Trio, method: str = "ties") -> Export:
    values: dict[str, object] = {"density": 0.3} if method == "ties" else {}
    return Export(trio.jobs, operation(method, values, "ancestor"), Inputs(trio.checkpoints), trio.pairing)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_threads_change_no_byte_of_a_folder(trio: Trio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "SPAN_ENTRIES", SPAN)
    export_vlm(make_export(trio), tmp_path / "one", {})
    monkeypatch.setattr(stream_module, "BLOCK_ENTRIES", SPAN)
    monkeypatch.setattr(stream_module, "count_workers", lambda *of: 4)
    export_vlm(make_export(trio), tmp_path / "four", {})
    assert files_of(tmp_path / "one") == files_of(tmp_path / "four")


@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "tsv"])
def test_bytes_in_flight_are_bounded(trio: Trio, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    gates = []

    class Watched(Gate):
        def __init__(self, limit_bytes: int) -> None:
            super().__init__(limit_bytes)
            gates.append(self)

    limit = 2000
    monkeypatch.setattr(stream_module, "Gate", Watched)
    monkeypatch.setattr(stream_module, "SPAN_ENTRIES", SPAN)
    monkeypatch.setattr(stream_module, "BLOCK_ENTRIES", SPAN)
    monkeypatch.setattr(stream_module, "LIMIT_BYTES", limit)
    live_merge(trio, method, {}, 4)
    whole = max(job.num_entries for job in trio.jobs) * (3 * 2 + 2 + 2 + WHOLE_TENSOR_WORK + 3 * 4)
    assert all(gate.peak_bytes <= (whole if method == "tsv" else limit) for gate in gates)
    assert any(gate.peak_bytes > limit // 2 for gate in gates), "blocks were in flight at the same time"


def failing_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(header: Any, start: int, stop: int) -> torch.Tensor:
        if "layers.1.mlp.up_proj" in header.name:
            raise DamagedFileError(f"{header.path}: ended while {header.name} was read")
        return read_entries(header, start, stop)

    monkeypatch.setattr(inputs_module, "read_entries", read)


def failing_write(monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, left = os.pwrite, [20]

    def full(handle: int, data: memoryview, position: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, os.strerror(28))
        return pwrite(handle, data, position)

    monkeypatch.setattr(writer_module.os, "pwrite", full)


def failing_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = merging_module.merge

    def refuse(zero: Any, models: Any, parameters: Any, block: Any, unscaled: Any) -> torch.Tensor:
        if "layers.1.mlp.up_proj" in block.name:
            raise ValueError("vlm: expected finite float32 numbers, found 3")
        return whole(zero, models, parameters, block, unscaled)

    monkeypatch.setattr(merging_module, "merge", refuse)


@pytest.mark.parametrize("method", ["task_arithmetic", "ties"])
@pytest.mark.parametrize(
    ("fails", "error", "words"),
    [
        (failing_read, DamagedFileError, "ended while .*up_proj"),
        (failing_write, MachineError, "No space left"),
        (failing_compute, PairingError, "tensor model.layers.1.mlp.up_proj.weight: vlm: expected finite"),
    ],
    ids=["read", "write", "compute"],
)
def test_what_fails_in_a_thread_is_one_clean_error_and_no_folder(
    trio: Trio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: Any, error: Any, words: str, method: str
) -> None:
    export = make_export(trio, method)
    monkeypatch.setattr(stream_module, "count_workers", lambda *of: 3)
    fails(monkeypatch)
    with pytest.raises(error, match=words):
        export_vlm(export, tmp_path / "out", {})
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_no_folder_and_no_thread_that_writes(
    trio: Trio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close, left = writer_module.CheckpointWriter.close, list[str]()

    def watched(self: writer_module.CheckpointWriter) -> None:
        left.extend(mergelab_threads())
        close(self)

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writer_module.CheckpointWriter, "close", watched)
    with pytest.raises(KeyboardInterrupt):
        export_vlm(make_export(trio), tmp_path / "out", {}, progress=interrupt)
    assert list(tmp_path.iterdir()) == []
    assert left == [], "a thread could have written into files that were closed"


def test_torch_has_its_threads_back(trio: Trio) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        live_merge(trio, "ties", {}, 3)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "dare_linear"])
def test_a_gpu_gives_the_same_bytes_on_disk_and_live(trio: Trio, tmp_path: Path, method: str) -> None:
    what = operation(method, {}, "ancestor")
    for device in ("cpu", "cuda"):
        export_vlm(
            Export(trio.jobs, what, Inputs(trio.checkpoints, device=device), trio.pairing), tmp_path / device, {}
        )
    name = "model.safetensors"
    assert (tmp_path / "cpu" / name).read_bytes() == (tmp_path / "cuda" / name).read_bytes()
    on_cpu, on_gpu = trio.live(), {key: tensor.cuda() for key, tensor in trio.live().items()}
    stream(trio.jobs, what, Inputs(trio.checkpoints), LiveTarget(on_cpu))
    stream(trio.jobs, what, Inputs(trio.checkpoints, device="cuda"), LiveTarget(on_gpu))
    assert hash_live(on_cpu) == hash_live(on_gpu)


DIES = """
import os, signal, sys
from pathlib import Path
from tests.engine.test_overlap import Trio, make_export
from mergelab.engine.export import export_vlm
root = Path(sys.argv[1])
trio = Trio({role: root / role for role in ("ancestor", "base", "vlm")})
end = os.getpid(), getattr(signal, sys.argv[2])
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may start tests with the signal ignored
export_vlm(make_export(trio), Path(sys.argv[3]), {}, progress=lambda done, total: done > total // 2 and os.kill(*end))
"""


@pytest.mark.parametrize("how", ["SIGKILL", "SIGINT"])
def test_a_merge_killed_in_the_middle_leaves_no_result_and_runs_again(
    trio: Trio, folders: dict[str, Path], tmp_path: Path, how: str
) -> None:
    root = folders["vlm"].parent
    command = [sys.executable, "-c", DIES, str(root), how, str(tmp_path / "out")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and ("KeyboardInterrupt" in done.stderr) == (how == "SIGINT"), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ([".out.partial"] if how == "SIGKILL" else [])
    export_vlm(make_export(trio), tmp_path / "out", {})
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    export_vlm(make_export(trio), tmp_path / "undisturbed", {})
    assert files_of(tmp_path / "out") == files_of(tmp_path / "undisturbed")
