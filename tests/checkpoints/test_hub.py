"""Sources: folders as they stand, snapshots from a hand-made hub cache, refusals without network."""

import shutil
from pathlib import Path

import huggingface_hub
import pytest

from mergelab.checkpoints.hub import resolve_source
from mergelab.errors import DamagedFileError, MachineError, RecipeError
from tests.builders import WORDS, hand_made, text_tensors

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache of our own, offline."""
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return folder


def cached_repository(cache: Path, *shards: dict, tokens: tuple[str, ...] | None = WORDS) -> Path:
    """Lay out one repository as the hub client does: refs, and a snapshot of links to blobs."""
    repository = cache / "models--owner--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    snapshot = repository / "snapshots" / COMMIT
    hand_made(snapshot, *(shards or (text_tensors(),)), tokens=tokens)
    blobs = repository / "blobs"
    blobs.mkdir()
    for path in list(snapshot.iterdir()):
        shutil.move(path, blobs / path.name)
        path.symlink_to(Path("../../blobs") / path.name)
    return snapshot


def test_folder_is_taken_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "models" / "base").mkdir(parents=True)
    assert resolve_source("models/base", None, tmp_path) == tmp_path / "models" / "base"
    assert resolve_source(str(tmp_path / "models"), None, Path("/elsewhere")) == tmp_path / "models"


def test_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "base").mkdir()
    assert resolve_source("~/base") == tmp_path / "base"


def test_folder_wins_over_a_hub_id(tmp_path: Path, cache: Path) -> None:
    cached_repository(cache)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert resolve_source("owner/name", None, tmp_path) == tmp_path / "owner" / "name"


@pytest.mark.parametrize(
    "source", ["/no/such/folder", "./base", "../base/vlm", "base", "a/b/c", "owner/..", "a b/c", ""]
)
def test_things_that_look_like_paths_are_missing_folders(tmp_path: Path, cache: Path, source: str) -> None:
    with pytest.raises(DamagedFileError, match="no such folder"):
        resolve_source(source, None, tmp_path / "elsewhere")


def test_file_instead_of_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(DamagedFileError, match="found a file"):
        resolve_source("model.safetensors", None, tmp_path)


def test_revision_of_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="'main' means nothing"):
        resolve_source(str(tmp_path), "main")


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_cached_snapshot_is_used_without_network(tmp_path: Path, cache: Path, revision: str | None) -> None:
    snapshot = cached_repository(cache)
    assert resolve_source("owner/name", revision, tmp_path) == snapshot


def test_cached_snapshot_is_used_without_asking_the_network(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    snapshot = cached_repository(cache)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "HfApi", None)
    assert resolve_source("owner/name", None, tmp_path) == snapshot


def test_snapshot_without_tokenizer_is_enough_offline(cache: Path, tmp_path: Path) -> None:
    snapshot = cached_repository(cache, tokens=None)
    assert resolve_source("owner/name", None, tmp_path) == snapshot


@pytest.mark.parametrize("lost", ["config.json", "model-00002-of-00002.safetensors"])
def test_incomplete_snapshot_is_refused_offline_with_the_missing_file(cache: Path, tmp_path: Path, lost: str) -> None:
    items = list(text_tensors().items())
    snapshot = cached_repository(cache, dict(items[::2]), dict(items[1::2]))
    (snapshot / lost).unlink()
    with pytest.raises(MachineError, match=rf"missing: {lost}.*HF_HUB_OFFLINE"):
        resolve_source("owner/name", None, tmp_path)


def test_unknown_repository_is_refused_offline(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="owner/name at v2: not on this machine"):
        resolve_source("owner/name", "v2", tmp_path)


def test_failed_download_is_one_clear_error(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    # A closed port of this machine: the refusal comes at once, with or without a network.
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(MachineError, match="owner/name: not on this machine, and the hub did not give it"):
        resolve_source("owner/name", None, tmp_path)
