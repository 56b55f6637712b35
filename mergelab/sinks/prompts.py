"""Prompt sets for the sink metrics: the shipped one, or a JSONL file of the user's.

One JSON object with a ``prompt`` a line. Tokens and chat templates are ``measure``'s business.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from mergelab.errors import RecipeError, problem_list

BUILTIN = ("builtin-v1",)
"""Shipped sets. A set never changes; another set gets another name."""


@dataclass(frozen=True)
class Prompts:
    """Prompts with what a record needs to say which they were."""

    name: str
    """Name of a shipped set, else the file name."""
    texts: tuple[str, ...]
    sha256: str
    """Hash of the texts in order, whatever else the file holds."""


def load_prompts(source: str) -> Prompts:
    """Load a prompt set.

    Args:
        source: ``builtin-v1``, or the path of a JSONL file. Blank lines are skipped; keys beside ``prompt``
            are ignored.

    Returns:
        The prompts in file order, at least one.

    Raises:
        RecipeError: The file is missing, not UTF-8, holds no prompt, or lines are not objects with a
            non-empty text ``prompt`` that no earlier line has; all bad lines are named.
    """
    if source in BUILTIN:
        content = (resources.files("mergelab.sinks") / "data" / f"{source}.jsonl").read_bytes()
        return _parse(source, source, content)
    path = Path(source)
    if not path.is_file():
        raise RecipeError(
            f"prompts {source}: expected a JSONL file or one of {', '.join(BUILTIN)}, found "
            f"{'a folder' if path.is_dir() else 'no such file'}. Correct sink.prompts."
        )
    return _parse(path.name, source, path.read_bytes())


def _parse(name: str, source: str, content: bytes) -> Prompts:
    try:
        lines = content.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise RecipeError(f"prompts {source}: not UTF-8 at byte {error.start}. Save the file as UTF-8.") from error
    first_line: dict[str, int] = {}
    problems = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        text = _read_prompt(line)
        if text is None:
            problems.append(f'line {number}: expected {{"prompt": "some text"}}, found {line.strip()[:60]!r}')
        elif text in first_line:
            # The interval draws prompts as independent; a repeated one would make it too narrow.
            problems.append(f"line {number}: repeats the prompt of line {first_line[text]}")
        else:
            first_line[text] = number
    if not first_line and not problems:
        problems.append("the file is empty, expected one JSON object with a prompt a line")
    if problems:
        raise RecipeError(problem_list(f"prompts {source}:", problems, "Correct these lines; nothing was measured."))
    texts = tuple(first_line)
    canonical = json.dumps(texts, ensure_ascii=False).encode("utf-8")
    return Prompts(name=name, texts=texts, sha256=hashlib.sha256(canonical).hexdigest())


def _read_prompt(line: str) -> str | None:
    try:
        entry = json.loads(line)
    except (json.JSONDecodeError, RecursionError):
        return None
    prompt = entry.get("prompt") if isinstance(entry, dict) else None
    return prompt if isinstance(prompt, str) and prompt.strip() else None
