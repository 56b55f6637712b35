"""Finished results of parents, kept between runs: the same base graded in the same way is graded once.

One JSON file an entry under ``MERGELAB_CACHE_DIR``/results, whole or absent. It carries its key and a digest of its
content; an entry that does not fit either is as good as absent. There is no key without the weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mergelab import __version__, atomic
from mergelab.checkpoints.fingerprint import cache_folder
from mergelab.sweeps.identity import hash_json

FORMAT = 1
"""Raised whenever a result of the same key may come out differently."""

_TOKENIZER_FILES = (
    *("*token*", "vocab*", "merges*", "chat_template*", "*.tiktoken", "tekken.json", "*.model"),
    *("generation_config.json", "*processor_config.json"),
)


@dataclass(frozen=True)
class CacheKey:
    """Everything that decides a result."""

    weights: str
    """Fingerprint of the model's own files."""

    config: str
    """Hash of its config."""

    tokenizer: str
    """Hash of the files that decide how text becomes tokens and where answers stop (``hash_tokenizers``)."""

    stage: Mapping[str, Any]
    """What is measured, and how: what goes into the stage's key in a run folder."""

    machine: str
    """What computes it (``describe_machine``): other devices round differently."""

    def __post_init__(self) -> None:
        empty = [name for name, value in asdict(self).items() if not value]
        if empty:
            raise ValueError(f"a cache key without {', '.join(empty)} would be shared by different results")

    def digest(self) -> str:
        """Return the hash that names the entry."""
        return hash_json({**asdict(self), "format": FORMAT, "mergelab": __version__})


@dataclass(frozen=True)
class Cached:
    """A result out of the cache, and the hash of the live weights that it was measured on."""

    weights_hash: str
    value: dict[str, Any]


class ResultCache:
    """The folder of entries; a disk that cannot be read or written only costs the time."""

    def __init__(self, folder: Path | None = None) -> None:
        """Take the folder, or the one under ``MERGELAB_CACHE_DIR``."""
        self.folder = folder or cache_folder() / "results"

    def read(self, key: CacheKey) -> Cached | None:
        """Return the result of a key; None if there is none, or its file is not what was written."""
        digest = key.digest()
        try:
            entry = json.loads(self._path(digest).read_text(encoding="utf-8"))
            result = Cached(entry["weights_hash"], entry["value"])
            is_whole = entry["key"] == digest and entry["sha256"] == _sha256(digest, result)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return result if is_whole else None

    def write(self, key: CacheKey, result: Cached) -> None:
        """Keep a result."""
        digest = key.digest()
        entry = {"key": digest, "sha256": _sha256(digest, result), "made_for": asdict(key), **asdict(result)}
        with contextlib.suppress(OSError):
            atomic.write_json(self._path(digest), entry)

    def _path(self, digest: str) -> Path:
        return self.folder / digest[:2] / f"{digest}.json"


def hash_tokenizers(folders: Iterable[Path]) -> str:
    """Return a hash of the tokenizer, template, processor and stop-token files of model folders."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted({path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()}):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{path.name} {content}\n".encode())
        digest.update(b"\n")
    return digest.hexdigest()


def describe_machine(device: str) -> str:
    """Return what computes on a device, in words that differ where numbers might."""
    import torch

    if device.startswith("cuda"):
        return f"cuda {torch.cuda.get_device_name(device)}"
    return f"{device} {platform.machine()} {torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()} threads"


def _sha256(key: str, result: Cached) -> str:
    return hash_json([key, result.weights_hash, json.loads(json.dumps(result.value))])
