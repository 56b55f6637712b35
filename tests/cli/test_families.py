"""`mergelab families` as typed: the list, one file, and what `check` says of a family."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from click.testing import CliRunner, Result

from mergelab.cli import main
from mergelab.towers.rules import find_family, parse_family, shipped_families
from tests.builders import hand_made
from tests.towers.stored import LAYOUTS, moved, plain


def typed(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_every_family_is_listed_with_how_far_it_was_checked() -> None:
    done = typed("families", "--json")
    assert done.exit_code == 0
    assert {one["family"] for one in json.loads(done.stdout)} == {family.family for family in shipped_families()}
    shown = typed("families").stdout
    assert "internlm2" in shown and "hand-made names" in shown


def test_rules_of_one_family_are_printed_so_that_they_can_be_read_again() -> None:
    done = typed("families", "molmo2")
    assert parse_family(yaml.safe_load(done.stdout), "stdout") == find_family("molmo2")
    assert json.loads(typed("families", "molmo2", "--json").stdout)["family"] == "molmo2"
    wrong = typed("families", "mollama")
    assert wrong.exit_code == 3
    assert "did you mean `mllama`?" in wrong.stderr


def test_check_names_the_family_its_notes_and_what_is_taken_apart(tmp_path: Path) -> None:
    layout = LAYOUTS["molmo2"]
    base = plain()
    hand_made(tmp_path / "base", base)
    hand_made(tmp_path / "vlm", layout.store(moved(base, 1)), config=layout.config)
    done = typed("check", "--base", tmp_path / "base", "--vlm", tmp_path / "vlm")
    assert done.exit_code == 0, done.output
    text = " ".join(done.stdout.split())
    assert "vlm: molmo2: the 128 rows of wte.new_embedding have no counterpart in base and are copied" in text
    assert "vlm: family molmo2 (checked: tiny class); 8 fused tensors are taken apart into 20 weights" in text
    record = json.loads(typed("check", "--base", tmp_path / "base", "--vlm", tmp_path / "vlm", "--json").stdout)
    assert record["models"]["vlm"]["family"] == "molmo2" and record["models"]["base"]["family"] is None
    assert record["models"]["vlm"]["taken_apart"] == {"tensors": 8, "weights": 20}
