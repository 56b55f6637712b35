"""Prompt files: the shipped one, and what a bad one says."""

from pathlib import Path

import pytest

from mergelab.errors import RecipeError
from mergelab.sinks.prompts import load_prompts

BUILTIN_SHA256 = "54673ec72f2db9ea0bb56ec8a5a45960bff35c6f5813897edd7ef3bf7df5ec3e"


def test_builtin_set_is_fifteen_prompts_and_never_changes() -> None:
    prompts = load_prompts("builtin-v1")
    assert prompts.name == "builtin-v1"
    assert len(set(prompts.texts)) == 15
    assert all(6 <= len(text.split()) <= 20 for text in prompts.texts)
    assert prompts.sha256 == BUILTIN_SHA256, "records name this set by hash: give a changed set another name"


def test_file_is_read_in_order_and_hashed_by_its_texts(tmp_path: Path) -> None:
    plain, decorated = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    plain.write_text('{"prompt": "Zwei Wörter"}\n{"prompt": "one"}\n', encoding="utf-8")
    decorated.write_text('{"id": 1,  "prompt": "Zwei W\\u00f6rter"}\r\n\n{"prompt": "one"}', encoding="utf-8")
    first, second = load_prompts(str(plain)), load_prompts(str(decorated))
    assert first.name == "a.jsonl"
    assert first.texts == second.texts == ("Zwei Wörter", "one")
    assert first.sha256 == second.sha256
    plain.write_text('{"prompt": "one"}\n{"prompt": "Zwei Wörter"}\n', encoding="utf-8")
    assert load_prompts(str(plain)).sha256 != first.sha256


@pytest.mark.parametrize("content", ["", "\n \n"], ids=["empty", "blank"])
def test_file_without_prompts_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    with pytest.raises(RecipeError, match="the file is empty, expected one JSON object") as caught:
        load_prompts(str(path))
    assert caught.value.exit_code == 3


def test_all_bad_lines_are_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    lines = ['{"prompt": "good"}', '{"text": "x"}', "not json", '{"prompt": " "}', '{"prompt": 3}', '["a"]']
    path.write_text("\n".join([*lines, '{"prompt": "good"}']))
    with pytest.raises(RecipeError) as caught:
        load_prompts(str(path))
    message = str(caught.value)
    assert "line 1:" not in message
    for number in range(2, 7):
        assert f'line {number}: expected {{"prompt": "some text"}}, found' in message
    assert "line 7: repeats the prompt of line 1" in message


def test_missing_file_folder_and_binary_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"one of builtin-v1, found no such file"):
        load_prompts("builtin-v2")
    with pytest.raises(RecipeError, match="found a folder"):
        load_prompts(str(tmp_path))
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}')
    with pytest.raises(RecipeError, match="not UTF-8 at byte 12"):
        load_prompts(str(path))
