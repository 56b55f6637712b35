"""Tokenizer files and which rows of two embeddings belong to the same token.

Files are read as JSON; no tokenizer is built. Rows are paired by the token's string, because a vlm may
append tokens, drop padding, or order added tokens differently.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from mergelab import strict_json
from mergelab.errors import DamagedFileError, PairingError

VOCABULARY_FILES = ("tokenizer.json", "vocab.json", "added_tokens.json", "tokenizer_config.json")

MIN_SHARED = 0.9
"""Tokenizers that share less than this of the smaller one's tokens are refused."""


@dataclass(frozen=True)
class RowMap:
    """Which rows of an embedding or head are the same token in all models; the vlm's others are copied."""

    by: Literal["token", "index"]
    rows: Mapping[str, Sequence[int]]
    """Role -> row numbers, equally many in every role, in the vlm's row order; a ``range`` where possible."""
    num_vlm_only: int
    """Rows of the vlm whose token some other model lacks: copied."""
    num_base_only: int
    """Rows of the base whose token the vlm lacks: dropped."""
    num_padding: int
    """Rows of the vlm that no token uses: copied."""

    @property
    def num_shared(self) -> int:
        """How many rows are merged."""
        return len(self.rows["vlm"])


def read_vocabulary(folder: Path) -> dict[str, int] | None:
    """Return token string -> row number of the tokenizer in ``folder``, or None without readable files.

    Read are ``tokenizer.json`` (BPE, WordPiece, WordLevel and Unigram models, and its added tokens) or,
    without it, ``vocab.json``; then ``added_tokens.json`` and the ``added_tokens_decoder`` of
    ``tokenizer_config.json`` for tokens that are not there yet. Of two strings for one row the added token
    wins, of two rows for one string the model's, as in the tokenizer itself. A sentencepiece ``tokenizer.model``
    alone counts as no readable file. Rows that several tokens of the model claim are left out: which of them the
    tokenizer means is not defined.

    Raises:
        DamagedFileError: A file is there but damaged.
    """
    state = []
    for path in (folder / name for name in VOCABULARY_FILES):
        if path.is_file():
            found = path.stat()
            state.append((path.name, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino))
        elif os.path.lexists(path):
            raise damaged(path, "a folder, a link to nothing or another thing that is no file")
    return parsed_vocabulary(folder, tuple(state))


@lru_cache(maxsize=4)
def parsed_vocabulary(folder: Path, state: tuple[tuple[Any, ...], ...]) -> dict[str, int] | None:
    """Read the vocabulary anew unless the files are in the ``state`` they were in the last time."""
    fast, slow = folder / "tokenizer.json", folder / "vocab.json"
    if fast.is_file():
        vocabulary, added = read_fast(fast)
    elif slow.is_file():
        vocabulary, added = tokens_in(read_object(slow), slow), {}
    else:
        return None
    listed = folder / "added_tokens.json"
    if listed.is_file():
        added = tokens_in(read_object(listed), listed) | added
    settings = folder / "tokenizer_config.json"
    if settings.is_file():
        added = read_added_decoder(settings) | added
    added = {token: vocabulary.get(token, row) for token, row in added.items()}
    rows = set(vocabulary.values())
    taken = rows.intersection(added.values())
    if len(rows) == len(vocabulary) and all(
        vocabulary.get(token) == row for token, row in added.items() if row in rows
    ):
        return vocabulary | added
    claims = Counter(vocabulary.values())
    return {token: row for token, row in vocabulary.items() if row not in taken and claims[row] < 2} | added


def read_fast(path: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Return the model's tokens and the added tokens of a ``tokenizer.json``."""
    content = read_object(path)
    model = content.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):
        # Unigram: a list of [token, score] in row order.
        if not all(isinstance(entry, list) and entry and isinstance(entry[0], str) for entry in vocabulary):
            raise damaged(path, "model.vocab is not a list of [token, score]")
        tokens = {entry[0]: row for row, entry in enumerate(vocabulary)}
    else:
        tokens = tokens_in(vocabulary, path)
    added = content.get("added_tokens") or []
    if not isinstance(added, list) or not all(is_added(entry) for entry in added):
        raise damaged(path, "added_tokens is not a list of objects with content")
    return tokens, tokens_in({entry.get("content"): entry.get("id") for entry in added}, path)


