"""A merge killed before any of its steps leaves nothing that loads and is wrong, and the same merge then succeeds."""

from __future__ import annotations

import json
import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mergelab.checkpoints.headers import open_checkpoint
from mergelab.checkpoints.writer import CheckpointWriter, TensorPlan
from mergelab.engine.export import Export, export_vlm
from mergelab.engine.inputs import Inputs
from mergelab.engine.plan import operation, plan_jobs
from mergelab.errors import MergelabError, OutputFolderError
from mergelab.towers.pairing import pair_checkpoints
from tests.builders import hand_made, text_tensors

HALF = operation("linear", {"weights": {"base": 0.5, "vlm": 0.5}}, None)
STEPS = ("open", "pwrite", "ftruncate", "fsync", "mkdir", "rmdir", "unlink", "replace", "write")


def make_export(root: Path, apart: bool) -> Export:
    tensors = text_tensors(num_layers=1, seed=1)
    shards = [dict(list(tensors.items())[start::2]) for start in range(2)]
    hand_made(root / "base", text_tensors(num_layers=1))
    hand_made(root / "vlm" / "llm" if apart else root / "vlm", *shards)
    if apart:
        hand_made(root / "vlm" / "vision_tower", {"a": torch.ones(3)})
        (root / "vlm" / "config.json").write_text("{}")
    checkpoints = {role: open_checkpoint(root / role) for role in ("base", "vlm")}
    pairing = pair_checkpoints(checkpoints)
    return Export(plan_jobs(pairing, checkpoints), HALF, Inputs(checkpoints), pairing)


def in_child(work: Callable[[], object], kill_at: int | None) -> int | None:
    """Run ``work`` in a fork that dies before step ``kill_at`` on files; return the steps it made, if it lived."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        made = 0
        write = os.write

        def counted(step: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                nonlocal made
                made += 1
                if made == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return step(*arguments, **options)

            return call

        try:
            for name in STEPS:
                setattr(os, name, counted(getattr(os, name)))
            work()
            write(writing, json.dumps(made).encode())
        except BaseException:
            write(writing, traceback.format_exc().encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return int(said) if said else None


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("apart", [False, True], ids=["plain", "tower-folder"])
def test_kill_at_any_step(tmp_path: Path, apart: bool) -> None:
    export = make_export(tmp_path / "models", apart)
    export_vlm(export, tmp_path / "whole", {})
    expected = content(tmp_path / "whole")
    place = tmp_path / "place"
    out = place / "out"
    steps = in_child(lambda: export_vlm(export, out, {}), None)
    assert steps is not None and content(out) == expected
    finished = 0
    last = list(range(steps - 12, steps + 1))
    for kill_at in (*range(1, steps - 12, 5), *last):
        for name in list(content(out)) if out.exists() else []:
            (out / name).unlink()
        while out.exists() and (folders := [path for path in (out, *out.rglob("*")) if path.is_dir()]):
            folders[-1].rmdir()
        assert in_child(lambda: export_vlm(export, out, {}), kill_at) is None, "the child was not killed"
        if out.exists():  # the last steps come after the folder got its name
            assert {name: data for name, data in content(out).items() if not name.startswith(".")} == expected
            finished += 1
            continue
        with pytest.raises(MergelabError):
            open_checkpoint(out)
        export_vlm(export, out, {})
        assert content(out) == expected, kill_at
        assert [path.name for path in place.iterdir()] == ["out"], kill_at
    assert finished < len(last)


def test_second_writer_of_one_folder_is_refused_with_the_owner(tmp_path: Path) -> None:
    plans = [TensorPlan("a", "F32", (2,))]
    with CheckpointWriter(tmp_path / "out", plans) as first:
        first.write("a", 0, torch.ones(1))
        with pytest.raises(OutputFolderError, match=rf"process {os.getpid()} on .* is writing it"):
            CheckpointWriter(tmp_path / "out", plans).__enter__()
        first.write("a", 1, torch.ones(1))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["model.safetensors"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_folder_that_another_process_finished_meanwhile_stays(tmp_path: Path) -> None:
    late = CheckpointWriter(tmp_path / "out", [TensorPlan("a", "F32", (1,))])
    with CheckpointWriter(tmp_path / "out", [TensorPlan("b", "F32", (1,))]) as first:
        first.write("b", 0, torch.ones(1))
    with pytest.raises(OutputFolderError, match="out"):
        late.__enter__()
    assert list(open_checkpoint_names(tmp_path / "out")) == ["b"]


def open_checkpoint_names(folder: Path) -> list[str]:
    (folder / "config.json").write_text("{}")
    return list(open_checkpoint(folder).tensors)
