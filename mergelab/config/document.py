"""Reading a YAML file of ours into a plain mapping, and what all blocks of such a file have in common."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict

from mergelab.errors import RecipeError, problem_list


class Document(BaseModel):
    """How every block of our YAML behaves: unknown keys refused, nothing converted, nothing changed later."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class _StrictLoader(yaml.SafeLoader):
    """The safe loader, without its two traps: keys written twice, and ``1e-3`` read as text."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.problems: list[str] = []

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping, noting keys that occur twice or are not text."""
        first_line: dict[str, int] = {}
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            if key_node.tag != "tag:yaml.org,2002:str":
                self.problems.append(f"line {line}: the key `{_written(key_node)}` is not text; put it in quotes")
            elif key_node.value in first_line:
                earlier = first_line[key_node.value]
                self.problems.append(f"line {line}: `{key_node.value}` was already given in line {earlier}; keep one")
            else:
                first_line[key_node.value] = line
        return super().construct_mapping(node, deep=deep)


def _written(node: yaml.Node) -> str:
    return str(node.value) if isinstance(node, yaml.ScalarNode) else "[...]"


# PyYAML follows YAML 1.1, where a float needs a dot; people, and Python's own JSON, write 1e-05.
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_document(path: Path) -> dict[str, Any]:
    """Return the mapping that the YAML (or JSON) file at ``path`` holds.

    Raises:
        RecipeError: The file is missing, not text, not YAML, empty, no mapping, or says a key twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecipeError(f"{path}: no such file.") from None
    except IsADirectoryError:
        raise RecipeError(f"{path}: is a folder; a YAML file was expected.") from None
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: is not UTF-8 text (byte {error.start}); a YAML file was expected.") from None
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}.") from None
    value = _load(text, str(path))
    if value is None:
        raise RecipeError(f"{path}: is empty; a mapping of keys was expected.")
    if not isinstance(value, dict):
        raise RecipeError(f"{path}: holds {_kind(value)}; a mapping of keys (`name: ...`) was expected.")
    return value


def parse_value(text: str, where: str) -> Any:
    """Return ``text`` read as one YAML value, as ``--set KEY=VALUE`` needs it.

    Args:
        text: For example ``0.5``, ``[0.2, 0.5]``, ``{base: 0.3, vlm: 0.7}``, ``null``.
        where: Names the value in an error.

    Raises:
        RecipeError: ``text`` is not YAML, or says a key twice.
    """
    return _load(text, where)


def _load(text: str, where: str) -> Any:
    try:
        loader = _StrictLoader(text)
        try:
            value = loader.get_single_data()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "somewhere"
        raise RecipeError(f"{where}: {place}: not valid YAML: {error.problem or error.context}.") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{where}: not valid YAML: {' '.join(str(error).split())}.") from None
    except ValueError as error:  # a date or number that has the form of one and is none: 2024-13-01
        raise RecipeError(f"{where}: not valid YAML: {error}.") from None
    if loader.problems:
        raise RecipeError(problem_list(f"{where}:", loader.problems))
    return value


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return "a list"
    return "plain text" if isinstance(value, str) else f"the value {value!r}"
