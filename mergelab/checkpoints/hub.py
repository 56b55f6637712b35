"""From what a pair file names to a folder on disk: a folder as it stands, or a snapshot of a hub repository.

The local cache is asked first. The network is used only when files are missing and ``HF_HUB_OFFLINE`` is
not set, and then only for what a merge needs: configs, tokenizer files, and the safetensors files that the
repository's own index lists. Pickled weights are never fetched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mergelab.checkpoints.headers import INDEX_NAME, SINGLE_NAME, TOWER_FOLDER, declared_files, keeps_tower_apart
from mergelab.checkpoints.output_folder import check_free_space
from mergelab.errors import DamagedFileError, MachineError, RecipeError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")

SIDE_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py"]
"""Everything of a repository that a merged folder may need beside the weights."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


def resolve_source(
    source: str,
    revision: str | None = None,
    relative_to: Path | None = None,
    announce: Callable[[str], None] | None = None,
) -> Path:
    """Return the folder that holds ``source``.

    Args:
        source: A folder (``~`` allowed; relative ones are looked up from ``relative_to``), or a hub id
            ``owner/name``. An existing folder wins over a hub id of the same spelling.
        revision: Branch, tag or commit of a hub id.
        relative_to: Folder of the file that names the source; None is the working directory.
        announce: Told what will be downloaded, with its size, before a byte is fetched.

    Raises:
        DamagedFileError: The source looks like a path and there is no such folder.
        RecipeError: A revision is given for a folder.
        MachineError: The snapshot is not complete on this machine and cannot be fetched: offline, no such
            repository or revision, no permission, no disk space, no safetensors weights in it.
    """
    folder = local_folder(source, revision, relative_to) or complete_folder(source, revision)
    if folder is not None:
        return folder
    refuse_offline(source, revision)
    return download(source, revision, announce or (lambda message: None))


def local_folder(source: str, revision: str | None, relative_to: Path | None) -> Path | None:
    """Return the folder that ``source`` names, None for a hub id; errors as of ``resolve_source``."""
    path = (relative_to or Path()) / Path(source).expanduser()
    if path.is_dir():
        if revision is not None:
            raise RecipeError(f"{source}: is a folder, so the revision {revision!r} means nothing. Remove it.")
        return path
    if path.exists():
        raise DamagedFileError(f"{path}: expected a checkpoint folder, found a file. Give the folder it lies in.")
    if not HUB_ID.fullmatch(source) or ".." in source:
        raise DamagedFileError(
            f"{source}: no such folder ({path.absolute()}), and not a hub id (owner/name). Correct it."
        )
    return None


def complete_folder(source: str, revision: str | None) -> Path | None:
    """Return the cached snapshot of a repository if it is complete; offline one without tokenizer will do."""
    from huggingface_hub import is_offline_mode

    cached = cached_snapshot(source, revision)
    if cached is None or missing_files(cached):
        return None
    places = (cached, cached / TOWER_FOLDER)
    has_tokenizer = any((place / name).exists() for place in places for name in TOKENIZER_FILES)
    return cached if has_tokenizer or is_offline_mode() else None


def refuse_offline(source: str, revision: str | None) -> None:
    """Raise MachineError if the network must not be used."""
    from huggingface_hub import is_offline_mode

    if is_offline_mode():
        cached = cached_snapshot(source, revision)
        missing = missing_files(cached) if cached else ["everything"]
        raise MachineError(
            f"{named(source, revision)}: not on this machine (missing: {', '.join(missing[:4])}), and "
            "HF_HUB_OFFLINE is set. Unset it to download, copy the snapshot into the hub cache, or give a folder."
        )


