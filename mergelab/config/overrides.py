"""Changes from the command line (``--set``, ``--pair``, ``--limit``), made before a document is checked."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from mergelab.config.document import parse_value
from mergelab.config.pair import absolute, is_path
from mergelab.config.problems import shown
from mergelab.errors import RecipeError, UsageError, problem_list


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Return what ``--set KEY=VALUE`` options ask for, by dotted key.

    Args:
        settings: For example ``("sweep.lambda=[0.5, 1.0]", "evals.limit=100")``; the value is YAML.

    Raises:
        UsageError: An option without ``=`` or key, or a key given twice.
        RecipeError: A value that is not YAML.
    """
    values: dict[str, Any] = {}
    problems = []
    unreadable = []
    for setting in settings:
        key, equals, text = setting.partition("=")
        key = key.strip()
        if not equals or not all(key.split(".")):
            problems.append(f"{shown(setting)}: write KEY=VALUE, for example evals.limit=100")
        elif key in values:
            problems.append(f"{key}: given twice; keep one")
        else:
            try:
                values[key] = parse_value(text, f"--set {key}")
            except RecipeError as error:
                unreadable.append(str(error))
    if problems:
        raise UsageError(problem_list("--set:", problems))
    if unreadable:
        raise RecipeError("\n".join(unreadable))
    return values


def apply_overrides(document: Mapping[str, Any], overrides: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a copy of ``document`` with the overrides in it, and what stood in the way.

    A key that a recipe does not know is put in as it is: checking the document finds it, with the nearest
    name. Paths are relative to the current folder, where the command was typed, and become absolute.

    Args:
        document: What the YAML says.
        overrides: Values by dotted key; whole numbers index lists (``merges.0.parameters.density``).
    """
    changed: dict[str, Any] = copy.deepcopy(dict(document))
    problems = []
    for key, value in overrides.items():
        problem = _put(changed, key, _anchored(key, value))
        if problem:
            problems.append(problem)
    return changed, problems


def _put(document: dict[str, Any], key: str, value: Any) -> str | None:
    place: Any = document
    *parents, last = key.split(".")
    for depth, part in enumerate(parents):
        step: str | int = part
        if isinstance(place, list):
            if not part.isdecimal() or int(part) >= len(place):
                return _no_entry(key, parents[:depth], part, len(place))
            step = int(part)
        elif place.get(part) is None or (depth == 0 and part == "evals" and place[part] == "auto"):
            if key.split(".")[depth + 1].isdecimal():
                return f"--set {key}: the recipe has no list `{'.'.join(parents[: depth + 1])}`"
            place[part] = {}
        if not isinstance(place[step], (dict, list)):
            return f"--set {key}: {'.'.join(parents[: depth + 1])} is {shown(place[step])}, which has no keys"
        place = place[step]
    if isinstance(place, list):
        if not last.isdecimal() or int(last) >= len(place):
            return _no_entry(key, parents, last, len(place))
        place[int(last)] = value
    else:
        place[last] = value
    return None


def _no_entry(key: str, path: Sequence[str], part: str, length: int) -> str:
    return f"--set {key}: {'.'.join(path)} is a list of {length}, it has no entry {part} (the first is 0)"


def _anchored(key: str, value: Any) -> Any:
    if key == "pair" and isinstance(value, str) and is_path(value):
        return str(absolute(value, None))
    if key == "sink.prompts" and isinstance(value, str) and is_path(value):
        return str(absolute(value, None))
    if (key in ("evals.data", "evals.task_folder") or key.startswith("evals.data.")) and isinstance(value, str):
        return str(absolute(value, None))
    if key in ("evals", "sink") and isinstance(value, dict):
        return {inner: _anchored(f"{key}.{inner}", item) for inner, item in value.items()}
    if key == "evals.data" and isinstance(value, dict):
        return {task: _anchored(f"evals.data.{task}", path) for task, path in value.items()}
    return value
