"""Tokenizer files as they occur, and rows paired by token."""

import json
from pathlib import Path
from typing import Any

import pytest

from mergelab.errors import DamagedFileError, PairingError
from mergelab.towers.vocabulary import match_rows, read_vocabulary


def folder_with(tmp_path: Path, **files: Any) -> Path:
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return tmp_path


def fast(vocab: Any, *added: tuple[str, int], kind: str = "BPE") -> dict[str, Any]:
    return {
        "model": {"type": kind, "vocab": vocab},
        "added_tokens": [{"content": t, "id": i} for t, i in added],
    }


ABC = {"a": 0, "b": 1, "c": 2}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer": fast(ABC)}, ABC),
        ({"tokenizer": fast(ABC, ("<x>", 3))}, {**ABC, "<x>": 3}),
        (
            {"tokenizer": fast([["a", 0.0], ["b", -1.5], ["c", -2]], ("<x>", 7), kind="Unigram")},
            {**ABC, "<x>": 7},
        ),
        # The added token names the row, as in the tokenizer.
        ({"tokenizer": fast(ABC, ("<x>", 2))}, {"a": 0, "b": 1, "<x>": 2}),
        ({"tokenizer": fast(ABC, ("c", 2))}, ABC),
        ({"vocab": ABC}, ABC),
        ({"vocab": ABC, "added_tokens": {"<x>": 3}}, {**ABC, "<x>": 3}),
        (
            {"vocab": ABC, "tokenizer_config": {"added_tokens_decoder": {"3": {"content": "<y>"}}}},
            {**ABC, "<y>": 3},
        ),
        ({"tokenizer": fast(ABC), "vocab": {"other": 0}}, ABC),
        ({"tokenizer": fast(ABC), "added_tokens": {"<pad>": 3}}, {**ABC, "<pad>": 3}),
        ({"tokenizer_config": {"tokenizer_class": "X"}}, None),
        ({}, None),
    ],
)
def test_every_form_is_read(tmp_path: Path, files: dict[str, Any], expected: dict[str, int] | None) -> None:
    assert read_vocabulary(folder_with(tmp_path, **files)) == expected


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{", "{}", fast({"a": "0"}), fast({"a": True}), fast({"a": -1}), fast([1]),
     fast(ABC, ("<x>", "3")),
     {"model": [], "added_tokens": []}, {"model": {"vocab": ABC}, "added_tokens": 3}],
)  # fmt: skip
def test_damaged_files_are_named(tmp_path: Path, content: Any) -> None:
    with pytest.raises(DamagedFileError, match=r"tokenizer\.json"):
        read_vocabulary(folder_with(tmp_path, tokenizer=content))


def tokens(count: int, *more: str) -> dict[str, int]:
    return {name: row for row, name in enumerate([*(f"t{n}" for n in range(count)), *more])}


def test_equal_tokenizers_without_padding_pair_one_to_one() -> None:
    assert match_rows("e", {"base": 16, "vlm": 16}, {"base": tokens(16), "vlm": tokens(16)}) is None


def test_new_tokens_of_the_vlm_are_copied() -> None:
    rows = match_rows("e", {"base": 16, "vlm": 18}, {"base": tokens(16), "vlm": tokens(16, "<i>", "<j>")})
    assert rows is not None
    assert rows.rows == {"base": range(16), "vlm": range(16)}
    assert (rows.num_shared, rows.num_vlm_only, rows.num_base_only, rows.num_padding) == (16, 2, 0, 0)


def test_padding_rows_are_copied() -> None:
    rows = match_rows("e", {"base": 16, "vlm": 24}, {"base": tokens(16), "vlm": tokens(16, "<i>")})
    assert rows is not None
    assert (rows.num_shared, rows.num_vlm_only, rows.num_base_only, rows.num_padding) == (16, 1, 0, 7)


def test_moved_tokens_are_paired_by_string_and_base_only_ones_counted() -> None:
    base = tokens(12, "<x>", "<y>", "<old>")
    vlm = tokens(12, "<new>", "<y>", "<x>")
    rows = match_rows("e", {"base": 15, "vlm": 16}, {"base": base, "vlm": vlm})
    assert rows is not None
    assert rows.rows == {"base": (*range(12), 13, 12), "vlm": (*range(12), 13, 14)}
    assert (rows.num_shared, rows.num_vlm_only, rows.num_base_only, rows.num_padding) == (14, 1, 1, 1)


def test_a_vlm_with_fewer_rows_than_its_base() -> None:
    rows = match_rows("e", {"base": 20, "vlm": 16}, {"base": tokens(15, "<old>"), "vlm": tokens(15, "<new>")})
    assert rows is not None
    assert rows.rows == {"base": range(15), "vlm": range(15)}
    assert (rows.num_vlm_only, rows.num_base_only, rows.num_padding) == (1, 1, 0)


def test_tokens_beyond_the_rows_of_a_tensor_do_not_pair() -> None:
    rows = match_rows("e", {"base": 16, "vlm": 18}, {"base": tokens(16, "<pad>"), "vlm": tokens(16, "<pad>", "<i>")})
    assert rows is not None
    assert rows.rows == {"base": range(16), "vlm": range(16)}
    assert rows.num_vlm_only == 2


def test_rows_must_be_shared_by_the_ancestor_too() -> None:
    vocabularies = {"base": tokens(16), "vlm": tokens(16), "ancestor": tokens(15)}
    rows = match_rows("e", {"base": 16, "vlm": 16, "ancestor": 16}, vocabularies)
    assert rows is not None
    assert rows.rows["ancestor"] == range(15)
    assert rows.num_vlm_only == 1


@pytest.mark.parametrize(("shared", "accepted"), [(18, True), (17, False)], ids=["90 %", "85 %"])
def test_tokenizers_that_share_under_ninety_percent_are_refused(shared: int, accepted: bool) -> None:
    other = tokens(shared, *(f"o{n}" for n in range(20 - shared)))
    vocabularies = {"base": tokens(20), "vlm": other}
    if accepted:
        assert match_rows("e", {"base": 20, "vlm": 20}, vocabularies) is not None
    else:
        with pytest.raises(PairingError, match="base and vlm share 17 of 20 tokens, expected at least 90%"):
            match_rows("e", {"base": 20, "vlm": 20}, vocabularies)


def test_without_tokenizer_files_equal_rows_pair_by_index_and_others_are_refused() -> None:
    assert match_rows("e", {"base": 16, "vlm": 16}, {"base": None, "vlm": tokens(16)}) is None
    with pytest.raises(PairingError, match=r"row counts differ \(base 16, vlm 18\) and base has no readable"):
        match_rows("e", {"base": 16, "vlm": 18}, {"base": None, "vlm": tokens(16)})
