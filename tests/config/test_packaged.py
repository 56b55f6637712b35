import subprocess
import sys

import pytest

from mergelab.config import (
    configs_folder,
    grid_cells,
    list_pairs,
    list_recipes,
    load_experiment,
    load_pair,
    load_recipe,
    packaged,
    selected_cells,
    zero_point_of,
)
from mergelab.errors import MachineError

RECIPES = ("dare", "iso_c", "linear", "mergekit", "slerp", "star", "task_arithmetic", "ties", "tsv")
PAPER_PAIRS = {
    "qwen2.5-vl-7b",
    "qwen3-vl-8b",
    "internvl3.5-8b",
    "internvl3-8b",
    "llava-onevision-qwen2-7b",
    "molmo2-o-7b",
}


def test_shipped_files_are_the_ones_that_are_known():
    assert tuple(list_recipes()) == RECIPES
    assert set(list_pairs()) == {"bench", "smolvlm-256m"} | PAPER_PAIRS


def test_every_yaml_below_configs_is_a_recipe_or_a_pair():
    found = set(configs_folder().rglob("*.y*ml"))
    assert found == {*list_recipes().values(), *list_pairs().values()}


@pytest.mark.parametrize("name", RECIPES)
def test_shipped_recipe_is_valid_on_the_bench_pair_with_a_point_and_a_grid(name):
    experiment = load_experiment(name)
    assert (experiment.recipe.name, experiment.pair.name) == (name, "bench")
    zero_point = zero_point_of(experiment.recipe, experiment.pair)
    cells, problems = grid_cells(experiment.recipe, zero_point)
    assert problems == []
    assert len(cells) >= 3
    assert len(selected_cells(experiment.recipe, zero_point)) == len(experiment.recipe.entries)


@pytest.mark.parametrize("name", sorted(set(RECIPES) - {"linear", "slerp"}))
def test_shipped_grids_of_task_vectors_contain_lambda_one_half(name):
    experiment = load_experiment(name)
    cells, _ = grid_cells(experiment.recipe, "ancestor")
    for method in {cell.method for cell in cells if "lambda" in cell.canonical}:
        assert 0.5 in {cell.canonical["lambda"] for cell in cells if cell.method == method}


def test_linear_recipe_walks_from_base_to_vlm():
    cells, _ = grid_cells(load_recipe("linear"), "ancestor")
    assert [cell.canonical["weights"]["vlm"] for cell in cells] == [0.25, 0.5, 0.7, 0.8, 0.9]


@pytest.mark.parametrize("recipe", ("linear", "task_arithmetic", "ties", "dare"))
@pytest.mark.parametrize("pair", sorted(PAPER_PAIRS | {"smolvlm-256m"}))
def test_shipped_recipes_run_on_every_shipped_pair(recipe, pair):
    assert load_experiment(recipe, {"pair": pair}).pair.name == pair


@pytest.mark.parametrize("name", sorted(PAPER_PAIRS | {"smolvlm-256m", "bench"}))
def test_shipped_pair_carries_the_name_of_its_file(name):
    pair = load_pair(name)
    assert pair.name == name
    assert pair.protocol == ("bench-v1" if name == "bench" else "paper-instruct-v1")
    assert all(source.id.count("/") == 1 for source in pair.sources.values() if not source.is_folder)


@pytest.mark.parametrize("path", [*list_recipes().values(), *list_pairs().values()], ids=lambda path: path.name)
def test_shipped_file_begins_with_purpose_hardware_and_expectation(path):
    comments = [line for line in path.read_text().split("\n") if line.startswith("#")]
    header = "\n".join(comments)
    assert path.read_text().startswith("# ")
    assert "Hardware:" in header
    assert "Expect" in header


def test_readme_has_a_line_for_every_file():
    readme = (configs_folder() / "README.md").read_text()
    assert [path.name for path in (*list_recipes().values(), *list_pairs().values()) if path.name not in readme] == []


def test_configs_inside_the_package_come_first(tmp_path, monkeypatch):
    package = tmp_path / "mergelab"
    (package / "configs" / "pairs").mkdir(parents=True)
    monkeypatch.setattr(packaged, "package_folder", lambda: package)
    assert configs_folder() == package / "configs"


def test_incomplete_installation_says_where_it_looked(tmp_path, monkeypatch):
    monkeypatch.setattr(packaged, "package_folder", lambda: tmp_path / "mergelab")
    with pytest.raises(MachineError, match=f"looked for {tmp_path}/mergelab/configs and {tmp_path}/configs"):
        configs_folder()


WITHOUT = """
import sys
from mergelab.config import load_experiment, list_recipes
from mergelab.sweeps.grid import expand
from mergelab.sweeps.identity import point_id
for name in list_recipes():
    experiment = load_experiment(name)
    expand(experiment.recipe, experiment.pair)
{extra}
print(sorted({{"torch", "transformers", "lm_eval", "numpy"}} & set(sys.modules)))
"""


@pytest.mark.parametrize(("extra", "loaded"), [("", "[]"), ("import numpy", "['numpy']")], ids=["rooms", "control"])
def test_reading_recipes_loads_nothing_heavy(extra, loaded):
    program = WITHOUT.format(extra=extra)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == loaded
