"""What is wrong with a document, in sentences: path, what was expected and found, the nearest name."""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from mergelab.config.document import Document

Path = tuple[str | int, ...]
UnknownKey = Callable[[Path, Any], str]

PARTIAL = "partial"
"""Validation context under which rules over several keys are skipped: the loader reports those itself."""


DocumentT = TypeVar("DocumentT", bound=Document)

_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "pattern_regex": "a regular expression",
    "pattern_type": "a regular expression",
    "greater_than": "a number above {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "a number below {lt:g}",
    "less_than_equal": "at most {le:g}",
    "too_short": "a list of at least {min_length}",
    "string_too_short": "some text",
    "string_pattern_mismatch": "letters, digits, dots, dashes and underscores, the first a letter or digit",
}


def validate(
    model: type[DocumentT],
    document: Mapping[str, Any],
    unknown_key: UnknownKey,
    placeholders: Mapping[str, Any],
) -> tuple[DocumentT | None, list[str]]:
    """Return the document as ``model`` and everything that is wrong with its keys and values.

    A document with problems is still read as far as it can be, with the faulty values left out, so that
    later checks add their problems to the same message. Whoever gets problems must raise them.

    Args:
        model: The kind of document.
        document: What the YAML says.
        unknown_key: Words the problem of a key that ``model`` does not have.
        placeholders: Values that stand in for faulty or missing required keys.

    Returns:
        The (partial) document, or None where not even that can be read, and the problems in order.
    """
    try:
        return model.model_validate(document), []
    except ValidationError as error:
        problems = sentences(error, document, unknown_key)
        remaining: Any = copy.deepcopy(dict(document))
        for path in _paths(error, document):
            remaining = _without(remaining, path)
        for key, value in placeholders.items():
            remaining.setdefault(key, value)
        try:
            return model.model_validate(remaining, context={PARTIAL: True}), problems
        except ValidationError as again:
            faulty = {path[0] for path in _paths(again, remaining) if path}
            kept = {key: value for key, value in remaining.items() if key not in faulty}
            try:
                return model.model_validate({**placeholders, **kept}, context={PARTIAL: True}), problems
            except ValidationError:
                return None, problems


def sentences(error: ValidationError, document: Mapping[str, Any], unknown_key: UnknownKey) -> list[str]:
    """Return one sentence for every faulty place of ``document``."""
    expected: dict[Path, list[str]] = {}
    lines: dict[Path, str] = {}
    for detail in error.errors(include_url=False):
        kind, context = detail["type"], detail.get("ctx", {})
        path = _real_path(detail["loc"], document, missing=kind == "missing")
        found = detail["input"]
        if kind == "extra_forbidden":
            lines[path] = unknown_key(path, found)
        elif kind == "missing":
            lines[path] = f"{dotted(path)}: missing, and required"
        elif kind == "value_error":
            message = str(context["error"])
            lines[path] = f"{dotted(path)}: {message}" if path else message
        elif kind == "literal_error":
            expected.setdefault(path, []).append(context["expected"].replace("'", ""))
            lines[path] = _expected_found(path, expected[path], found)
        else:
            words = _EXPECTED[kind].format(**context) if kind in _EXPECTED else detail["msg"]
            if words not in expected.setdefault(path, []):
                expected[path].append(words)
            lines[path] = _expected_found(path, expected[path], found)
    return list(lines.values())


def _expected_found(path: Path, expected: Sequence[str], found: Any) -> str:
    names = [name for words in expected for name in words.replace(" or ", ", ").split(", ")]
    hint = did_you_mean(found, names) if isinstance(found, str) else ""
    return f"{dotted(path)}: expected {' or '.join(expected)}, found {shown(found)}{hint}"


def dotted(path: Path) -> str:
    """Return a path as ``--set`` takes it: ``merges.0.parameters.density``."""
    return ".".join(str(part) for part in path)


def shown(value: Any) -> str:
    """Return a value as a person would write it in YAML, cut to a readable length."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean `density`?)`` for a near name, else nothing."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean `{near[0]}`?)" if near and near[0] != name else ""


def _real_path(location: tuple[str | int, ...], document: Any, *, missing: bool) -> Path:
    """Drop the parts of a pydantic location that name alternatives of a union, not keys of the document."""
    path: list[str | int] = []
    place = document
    for position, part in enumerate(location):
        keys = place if isinstance(place, Mapping) else range(len(place) if isinstance(place, list) else 0)
        if part in keys:
            place = place[part]
        elif not (missing and position == len(location) - 1):
            continue
        path.append(part)
    return tuple(path)


def _paths(error: ValidationError, document: Mapping[str, Any]) -> list[Path]:
    return [_real_path(detail["loc"], document, missing=False) for detail in error.errors(include_url=False)]


def _without(value: Any, path: Path) -> Any:
    """Return ``value`` without the key at ``path``; a faulty entry of a list takes the whole list with it."""
    if isinstance(value, list) and path:
        return [_without(item, path[1:]) if index == path[0] else item for index, item in enumerate(value)]
    if not path or not isinstance(value, dict) or path[0] not in value:
        return value
    inner, rest = value[path[0]], path[1:]
    if not rest or (isinstance(inner, list) and len(rest) == 1):
        return {key: item for key, item in value.items() if key != path[0]}
    return {**value, path[0]: _without(inner, rest)}
