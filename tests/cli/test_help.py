"""Help is quick, complete, and loads no torch; the check is seen to be able to fail."""

import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from mergelab.cli import main
from tests.builders import tiny_llama, tiny_llava


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


def test_a_vlm_is_written_without_transformers(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "base", seed=1)
    vlm = tiny_llava(tmp_path / "vlm", seed=2, start=base)
    arguments = ["merge", "configs/task_arithmetic.yaml", "--base", str(base), "--vlm", str(vlm)]
    arguments += ["--out", str(tmp_path / "out"), "--device", "cpu"]
    assert loaded(f"from mergelab.cli import main\nmain({arguments!r}, standalone_mode=False)") == "['torch']"
    assert (tmp_path / "out" / "config.json").exists()


def test_the_check_for_heavy_libraries_can_fail() -> None:
    assert "torch" in loaded("import mergelab.engine.stream")
