"""`mergelab run` with methods of mergekit on the bench pair, as a user types it."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from mergelab.cli import main
from mergelab.config import load_pair
from mergelab.engine import by_mergekit
from mergelab.records import Run, read_run
from mergelab.sweeps.models import open_models
from merges.block import Block
from tests.merges.test_mergekit_methods import merge_methods

SETTINGS = ["--limit", "2", "--set", "controls=[]", "--device", "cpu"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("runs") / "mergekit"
    result = CliRunner().invoke(main, ["run", "mergekit", "--out", str(out), *SETTINGS])
    assert result.exit_code == 0, (result.output, result.exception)
    assert "mergekit:della lambda=0.5" in result.stdout and "mergekit:sce" in result.stdout
    return read_run(out)


def test_points_are_merged_measured_and_graded(finished: Run) -> None:
    merges = [point for point in finished.points if point.role == "merge"]
    assert [point.point["method"] for point in merges] == ["mergekit:della", "mergekit:della", "mergekit:sce"]
    assert len({point.point["weights_hash"] for point in merges}) == 3
    for point in merges:
        assert point.sink is not None and set(point.tasks) == {"bench_format", "bench_image"}
        assert point.merge is not None and point.merge["changed_share"]["ancestor"] > 0.4
        assert point.point["conventions"] == "mergekit" and point.point["zero_point"] == "ancestor"
    assert [point.point["seed"] for point in merges] == [0, 0, None]
    assert merges[0].merge is not None and "seeded by (seed, tensor name)" in merges[0].merge["random_stream"]
    assert merges[2].merge is not None and merges[2].merge["random_stream"] is None
    assert finished.experiment["versions"]["mergekit"] == "0.1.5"


@pytest.mark.parametrize(
    ("method", "values"), [("sce", {"select_topk": 0.5}), ("della", {"weight": 1, "density": 0.5})]
)
def test_written_merge_holds_the_values_of_mergekit(tmp_path: Path, method: str, values: dict[str, float]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"name: a\npair: bench\nmethod: mergekit:{method}\nparameters: {json.dumps(values)}\noutput_dtype: float32\n"
    )
    result = CliRunner().invoke(main, ["merge", str(recipe), "--out", str(tmp_path / "out"), "--as", "text"])
    assert result.exit_code == 0, (result.output, result.exception)
    pair = load_pair("bench")
    stored = {paired.name: paired.stored["vlm"] for paired in open_models(pair, lambda _: None).pairing.tensors}
    tensors = {role: load_file(Path(source.location) / "model.safetensors") for role, source in pair.sources.items()}
    written = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    torch.manual_seed(by_mergekit.draw_key(Block(name, "mlp", ("base", "vlm"))))
    expected = merge_methods.merge_tensors(
        [tensors["ancestor"][name].float(), tensors["base"][name].float(), tensors["vlm"][stored[name]].float()],
        method,
        parameters=values,
        base_index=0,
    )
    assert torch.equal(written[name], expected)


def test_same_command_finds_all_done(finished: Run) -> None:
    result = CliRunner().invoke(main, ["run", "mergekit", "--out", str(finished.folder), *SETTINGS])
    assert result.exit_code == 0 and "finished before" in result.stderr


def test_recipe_with_wrong_parameters_of_mergekit_is_refused_at_once(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "name: a\npair: bench\nmerges:\n"
        "  - {method: mergekit:della, parameters: {weights: 1, epsilon: 2}, sweep: {density: [0.5, 2]}}\n"
        "  - {method: mergekit:slerp, parameters: {t: 0.5}}\n"
        "  - {method: mergekit:tise}\n"
        "  - {method: della}\n"
        "select_topk: 0.3\n"
    )
    result = CliRunner().invoke(main, ["run", str(recipe)])
    assert result.exit_code == 3
    for words in (
        "merges.0.parameters.weights: mergekit:della has no such parameter; did you mean weight?",
        "merges.0.parameters.weight: missing",
        "merges.0.parameters.epsilon: expected in [0, 0.5), found 2",
        "merges.0.sweep.density: expected in (0, 1], found 2",
        "merges.1.method: mergekit:slerp takes exactly 2 models, found 3",
        "merges.2.method: mergekit 0.1.5 has no 'tise' (did you mean `mergekit:ties`?)",
        '"della" is not a merge method (did you mean `mergekit:della`?)',
        "select_topk: a parameter (of mergekit:sce); write parameters: {select_topk: 0.3}",
    ):
        assert words in result.stderr
