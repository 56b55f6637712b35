"""Checkpoints on the hub, opened without their weights: small files, and the headers by requests for byte ranges.

So a pair that does not fit is refused before gigabytes are fetched, and a digest that reads sampled rows fetches only
those rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from mergelab.checkpoints.headers import Checkpoint, WeightFiles, open_checkpoint
from mergelab.checkpoints.hub import (
    Snapshot,
    complete_folder,
    fetch_side_files,
    local_folder,
    named,
    naming_hub_errors,
    refuse_offline,
)
from mergelab.checkpoints.safetensors_format import MAX_HEADER_BYTES, TensorHeader, parse_header
from mergelab.errors import MachineError

FIRST_BYTES = 100_000
"""Enough for nearly every header, so that most files need one request."""

TIMEOUT_S = 30.0


def open_source(
    source: str,
    revision: str | None = None,
    relative_to: Path | None = None,
    announce: Callable[[str], None] | None = None,
) -> Checkpoint:
    """Open a folder or hub repository from headers alone; arguments and errors as of ``hub.resolve_source``.

    What is not on this machine is looked at where it is: the result is then ``on_hub``, of its weight files only
    the headers were read, and what is read of its tensors is fetched.

    Raises:
        DamagedFileError: As ``open_checkpoint``.
    """
    folder = local_folder(source, revision, relative_to) or complete_folder(source, revision)
    if folder is not None:
        return open_checkpoint(folder)
    refuse_offline(source, revision)
    snapshot = fetch_side_files(source, revision)
    if announce is not None:
        announce(
            f"{named(source, revision)}: reading headers on the hub, {snapshot.weight_bytes / 1e9:.1f} GB stay there"
        )
    return open_checkpoint(snapshot.folder, WeightFiles(snapshot.has, partial(remote_headers, snapshot), on_hub=True))


def remote_headers(snapshot: Snapshot, path: Path) -> tuple[list[TensorHeader], list[str]]:
    """Read and check the header of one file on the hub, as ``safetensors_format.read_headers`` does."""
    size = snapshot.size(path)
    if path.suffix != ".safetensors":
        return [], ["is pickled, and such weights are not read from the hub; name a repository with safetensors"]
    if size < 8:
        return [], [f"has {size} bytes, a safetensors file starts with an 8-byte header length"]
    fetch = partial(fetch_range, snapshot, path)
    start = fetch(0, min(FIRST_BYTES, size))
    length = int.from_bytes(start[:8], "little")
    if length > MAX_HEADER_BYTES or 8 + length > size:
        return [], [f"states a header of {length} bytes, and the file has {size}: damaged"]
    raw = start[8 : 8 + length]
    if len(raw) < length:
        raw += fetch(len(start), 8 + length)
    headers, problems = parse_header(raw, path, size - 8 - length)
    return [replace(header, fetch=fetch) for header in headers], problems


def fetch_range(snapshot: Snapshot, path: Path, start: int, stop: int) -> bytes:
    """Return bytes ``start`` to ``stop`` of a weight file on the hub.

    Raises:
        MachineError: The hub did not give them.
    """
    from huggingface_hub import get_session, hf_hub_url, hf_raise_for_status

    # Documented, though not marked as exported.
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    if start == stop:
        return b""
    name = snapshot.name(path)
    where = f"{named(snapshot.source, snapshot.commit)}: {name}"
    headers: Mapping[str, str] = {
        **build_hf_headers(),
        "range": f"bytes={start}-{stop - 1}",
        "accept-encoding": "identity",
    }
    url = hf_hub_url(snapshot.source, name, revision=snapshot.commit)
    with (
        naming_hub_errors(where),
        get_session().stream("GET", url, headers=headers, timeout=TIMEOUT_S, follow_redirects=True) as response,
    ):
        # A server that ignores ranges would send the whole file.
        content = response.read() if response.status_code != 200 else b""
        hf_raise_for_status(response)
    if len(content) != stop - start:
        raise MachineError(
            f"{where}: asked the hub for bytes {start} to {stop}, found {len(content)} of them. Try again, or download "
            "the repository and give its folder."
        )
    return content
