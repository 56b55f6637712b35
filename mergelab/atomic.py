"""Whole-or-absent files and folders: written beside their final name, synced, renamed.

After a kill at any moment either the old content or the complete new content is there. A folder in the making
carries the suffix ``.partial`` and is never mistaken for a result.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PARTIAL_SUFFIX = ".partial"


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

    ``final`` must not exist or be empty; the caller checks and words the refusal. A scratch folder left by a
    killed run is removed first, so the same command simply succeeds.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    scratch = final.parent / f".{final.name}{PARTIAL_SUFFIX}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    try:
        yield scratch
        for path in scratch.rglob("*"):
            if path.is_dir():
                sync_folder(path)
        sync_folder(scratch)
        if final.exists():
            final.rmdir()
        scratch.replace(final)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    sync_folder(final.parent)