def read_added_decoder(path: Path) -> dict[str, int]:
    """Return the tokens of ``added_tokens_decoder`` (row as text -> object with content)."""
    decoder = read_object(path).get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict) or not all(is_row(row) and is_added(e) for row, e in decoder.items()):
        raise damaged(path, "added_tokens_decoder does not map rows to objects with content")
    return tokens_in({entry.get("content"): int(row) for row, entry in decoder.items()}, path)


def is_added(entry: Any) -> bool:
    """Say whether this describes an added token."""
    return isinstance(entry, dict) and isinstance(entry.get("content"), str)


def is_row(text: str) -> bool:
    """Say whether this is a row number spelled as a key."""
    return text.isascii() and text.isdecimal() and len(text) < 19


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    try:
        return strict_json.read_object(path)
    except (OSError, ValueError) as error:
        raise damaged(path, f"not readable JSON ({error})") from error


def tokens_in(value: Any, path: Path) -> dict[str, int]:
    """Check that ``value`` maps strings to row numbers."""
    # By sets of types, for vocabularies are long.
    if not isinstance(value, dict) or {*map(type, value)} - {str} or {*map(type, value.values())} - {int}:
        raise damaged(path, "does not map tokens to row numbers")
    if min(value.values(), default=0) < 0:
        raise damaged(path, "does not map tokens to row numbers")
    return value


def damaged(path: Path, found: str) -> DamagedFileError:
    """Word the refusal of a tokenizer file."""
    return DamagedFileError(f"{path}: expected a tokenizer vocabulary, found: {found}. Get the file again.")


def match_rows(
    name: str, num_rows: Mapping[str, int], vocabularies: Mapping[str, dict[str, int] | None]
) -> RowMap | None:
    """Return which rows of one tensor belong together in all models, or None if the rows pair one to one.

    Args:
        name: Canonical name, for messages.
        num_rows: Role -> rows of that tensor; roles base, vlm and maybe ancestor.
        vocabularies: Role -> ``read_vocabulary``.

    Raises:
        PairingError: A model has no tokenizer files and the row counts differ, or the tokenizers share too
            little.
    """
    unread = [role for role in num_rows if vocabularies.get(role) is None]
    if unread:
        if len(set(num_rows.values())) > 1:
            counts = ", ".join(f"{role} {count}" for role, count in num_rows.items())
            raise PairingError(
                f"{name}: row counts differ ({counts}) and {', '.join(unread)} has no readable tokenizer "
                "files. Put tokenizer.json into the folder."
            )
        return None
    # Tokens beyond the tensor's rows have no weights here: LLaVA's base has a <pad> token but no row for it.
    rows = {
        role: {token: row for token, row in (vocabularies[role] or {}).items() if row < count}
        for role, count in num_rows.items()
    }
    by_row = {row: token for token, row in rows["vlm"].items()}
    in_all = set(by_row.values()).intersection(*rows.values())
    shared = sorted(rows["vlm"][token] for token in in_all)
    for role, tokens in rows.items():
        common = len(tokens.keys() & rows["vlm"].keys())
        smaller = min(len(tokens), len(rows["vlm"]))
        if common < MIN_SHARED * smaller or not smaller:
            raise PairingError(
                f"{name}: the tokenizers of {role} and vlm share {common} of {smaller} tokens, expected "
                f"at least {MIN_SHARED:.0%}. Pick the base this vlm was tuned from."
            )
    maps = {role: compact([tokens[by_row[row]] for row in shared]) for role, tokens in rows.items()}
    whole = all(maps[role] == range(count) for role, count in num_rows.items())
    if whole:
        return None
    return RowMap(
        "token",
        maps,
        num_vlm_only=len(by_row) - len(shared),
        num_base_only=len(set(rows["base"]) - set(rows["vlm"])),
        num_padding=num_rows["vlm"] - len(by_row),
    )


def compact(rows: list[int]) -> Sequence[int]:
    """Return the rows as a range where they are consecutive, else as a tuple."""
    if rows and rows == list(range(rows[0], rows[0] + len(rows))):
        return range(rows[0], rows[0] + len(rows))
    return tuple(rows)