@dataclass(frozen=True)
class Snapshot:
    """One commit of a repository: its small files are here, and what its weight files are called and how long."""

    source: str
    commit: str
    folder: Path
    sizes: Mapping[str, int]
    """File name inside the repository -> bytes."""

    @property
    def weight_bytes(self) -> int:
        """Size of the weight files that a merge needs."""
        return sum(self.sizes.get(name, 0) for name in self.weights())

    def name(self, path: Path) -> str:
        """Return what a path inside ``folder`` is called in the repository."""
        return path.relative_to(self.folder).as_posix()

    def has(self, path: Path) -> bool:
        """Say whether the repository has this file."""
        return self.name(path) in self.sizes

    def size(self, path: Path) -> int:
        """Return the bytes of a file of the repository."""
        return self.sizes[self.name(path)]

    def weights(self) -> list[str]:
        """Return the weight files that the repository declares; around a tower of its own, those of all folders."""
        if not keeps_tower_apart(self.folder, self.has):
            return list(declared_files(self.folder, [], self.has))
        tower = declared_files(self.folder / TOWER_FOLDER, [], self.has)
        around = [name for name in self.sizes if "/" in name and name.endswith(".safetensors")]
        names = [f"{TOWER_FOLDER}/{name}" for name in tower]
        return [*names, *(name for name in around if not name.startswith(f"{TOWER_FOLDER}/"))]


def named(source: str, revision: str | None) -> str:
    """Return how a repository is called in messages."""
    return f"{source} at {revision}" if revision else source


def cached_snapshot(source: str, revision: str | None) -> Path | None:
    """Return the snapshot folder in the local hub cache, complete or not; None if there is none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, IncompleteSnapshotError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, revision=revision, local_files_only=True, allow_patterns=SIDE_FILES))
    except IncompleteSnapshotError as error:
        return Path(error.snapshot_path)
    except LocalEntryNotFoundError:
        return None
    except HFValidationError as error:
        raise DamagedFileError(f"{source}: no such folder, and not a valid hub id: {error}") from error


def missing_files(folder: Path) -> list[str]:
    """Return which config or weight files a snapshot folder lacks."""
    problems: list[str] = []
    inside = f"{TOWER_FOLDER}/" if keeps_tower_apart(folder) else ""
    names = ["config.json", *(inside + name for name in declared_files(folder / inside, problems))]
    if problems:
        names.append(inside + SINGLE_NAME)
    return [name for name in names if not (folder / name).is_file()]


def fetch_side_files(source: str, revision: str | None) -> Snapshot:
    """Fetch what a repository has beside its weights.

    Raises:
        MachineError: The hub does not give it, or it has no safetensors weights.
    """
    from huggingface_hub import HfApi, snapshot_download

    where = named(source, revision)
    with naming_hub_errors(where):
        # By the name that was given, so that the cache remembers which commit it meant.
        folder = Path(snapshot_download(source, revision=revision, allow_patterns=SIDE_FILES))
        # The commit pins all later requests to one state of the repository.
        info = HfApi().model_info(source, revision=folder.name, files_metadata=True)
    sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or ()}
    names = {place + name for place in ("", f"{TOWER_FOLDER}/") for name in (INDEX_NAME, SINGLE_NAME)}
    if not names & sizes.keys():
        weights = [name for name in sizes if name.endswith((".bin", ".gguf", ".safetensors", ".pth"))]
        raise MachineError(
            f"{where}: expected {SINGLE_NAME} or {INDEX_NAME}, the repository has "
            f"{', '.join(weights[:3]) or 'no weights'}. Name a repository with safetensors weights."
        )
    return Snapshot(source, folder.name, folder, sizes)


def download(source: str, revision: str | None, announce: Callable[[str], None]) -> Path:
    """Fetch the side files of a repository, then the weight files that it declares."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE

    where = named(source, revision)
    snapshot = fetch_side_files(source, revision)
    wanted = snapshot.weights()
    missing = [name for name in wanted if not (snapshot.folder / name).exists()]
    num_bytes = sum(snapshot.sizes.get(name, 0) for name in missing)
    announce(f"{where}: downloading {len(missing)} weight files, {num_bytes / 1e9:.1f} GB")
    check_free_space(Path(HF_HUB_CACHE), num_bytes)
    with naming_hub_errors(where):
        return Path(snapshot_download(source, revision=snapshot.commit, allow_patterns=[*SIDE_FILES, *wanted]))


@contextmanager
def naming_hub_errors(where: str) -> Iterator[None]:
    """Turn whatever a hub call raises into a MachineError that names the repository."""
    try:
        yield
    except Exception as error:
        # The transport errors of the hub's client share no base class with its own errors.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise MachineError(
            f"{where}: not on this machine, and the hub did not give it: {reason} "
            "Check the name and the network, log in if it is gated, or give a folder."
        ) from error
