"""Help is quick, complete, and loads no torch; the check is seen to be able to fail."""

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from mergelab.cli import main


def commands(group: click.Group, prefix: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], click.Command]]:
    found: list[tuple[tuple[str, ...], click.Command]] = [(prefix, group)]
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            found += commands(command, (*prefix, name))
        else:
            found.append(((*prefix, name), command))
    return found


ALL = commands(main)
IDS = [" ".join(("mergelab", *path)) for path, _ in ALL]


@pytest.mark.parametrize(("path", "command"), ALL, ids=IDS)
def test_every_command_has_help_with_an_example(path: tuple[str, ...], command: click.Command) -> None:
    result = CliRunner().invoke(main, [*path, "--help"])
    assert result.exit_code == 0
    assert command.help, "a command without a docstring"
    assert "mergelab " in (command.help or ""), "help shows a command line to copy"
    for parameter in command.params:
        assert not isinstance(parameter, click.Option) or parameter.help, f"--{parameter.name} says nothing"


def loaded(code: str) -> str:
    script = f"import sys\n{code}\nprint([m for m in ('torch', 'transformers', 'lm_eval') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        *([*path, "--help"] for path, _ in ALL if path),
        ["methods"],
        ["pairs"],
        ["screen"],
        ["screen", "--verify"],
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_no_heavy_library_is_loaded_for(arguments: list[str]) -> None:
    code = f"from mergelab.cli import main\nmain({arguments!r}, standalone_mode=False)"
    assert loaded(code) == "[]"


def test_the_check_for_heavy_libraries_can_fail() -> None:
    assert "torch" in loaded("import mergelab.engine.stream")
