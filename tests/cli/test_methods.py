"""`mergelab methods` lists what a recipe can ask for, and recipes that ask for mergekit are checked without it."""

import json
import subprocess
import sys

from click.testing import CliRunner

from mergelab.cli import main
from merges.mergekit_methods import MERGEKIT
from merges.parameters import PARAMETERS


def test_ours_and_those_of_mergekit_are_listed_with_parameters() -> None:
    result = CliRunner().invoke(main, ["methods", "--json"])
    assert result.exit_code == 0
    listed = {entry["method"]: entry for entry in json.loads(result.stdout)}
    assert list(listed) == [*PARAMETERS, *(f"mergekit:{name}" for name in MERGEKIT)]
    weight = listed["mergekit:della"]["parameters"][0]
    assert (weight["name"], weight["type"], weight["default"]) == ("weight", "number per model", "required")
    assert listed["mergekit:della"]["draws"] is True and listed["mergekit:sce"]["draws"] is False
    assert listed["mergekit:slerp"]["zero_points"] == ["base"]
    assert listed["mergekit:model_stock"]["zero_points"] == ["ancestor"]
    assert listed["mergekit:ties"]["zero_points"] == ["ancestor", "base"]
    assert listed["ties"]["zero_points"] is None


def test_table_names_all_and_what_zero_point_they_need() -> None:
    lines = CliRunner().invoke(main, ["methods"]).stdout.splitlines()
    for name in (*PARAMETERS, *(f"mergekit:{name}" for name in MERGEKIT)):
        assert any(line.startswith(f"{name}: ") for line in lines), name
    (stock,) = [line for line in lines if line.startswith("mergekit:model_stock: ")]
    assert stock.endswith("zero point ancestor only")
    assert max(map(len, lines)) <= 100


def test_recipe_of_mergekit_is_checked_without_torch_and_without_mergekit() -> None:
    script = (
        "import sys\nfrom mergelab.config import announcements, load_experiment\n"
        "experiment = load_experiment('mergekit')\nannouncements(experiment.recipe, experiment.pair)\n"
        "print([m for m in ('torch', 'mergekit', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
