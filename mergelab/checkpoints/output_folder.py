"""What is asked of an output folder and its disk before any work is spent. No torch."""

from __future__ import annotations

import shutil
from pathlib import Path

from mergelab.errors import MachineError, OutputFolderError


def check_output_folder(final: Path) -> None:
    """Refuse an output folder that holds something.

    Raises:
        OutputFolderError: ``final`` is a file, a link, or a folder with content.
    """
    if final.is_symlink() or (final.exists() and not final.is_dir()):
        raise OutputFolderError(f"{final}: expected a new or empty folder, found a file or link. Give another --out.")
    if final.is_dir() and (names := sorted(path.name for path in final.iterdir())):
        raise OutputFolderError(
            f"{final}: expected a new or empty folder, found {len(names)} entries ({', '.join(names[:3])}). "
            "Give another --out, or remove them."
        )


def check_free_space(final: Path, num_bytes: int) -> None:
    """Refuse a disk that cannot hold ``num_bytes`` more.

    Raises:
        MachineError: Too little room where ``final`` will lie.
    """
    place = next(folder for folder in (final.absolute(), *final.absolute().parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if free < num_bytes:
        raise MachineError(
            f"{final}: needs {num_bytes / 1e9:.3f} GB of disk space, {free / 1e9:.3f} GB are free there. "
            "Free some, or give another --out."
        )
