"""The README is true to the command line: every command stands in it, every line it shows can be typed."""

import re
import shlex
from pathlib import Path

import click
import pytest

from mergelab.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = ["README.md", "CONTRIBUTING.md", "configs/README.md"]


def command_lines() -> list[str]:
    """Return every line of a fenced or indented block that calls mergelab."""
    lines = []
    for name in DOCUMENTS:
        for block in re.findall(r"```(?:sh|bash|console)?\n(.*?)```", (ROOT / name).read_text("utf-8"), re.DOTALL):
            lines += [line.removeprefix("$ ") for line in block.splitlines()]
    parts = [part.strip() for line in lines for part in line.split("&&")]
    return sorted({part for part in parts if part.startswith("mergelab ")})


def test_readme_shows_command_lines() -> None:
    assert len(command_lines()) > 5, "the pattern finds them, or the next test would check nothing"


@pytest.mark.parametrize("line", command_lines())
def test_shown_command_line_parses(line: str) -> None:
    arguments = shlex.split(line.split(" > ")[0].split("  #")[0])[1:]
    command: click.Command = main
    context = click.Context(main, info_name="mergelab")
    while isinstance(command, click.Group) and arguments and not arguments[0].startswith("-"):
        name = arguments.pop(0)
        found = command.get_command(context, name)
        assert found is not None, f"{line}: no command {name}"
        command, context = found, click.Context(found, info_name=name, parent=context)
    if "--help" in arguments or "--version" in arguments:
        return
    command.parse_args(context, arguments)


@pytest.mark.parametrize("name", sorted(main.commands))
def test_every_command_stands_in_the_readme(name: str) -> None:
    assert f"mergelab {name}" in README


def test_command_that_does_not_exist_is_found_out() -> None:
    with pytest.raises(AssertionError, match="no command"):
        test_shown_command_line_parses("mergelab brew coffee")
    with pytest.raises(click.UsageError):
        test_shown_command_line_parses("mergelab run recipe.yaml --loudly")
