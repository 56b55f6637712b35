"""`mergelab export-mergekit` and `import-mergekit` as a user types them, on the bench pair."""

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from mergelab.cli import main


def test_point_of_the_parameters_goes_to_stdout_and_differences_to_stderr() -> None:
    result = CliRunner().invoke(main, ["export-mergekit", "ties"])
    assert result.exit_code == 0, result.output
    document = yaml.safe_load(result.stdout)
    assert document["merge_method"] == "ties" and document["parameters"]["lambda"] == 1.0
    assert [entry.get("parameters") for entry in document["models"]] == [None, *[{"weight": 1.0, "density": 0.2}] * 2]
    told = [line for line in result.stderr.splitlines() if line.startswith("differs: ")]
    assert told and all(f"# {line}" in result.stdout for line in told)


def test_point_of_the_grid_by_its_id(tmp_path: Path) -> None:
    wrong = CliRunner().invoke(main, ["export-mergekit", "dare", "--point", "nothing"])
    assert wrong.exit_code == 3 and "no such point" in wrong.stderr
    line = next(line for line in wrong.stderr.splitlines() if "dare_linear drop_rate 0.5 lambda 0.5" in line)
    out = tmp_path / "point.yaml"
    result = CliRunner().invoke(main, ["export-mergekit", "dare", "--point", line.split()[0], "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{out}\n"
    document = yaml.safe_load(out.read_text())
    assert document["merge_method"] == "dare_linear"
    assert document["models"][1]["parameters"]["density"] == 0.5
    again = CliRunner().invoke(main, ["export-mergekit", "dare", "--point", line.split()[0], "--out", str(out)])
    assert again.exit_code == 8 and "is there already" in again.stderr


def test_several_merges_need_a_choice_and_tsv_has_no_counterpart() -> None:
    assert "Choose one with --point" in CliRunner().invoke(main, ["export-mergekit", "dare"]).stderr
    result = CliRunner().invoke(main, ["export-mergekit", "tsv"])
    assert result.exit_code == 3 and "mergekit 0.1.5 has nothing that computes it" in result.stderr


@pytest.mark.parametrize("recipe", ["ties", "linear", "task_arithmetic"])
def test_exported_point_comes_back_as_a_recipe_that_plans_to_the_same_weights(tmp_path: Path, recipe: str) -> None:
    theirs, ours = tmp_path / "theirs.yaml", tmp_path / "mine" / "ours.yaml"
    assert CliRunner().invoke(main, ["export-mergekit", recipe, "--out", str(theirs)]).exit_code == 0
    result = CliRunner().invoke(main, ["import-mergekit", str(theirs), "--out", str(ours)])
    assert result.exit_code == 0, result.output
    assert "note: roles: " in result.stderr
    plans = []
    for source in (recipe, str(ours)):
        plan = CliRunner().invoke(main, ["plan", source, "--set", "sweep=null", "--json"])
        assert plan.exit_code == 0, plan.output
        (point,) = [point for point in json.loads(plan.stdout)["points"] if point["role"] == "merge"]
        plans.append(point)
    for key, value in plans[0]["parameters"].items():
        if key not in ("elect", "zero_sum"):  # conventions: mergekit
            assert plans[1]["parameters"][key] == value
    assert plans[0]["method"] == plans[1]["method"] and plans[0]["zero_point"] == plans[1]["zero_point"]


def test_import_prints_both_documents(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text(
        "merge_method: della\nbase_model: a/base\nmodels:\n- model: b/one\n- model: c/two\n"
        "parameters: {weight: 0.5, density: 0.5}\ndtype: bfloat16\n"
    )
    result = CliRunner().invoke(main, ["import-mergekit", str(theirs), "--vlm", "b/one"])
    assert result.exit_code == 0, result.output
    recipe, pair = yaml.safe_load_all(result.stdout)
    assert recipe["method"] == "mergekit:della" and recipe["output_dtype"] == "bfloat16"
    assert pair == {"name": "theirs-pair", "ancestor": "a/base", "base": "c/two", "vlm": "b/one"}
    assert "mergekit computes in bfloat16 here, mergelab in float32" in result.stderr


def test_refusal_ends_with_the_code_of_an_invalid_recipe(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs.yaml"
    theirs.write_text("merge_method: ties\nslices:\n- sources: []\n")
    result = CliRunner().invoke(main, ["import-mergekit", str(theirs)])
    assert result.exit_code == 3 and "slices: layers put together" in result.stderr
    assert CliRunner().invoke(main, ["import-mergekit", str(tmp_path / "none.yaml")]).exit_code == 3
