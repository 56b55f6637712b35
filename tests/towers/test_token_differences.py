"""Vocabularies compared token by token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mergelab.towers.token_differences import token_differences
from tests.builders import WORDS, write_tokenizer


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    base, vlm = tmp_path / "base", tmp_path / "vlm"
    for folder in (base, vlm):
        folder.mkdir()
        write_tokenizer(folder, WORDS)
    return base, vlm


def test_equal(folders: tuple[Path, Path]) -> None:
    found = token_differences(*folders)
    assert found is not None
    assert (found.num_shared, found.same_template) == (len(WORDS), True)
    assert not (found.only_base or found.only_vlm or found.moved or found.special)


def test_tokens_of_equally_many_rows_differ(folders: tuple[Path, Path]) -> None:
    base, vlm = folders
    write_tokenizer(vlm, (*WORDS[:-3], "<image>", WORDS[-2], WORDS[-3]))
    found = token_differences(base, vlm)
    assert found is not None
    last = len(WORDS) - 1
    assert found.only_base == {WORDS[-1]: last}
    assert found.only_vlm == {"<image>": last - 2}
    assert found.moved == {WORDS[-3]: (last - 2, last)}


def test_special_tokens_and_template(folders: tuple[Path, Path]) -> None:
    settings = json.loads((folders[1] / "tokenizer_config.json").read_text())
    settings |= {"eos_token": {"content": "<unk>"}, "chat_template": "other"}
    del settings["pad_token"]
    (folders[1] / "tokenizer_config.json").write_text(json.dumps(settings))
    found = token_differences(*folders)
    assert found is not None
    assert found.special == {"eos_token": ("</s>", "<unk>"), "pad_token": ("<pad>", None)}
    assert not found.same_template
    (folders[0] / "chat_template.jinja").write_text("other")
    again = token_differences(*folders)
    assert again is not None and again.same_template, "a template file wins over the settings"


def test_no_tokenizer(folders: tuple[Path, Path]) -> None:
    for path in folders[1].iterdir():
        path.unlink()
    assert token_differences(*folders) is None
