"""Read a task's YAML without running anything: its resolved values, and which Python it would call.

``!function`` tags become ``Reference``s. lm-eval's own loader imports them, which for some tasks fetches from the hub
and for a folder of the user's runs the user's code.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mergelab.errors import RecipeError


@dataclass(frozen=True)
class Reference:
    """A function that a definition names, and the file that names it."""

    name: str
    path: Path


def read_definition(path: Path) -> dict[str, Any]:
    """Return what a task's YAML says, with everything it includes; its own keys win.

    Raises:
        RecipeError: A file is missing, not YAML, no mapping, or includes itself.
    """
    return _read(path.resolve(), (), [])


def definition_files(path: Path) -> list[Path]:
    """Return the YAML files that a definition consists of: itself, and everything that it includes.

    Raises:
        RecipeError: As for ``read_definition``.
    """
    files: list[Path] = []
    _read(path.resolve(), (), files)
    return list(dict.fromkeys(files))


def references(value: Any) -> list[Reference]:
    """Return every function that a definition names."""
    if isinstance(value, Reference):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [found for item in inner for found in references(item)]


def _read(path: Path, outer: tuple[Path, ...], files: list[Path]) -> dict[str, Any]:
    if path in outer:
        raise RecipeError(f"{path}: includes itself.")
    files.append(path)

    class Loader(yaml.SafeLoader):
        """Knows the tag of this one file."""

    Loader.add_constructor("!function", lambda loader, node: Reference(str(node.value), path))
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, ValueError) as error:
        raise RecipeError(f"{path}: not valid YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(content, dict):
        raise RecipeError(f"{path}: expected a mapping of keys (`task: ...`), found {type(content).__name__}.")
    included = content.pop("include", [])
    merged: dict[str, Any] = {}
    for name in included if isinstance(included, list) else [included]:
        merged |= _read((path.parent / str(name)).resolve(), (*outer, path), files)
    return merged | content
