"""Folders that are made whole or not at all, and the locks that keep two processes apart."""

import errno
import fcntl
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from mergelab import atomic
from mergelab.errors import MachineError
from mergelab.sweeps.ledger import owned


@pytest.mark.parametrize("takes", [atomic.new_folder, owned])
def test_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes: Callable[[Path], AbstractContextManager[object]]
) -> None:
    def refuse(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    before = len([*Path("/proc/self/fd").iterdir()])
    monkeypatch.setattr(fcntl, "flock", refuse)
    words = rf"{tmp_path}/out: this file system has no file locks \(No locks available\)\. Give another --out\."
    with pytest.raises(MachineError, match=words), takes(tmp_path / "out"):
        raise AssertionError
    assert len([*Path("/proc/self/fd").iterdir()]) == before


def test_interrupt_just_after_the_rename_stays_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.replace

    def interrupted(self: Path, target: Path) -> None:
        rename(self, target)
        raise KeyboardInterrupt

    out = tmp_path / "out"
    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt), atomic.new_folder(out) as scratch:
        (scratch / "weights").write_text("whole")
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["out", "out/weights"]
