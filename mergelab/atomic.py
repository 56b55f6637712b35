"""Whole-or-absent files and folders: written beside their final name, synced, renamed.

After a kill at any moment either the old content or the complete new content is there. A folder in the making
carries the suffix ``.partial`` and is never mistaken for a result.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mergelab.errors import MachineError, OutputFolderError

PARTIAL_SUFFIX = ".partial"
LOCK = ".mergelab.lock"
"""In a folder in the making: held by the process that makes it, however that ends."""


def sync_folder(folder: Path) -> None:
    """Make renames inside ``folder`` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_bytes(path: Path, content: bytes) -> None:
    """Write ``content`` to ``path`` whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=PARTIAL_SUFFIX, dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_text(path: Path, content: str) -> None:
    """Write UTF-8 text to ``path`` whole or not at all."""
    write_bytes(path, content.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as indented JSON to ``path``; NaN and infinity are refused, they are not JSON."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """Yield a scratch folder that becomes ``final`` on a clean exit and vanishes on an error.

    ``final`` must not exist or be empty; the caller checks and words the refusal. One process at a time makes it. What
    a killed run left in the scratch folder is removed first, so the same command simply succeeds.

    Raises:
        OutputFolderError: Another process is making ``final`` (it is named), or has just made it.
        MachineError: The file system has no locks.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    scratch = scratch_of(final)
    handle = _take(scratch, final)
    try:
        try:
            _empty(scratch)
            yield scratch
            for path in scratch.rglob("*"):
                if path.is_dir():
                    sync_folder(path)
            sync_folder(scratch)
            if final.exists():
                final.rmdir()
            scratch.replace(final)
        except BaseException:
            with suppress(OSError):  # an interrupt may come just after the rename
                _empty(scratch)
            shutil.rmtree(scratch, ignore_errors=True)
            raise
    finally:
        # Not before: without it another process could take the scratch folder just before the rename.
        if _is_open_as(handle, final / LOCK):
            (final / LOCK).unlink()
        os.close(handle)
    sync_folder(final)
    sync_folder(final.parent)


def scratch_of(final: Path) -> Path:
    """Return the folder in which ``final`` is made."""
    return final.parent / f".{final.name}{PARTIAL_SUFFIX}"


def leftover_bytes(final: Path) -> int:
    """Return the room on disk that comes free when what a killed run left of ``final`` is removed."""
    return sum(path.lstat().st_blocks * 512 for path in scratch_of(final).rglob("*"))


def lock(handle: int, place: Path) -> str:
    """Lock an open file for this process and write its name into it; the lock goes with the process.

    Args:
        handle: Of a file opened for reading and writing.
        place: The folder that the lock is about, for messages.

    Returns:
        Empty, or who holds the lock already.

    Raises:
        MachineError: The file system has no locks.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.read(handle, 200).decode(errors="replace").strip() or "another process"
    except OSError as error:
        raise MachineError(
            f"{place}: this file system has no file locks ({error.strerror}). Give another --out."
        ) from error
    os.ftruncate(handle, 0)
    os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    return ""


def _take(scratch: Path, final: Path) -> int:
    """Make the scratch folder, or take one that nobody holds; return the handle that holds it for this process."""
    while True:
        scratch.mkdir(exist_ok=True)
        try:
            handle = os.open(scratch / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # its owner has just renamed or removed it
            continue
        try:
            if owner := lock(handle, final):
                raise OutputFolderError(f"{final}: {owner} is writing it. Wait for it, stop it, or give another --out.")
            if not _is_open_as(handle, scratch / LOCK):
                os.close(handle)
                continue
            if final.is_dir() and any(final.iterdir()):
                _empty(scratch)
                shutil.rmtree(scratch, ignore_errors=True)
                raise OutputFolderError(f"{final}: another process has just written it. Give another --out.")
        except BaseException:
            os.close(handle)
            raise
        return handle


def _is_open_as(handle: int, path: Path) -> bool:
    """Say whether the open file still lies at ``path``."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False


def _empty(scratch: Path) -> None:
    """Remove everything but the lock."""
    for path in scratch.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != LOCK:
            path.unlink(missing_ok=True)
