"""Bytes of files: written and read at a place, copied durably, and the files around a sub-folder."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from mergelab.errors import DamagedFileError

WRITE_BYTES = 1 << 19
"""Bytes of one call. ext4 takes ten times as long for 2 MiB into a file that has its final size (measured)."""


def surroundings(repository: Path, inside: str, left_out: Collection[str]) -> list[Path]:
    """Return the files around a sub-folder, in order.

    Args:
        repository: The folder that is looked through, hidden folders (.git) aside.
        inside: The sub-folder that is left out.
        left_out: Names of files right in ``repository`` that are left out as well.

    Raises:
        DamagedFileError: There is something else than files and folders, for example a link to a folder.
    """
    files = []
    odd = []
    for folder, folders, names in os.walk(repository):
        here = Path(folder)
        folders[:] = [name for name in folders if not name.startswith(".")]
        if here == repository:
            folders[:] = [name for name in folders if name != inside]
            names = [name for name in names if name not in left_out]
        odd += [here / name for name in folders if (here / name).is_symlink()]
        odd += [here / name for name in names if not (here / name).is_file()]
        files += [here / name for name in names]
    if odd:
        raise DamagedFileError(
            f"{repository}: expected files and folders, found {', '.join(map(str, odd[:3]))}: links to folders, or "
            "neither. Replace them by what they stand for."
        )
    return sorted(files)


def copy_synced(path: Path, target: Path) -> None:
    """Copy a file byte for byte, following links."""
    shutil.copyfile(path, target)
    target.chmod(0o644)
    handle = os.open(target, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_at(handle: int, num_bytes: int, position: int) -> bytearray:
    """Read ``num_bytes`` from ``position``."""
    data = bytearray(num_bytes)
    view = memoryview(data)
    while len(view):
        count = os.preadv(handle, [view], position)
        if not count:
            raise OSError(errno.EIO, "the file ended while it was written")
        view, position = view[count:], position + count
    return data


def write_at(handle: int, data: memoryview, position: int, finished: bool = True) -> None:
    """Write all of ``data`` at ``position``; once ``finished``, let the disk begin: the final sync is short then."""
    start = position
    while len(data):
        count = os.pwrite(handle, data[:WRITE_BYTES], position)
        data, position = data[count:], position + count
    if finished and hasattr(os, "posix_fadvise") and position > start:
        # Dirty pages are not dropped by this but sent on their way. A file system that cannot has no need of it.
        with suppress(OSError):
            os.posix_fadvise(handle, start, position - start, os.POSIX_FADV_DONTNEED)
