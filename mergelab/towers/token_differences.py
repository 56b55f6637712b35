"""What two checkpoints' tokenizer files say differently, token by token and never by row count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergelab.towers.vocabulary import read_object, read_vocabulary

SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


@dataclass(frozen=True)
class TokenDifferences:
    """The vocabularies of base and vlm, where both have tokenizer files."""

    num_shared: int
    only_base: Mapping[str, int]
    """Token -> row."""
    only_vlm: Mapping[str, int]
    """Token -> row."""
    moved: Mapping[str, tuple[int, int]]
    """Shared token -> its row in base and in the vlm."""
    special: Mapping[str, tuple[str | None, str | None]]
    """bos, eos, pad, unk that differ: base's and the vlm's."""
    same_template: bool


def token_differences(base: Path, vlm: Path) -> TokenDifferences | None:
    """Compare the tokenizer files of two folders; None if one has no readable ones.

    Raises:
        DamagedFileError: A file is there but damaged.
    """
    first, second = read_vocabulary(base), read_vocabulary(vlm)
    if first is None or second is None:
        return None
    mine, theirs = special_tokens(base), special_tokens(vlm)
    return TokenDifferences(
        num_shared=len(first.keys() & second.keys()),
        only_base=by_row({token: row for token, row in first.items() if token not in second}),
        only_vlm=by_row({token: row for token, row in second.items() if token not in first}),
        moved={token: (row, second[token]) for token, row in first.items() if second.get(token, row) != row},
        special={name: (mine[name], theirs[name]) for name in SPECIAL if mine[name] != theirs[name]},
        same_template=chat_template(base) == chat_template(vlm),
    )


def by_row(tokens: Mapping[str, int]) -> dict[str, int]:
    """Return the tokens in row order."""
    return dict(sorted(tokens.items(), key=lambda item: item[1]))


def special_tokens(folder: Path) -> dict[str, str | None]:
    """Return the strings of the special tokens, from ``special_tokens_map.json`` or ``tokenizer_config.json``."""
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            settings |= read_object(folder / name)
    return {name: text_of(settings.get(name)) for name in SPECIAL}


def text_of(token: Any) -> str | None:
    """Return the string of a token that is stated as text or as an object with content."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def chat_template(folder: Path) -> str | None:
    """Return the chat template of a folder as its files spell it."""
    for name in TEMPLATE_FILES:
        if (folder / name).is_file():
            text = (folder / name).read_text(encoding="utf-8", errors="replace")
            return str(read_object(folder / name).get("chat_template")) if name.endswith(".json") else text
    settings = folder / "tokenizer_config.json"
    template = read_object(settings).get("chat_template") if settings.is_file() else None
    return None if template is None else str(template)
