"""The table of conventions says what the presets do."""

import json
from fnmatch import fnmatch
from itertools import product
from pathlib import Path

import pytest

from merges.conventions import PRESETS, Required
from merges.parameters import PARAMETERS, build, canonical, describe

TABLE = (
    (Path(__file__).parents[2] / "mergelab" / "CONVENTIONS.md").read_text("utf-8").split("## ")[1].split("\nRules ")[0]
)
COLUMNS = ("paper", "official", "mergekit", "peft")
VALUES = {"linear": {"normalize": True}, "ties": {"density": 0.3}, "dare_linear": {"drop_rate": 0.3}}
VALUES["dare_ties"] = VALUES["dare_linear"]


def rows() -> list[tuple[list[str], str, dict[str, str]]]:
    """Return method patterns, parameter and cells by convention of every line of the first table."""
    found = []
    for line in TABLE.splitlines():
        if line.startswith("| ") and not line.startswith(("| method", "|---")):
            name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            methods, _, rest = name.partition(":")
            parameter = rest.split("`")[1] if "`" in rest else ""
            found.append((methods.split(" (")[0].split(", "), parameter, dict(zip(COLUMNS, cells, strict=True))))
    return found


def cell(method: str, parameter: str, convention: str) -> str | None:
    for methods, name, cells in rows():
        if name == parameter and any(fnmatch(method, pattern) for pattern in methods):
            return cells[convention]
    return None


def text(value: object) -> str:
    if isinstance(value, Required):
        return "must be given"
    return value if isinstance(value, str) else json.dumps(value)


SET = [
    (convention, method, parameter)
    for convention, methods in PRESETS.items()
    for method, values in methods.items()
    for parameter in values
]


@pytest.mark.parametrize(("convention", "method", "parameter"), SET)
def test_what_a_preset_sets_stands_in_the_table(convention: str, method: str, parameter: str) -> None:
    found = cell(method, parameter, convention)
    assert found is not None and found.startswith(text(PRESETS[convention][method][parameter]))
    default = next(info.default for info in describe(method) if info.name == parameter)
    paper = cell(method, parameter, "paper")
    assert paper is not None and paper.startswith(text(default))


@pytest.mark.parametrize(("method", "convention"), list(product(PARAMETERS, COLUMNS)))
def test_the_table_says_which_methods_a_convention_lacks(method: str, convention: str) -> None:
    cells = [c[convention] for methods, _, c in rows() if any(fnmatch(method, pattern) for pattern in methods)]
    assert cells, f"{method} is not in the table"
    assert ("-" in cells) == (method not in PRESETS[convention])


@pytest.mark.parametrize(("convention", "methods"), PRESETS.items())
def test_every_parameter_that_was_used_is_canonical(convention: str, methods: dict[str, dict[str, object]]) -> None:
    for method, values in methods.items():
        found = canonical(build(method, VALUES.get(method, {}), ("base", "vlm"), convention))
        assert list(found) == [info.name for info in describe(method)]
        for name, value in {**values, **VALUES.get(method, {})}.items():
            assert found[name] == value
        assert json.loads(json.dumps(found)) == found
