"""Models on the hub: headers and sampled rows by byte ranges, weights only for a merge, against a hub of our own."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from click.testing import CliRunner, Result

from mergelab.checkpoints.headers import open_checkpoint
from mergelab.checkpoints.hub import resolve_source
from mergelab.checkpoints.remote import open_source
from mergelab.cli import main
from mergelab.errors import DamagedFileError, MachineError
from tests.builders import WORDS, hand_made, text_tensors, tiny_llama, tiny_llava
from tests.checkpoints.fake_hub import FakeHub, serving


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub with a base and a vlm, and an empty cache."""
    root = tmp_path / "served"
    base = tiny_llama(root / "owner" / "base", hidden_size=64, intermediate_size=4096)
    vlm = tiny_llava(root / "owner" / "vlm", start=base, hidden_size=64, intermediate_size=4096, max_shard_size="1MB")
    (vlm / "extra.bin").write_bytes(b"never fetched")
    with serving(root) as hub:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(
            huggingface_hub.constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            hub.url + "/{repo_id}/resolve/{revision}/{filename}",
        )
        yield hub


def typed(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def served_bytes(hub: FakeHub) -> int:
    return sum(path.stat().st_size for path in hub.root.rglob("*.safetensors"))


def test_check_fetches_headers_and_sampled_rows_only(hub: FakeHub, tmp_path: Path) -> None:
    done = typed("check", "--base", "owner/base", "--vlm", "owner/vlm", "--json")
    assert done.exit_code == 0, done.output
    assert "owner/vlm: reading headers on the hub, 0.0 GB stay there" in done.stderr
    there = json.loads(done.stdout)
    assert 0 < hub.weights_sent() < served_bytes(hub) / 2
    assert hub.sent["owner/vlm/extra.bin"] == 0
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    here = json.loads(
        typed("check", "--base", hub.root / "owner/base", "--vlm", hub.root / "owner/vlm", "--json").stdout
    )
    assert there["ancestry"] == here["ancestry"] and there["ancestry"]["verdict"] == "child"
    assert there["coverage"] == here["coverage"] and there["tokens"] == here["tokens"]


def test_no_digest_fetches_no_weights(hub: FakeHub) -> None:
    done = typed("check", "--base", "owner/base", "--vlm", "owner/vlm", "--no-digest", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["ancestry"] is None
    # Headers come with the first bytes of each file.
    shards = len(list(hub.root.rglob("*.safetensors")))
    assert hub.weights_sent() <= shards * 100_000


def test_header_longer_than_the_first_request_is_read_whole(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mergelab.checkpoints.remote.FIRST_BYTES", 100)
    remote, local = open_source("owner/vlm"), open_checkpoint(hub.root / "owner/vlm")
    places = [
        {name: (h.dtype, h.shape, h.start, h.end, h.path.name) for name, h in opened.tensors.items()}
        for opened in (remote, local)
    ]
    assert places[0] == places[1]
    assert remote.config == local.config and len(remote.shards) > 1


def test_pair_that_does_not_fit_is_refused_before_weights_are_fetched(hub: FakeHub, tmp_path: Path) -> None:
    tiny_llama(hub.root / "owner" / "deep", hidden_size=64, intermediate_size=4096, num_hidden_layers=3)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("{name: r, pair: bench, method: linear, parameters: {weights: {base: 0.5, vlm: 0.5}}}")
    done = typed("merge", recipe, "--base", "owner/deep", "--vlm", "owner/vlm", "--out", tmp_path / "out")
    assert done.exit_code == 4 and "base has 3 layers, vlm 2" in done.stderr
    assert hub.weights_sent() <= len(list(hub.root.rglob("*.safetensors"))) * 100_000
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_merge_downloads_what_the_index_lists_and_says_how_much(hub: FakeHub, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("{name: r, pair: bench, method: linear, parameters: {weights: {base: 0.5, vlm: 0.5}}}")
    shutil.copy(hub.root / "owner/base/model.safetensors", hub.root / "owner/vlm/consolidated.safetensors")
    done = typed("merge", recipe, "--base", "owner/base", "--vlm", "owner/vlm", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "owner/vlm: downloading" in done.stderr and "weight files" in done.stderr
    assert hub.sent["owner/vlm/consolidated.safetensors"] == 0 and hub.sent["owner/vlm/extra.bin"] == 0
    sent = hub.weights_sent()
    again = typed("merge", recipe, "--base", "owner/base", "--vlm", "owner/vlm", "--out", tmp_path / "again")
    assert again.exit_code == 0 and hub.weights_sent() == sent, "the cache was not used"
    assert (tmp_path / "out/config.json").read_bytes() == (tmp_path / "again/config.json").read_bytes()


def test_damaged_files_on_the_hub_are_named(hub: FakeHub) -> None:
    shard = next((hub.root / "owner/vlm").glob("*.safetensors"))
    os.truncate(shard, shard.stat().st_size - 7)
    with pytest.raises(DamagedFileError, match=rf"{shard.name}: is 7 bytes too short"):
        open_source("owner/vlm")


def test_revision_that_is_not_there_and_missing_repository(hub: FakeHub) -> None:
    with pytest.raises(MachineError, match=r"owner/vlm at v2: .*the hub did not give it"):
        open_source("owner/vlm", "v2")
    with pytest.raises(MachineError, match=r"owner/nobody: .*the hub did not give it"):
        open_source("owner/nobody")
    assert open_source("owner/vlm", FakeHub.commit("owner/vlm")).tensors


def test_hub_that_ignores_ranges_sends_no_whole_file(hub: FakeHub) -> None:
    hub.ranges = False
    with pytest.raises(MachineError, match=r"asked the hub for bytes 0 to .*, found 0 of them"):
        open_source("owner/base")


def test_offline_says_so_and_asks_nobody(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(MachineError, match=r"missing: everything.*HF_HUB_OFFLINE is set"):
        open_source("owner/vlm")
    assert not hub.sent


def test_tower_in_a_folder_of_its_own_comes_with_what_surrounds_it(hub: FakeHub) -> None:
    apart = hub.root / "owner" / "vila"
    hand_made(apart / "llm", text_tensors(num_layers=1), tokens=WORDS)
    hand_made(apart / "vision_tower", text_tensors(num_layers=1))
    (apart / "config.json").write_text("{}")
    remote = open_source("owner/vila")
    assert remote.repository is not None and remote.folder == remote.repository / "llm"
    folder = resolve_source("owner/vila")
    assert open_checkpoint(folder).repository == folder
    assert (folder / "vision_tower" / "model.safetensors").is_file()
    sent = hub.weights_sent()
    assert not open_source("owner/vila").on_hub and hub.weights_sent() == sent
