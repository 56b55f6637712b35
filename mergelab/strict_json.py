"""JSON objects out of files that anybody may have written: strict, bounded, and printable in a message."""

from __future__ import annotations

import json
import reprlib
import stat
from pathlib import Path
from typing import Any

MAX_BYTES = 100_000_000
"""No index, config or tokenizer comes near it."""

MAX_SHOWN = 200

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict, _SHORT.maxstring, _SHORT.maxlong, _SHORT.maxother = 3, 6, 4, 80, 40, 80


def load_object(raw: bytes) -> dict[str, Any]:
    """Decode one JSON object; a doubled key, bad UTF-8, a lone surrogate or bottomless nesting is a ValueError."""
    try:
        value = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, found {type(value).__name__}")
    # Only an escape can bring a surrogate into valid UTF-8.
    if b"\\ud" in raw or b"\\uD" in raw:
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"{error.object[error.start : error.end]!r} is not valid Unicode") from error
    return value


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no regular file (links are followed), larger than ``MAX_BYTES``, or no such object.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):  # a pipe or device would never end
        raise ValueError("not a regular file")
    if found.st_size > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES} bytes")
    return load_object(path.read_bytes())


def nested_deeper(value: Any, levels: int) -> bool:
    """Say whether lists and objects lie in one another more than ``levels`` deep."""
    level = [value]
    for _ in range(levels):
        collections = (inner.values() if isinstance(inner, dict) else inner for inner in level)
        level = [inner for one in collections for inner in one if isinstance(inner, (dict, list))]
        if not level:
            return False
    return True


def shown(value: Any) -> str:
    """Return a value out of a foreign file as a message can print it: short, and no control characters."""
    if isinstance(value, str) and value.isprintable() and len(value) <= MAX_SHOWN:
        return value
    text = ascii(value[:MAX_SHOWN]) if isinstance(value, str) else ascii(_SHORT.repr(value))[1:-1]
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"key {shown(twice)!r} stands twice")
    return value
