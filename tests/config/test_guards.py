"""What is known of a grid before it runs; every claim of equality is checked on the merged values."""

from typing import Any

import pytest
import torch

from mergelab.config import Cell, announcements, grid_cells, load_experiment, zero_point_of
from mergelab.config.guards import _factors, _outcome
from mergelab.engine.by_mergekit import merge_by_mergekit
from merges.block import Block
from merges.mergekit_methods import ByMergekit
from merges.methods import merge
from tests.merges.inputs import normal

MODELS = {role: normal((12, 8), position) for position, role in enumerate(("ancestor", "base", "vlm"))}


def said(tmp_path: Any, text: str) -> list[str]:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"name: a\npair: bench\n{text}")
    experiment = load_experiment(path)
    return announcements(experiment.recipe, experiment.pair)


def merged(cell: Cell, seed: int = 0) -> torch.Tensor:
    block = Block("w", "mlp", cell.vectors, seed)
    zero = MODELS[cell.zero_point] if cell.zero_point else None
    models = [MODELS[role] for role in cell.vectors]
    if isinstance(cell.parameters, ByMergekit):
        return merge_by_mergekit(zero, models, cell.parameters, block)
    return merge(zero, models, cell.parameters, block)


def cells_of(tmp_path: Any, text: str) -> tuple[Cell, ...]:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"name: a\npair: bench\n{text}")
    experiment = load_experiment(path)
    return grid_cells(experiment.recipe, zero_point_of(experiment.recipe, experiment.pair))[0]


def test_ordinary_grids_say_nothing(tmp_path: Any) -> None:
    assert said(tmp_path, "method: ties\nsweep: {density: [0.2, 0.5], lambda: [0.5, 1.0]}\n") == []
    assert said(tmp_path, "method: dare_linear\nsweep: {lambda: [0.5, 1.0]}\nseeds: [0, 1, 2]\n") == []
    assert said(tmp_path, "method: mergekit:sce\nsweep: {select_topk: [0.5, 1.0]}\n") == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "method: ties\nsweep: {weights: [{base: 1, vlm: 2}, {base: 0.5, vlm: 1}]}\n",
            'ties {"weights": {"base": 1, "vlm": 2}}, ties {"weights": {"base": 0.5, "vlm": 1}}; what tells them '
            "apart has no effect",
        ),
        (
            "method: mergekit:ties\nparameters: {density: 0.5}\nsweep: {weight: [1, 2]}\n",
            "what tells them apart has no effect",
        ),
        (
            "method: mergekit:della\nparameters: {weight: 1, density: 1.0}\nsweep: {epsilon: [0.1, 0.2]}\n",
            "what tells them apart has no effect",
        ),
        (
            "method: mergekit:sce\nsweep: {int8_mask: [false, true]}\n",
            "what tells them apart has no effect",
        ),
        (
            "merges: [{method: linear, parameters: {weights: {base: 0.5, vlm: 0.5}}}, "
            "{method: task_arithmetic, parameters: {lambda: 0.5}}]\n",
            "all are 0.5 base + 0.5 vlm",
        ),
        (
            "zero_point: base\nmerges: [{method: ties, parameters: {density: 1.0, lambda: 0.3}}, "
            "{method: dare_linear, parameters: {drop_rate: 0.0, lambda: 0.3}}, "
            "{method: mergekit:ties, parameters: {weight: 1, lambda: 0.3}}, "
            "{method: linear, parameters: {weights: {base: 0.7, vlm: 0.3}}}]\n",
            "all are 0.7 base + 0.3 vlm",
        ),
        (
            "method: ties\nparameters: {lambda: 0}\nsweep: {density: [0.2, 0.5]}\n",
            "all are 1 ancestor",
        ),
    ],
)
def test_equal_points_are_told_and_are_equal(tmp_path: Any, text: str, words: str) -> None:
    lines = said(tmp_path, text)
    assert any(line.startswith("the same weights up to rounding: ") and words in line for line in lines), lines
    cells = cells_of(tmp_path, text)
    for cell in cells[1:]:
        assert _outcome(cell) == _outcome(cells[0])
        torch.testing.assert_close(merged(cell), merged(cells[0]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "text",
    [
        "method: ties\nsweep: {weights: [{base: 1, vlm: 2}, {base: 2, vlm: 1}]}\n",
        "method: ties\nparameters: {divisor: none}\nsweep: {weights: [{base: 1, vlm: 2}, {base: 2, vlm: 4}]}\n",
        "method: mergekit:ties\nparameters: {normalize: false}\nsweep: {weight: [1, 2]}\n",
        "method: tsv\nsweep: {weights: [{base: 1, vlm: 2}, {base: 2, vlm: 4}]}\n",
        "method: ties\nsweep: {density: [0.5, 1.0]}\n",
        "method: task_arithmetic\nparameters: {lambda: 0.5}\nsweep: {exclude: [[], [mlp]]}\n",
        "method: tsv\nparameters: {lambda: 0}\nsweep: {exclude: [[], [mlp]]}\n",
        "method: mergekit:breadcrumbs\nparameters: {weight: 1, density: 0.5}\nsweep: {gamma: [0.05, 0.2]}\n",
        "merges: [{method: ties, parameters: {density: 1.0}}, {method: task_arithmetic}]\n",
    ],
)
def test_points_that_differ_are_not_called_equal(tmp_path: Any, text: str) -> None:
    assert not any(line.startswith("the same weights") for line in said(tmp_path, text))
    first, second = cells_of(tmp_path, text)
    assert float((merged(first) - merged(second)).abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("text", "line", "role"),
    [
        (
            "method: task_arithmetic\nsweep: {lambda: [0.0, 0.5]}\n",
            'no merge: task_arithmetic {"lambda": 0.0} is the zero point, ancestor itself.',
            "ancestor",
        ),
        (
            "method: linear\nparameters: {weights: {base: 0, vlm: 1}}\n",
            'no merge: linear {"weights": {"base": 0, "vlm": 1}} is vlm itself.',
            "vlm",
        ),
        (
            "zero_point: base\nmethod: task_arithmetic\nparameters: {lambda: 1}\n",
            'no merge: task_arithmetic {"lambda": 1} is vlm itself.',
            "vlm",
        ),
        (
            "method: mergekit:linear\nparameters: {weight: {base: 3, vlm: 0}}\n",
            'no merge: mergekit:linear {"weight": {"base": 3, "vlm": 0}} is base itself.',
            "base",
        ),
        (
            "zero_point: base\nmethod: mergekit:slerp\nsweep: {t: [0.5, 1.0]}\n",
            'no merge: mergekit:slerp {"t": 1.0} is vlm itself.',
            "vlm",
        ),
        (
            "zero_point: base\nmethod: mergekit:nearswap\nsweep: {t: [0.0, 1.0]}\n",
            'no merge: mergekit:nearswap {"t": 0.0} is the zero point, base itself.',
            "base",
        ),
        ("method: slerp\nsweep: {t: [0.0, 0.5]}\n", 'no merge: slerp {"t": 0.0} is base itself.', "base"),
        ("method: slerp\nsweep: {t: [0.5, 1.0]}\n", 'no merge: slerp {"t": 1.0} is vlm itself.', "vlm"),
        ("method: mergekit:passthrough\n", "no merge: mergekit:passthrough {} is vlm itself.", "vlm"),
    ],
)
def test_point_that_is_a_parent_is_told(tmp_path: Any, text: str, line: str, role: str) -> None:
    assert said(tmp_path, text) == [line]
    (cell,) = [cell for cell in cells_of(tmp_path, text) if _factors(cell) == {role: 1.0}]
    torch.testing.assert_close(merged(cell), MODELS[role], rtol=1e-6, atol=1e-6)


def test_zero_lambda_that_excludes_some_tensors_is_no_parent(tmp_path: Any) -> None:
    assert said(tmp_path, "method: task_arithmetic\nparameters: {lambda: 0, exclude: [mlp]}\n") == []


def test_weights_that_are_not_divided_by_their_sum_are_no_parent(tmp_path: Any) -> None:
    assert said(tmp_path, "method: mergekit:linear\nparameters: {weight: {base: 3, vlm: 0}, normalize: false}\n") == []


def test_thinning_that_thins_nothing_is_told(tmp_path: Any) -> None:
    assert said(tmp_path, "method: ties\nsweep: {density: [0.5, 1.0]}\n") == [
        'nothing is dropped: ties {"density": 1.0} only elects signs.'
    ]
    text = "method: {}\nparameters: {}\nseeds: [0, 1]\n"
    for method, values in (
        ("dare_linear", "{drop_rate: 0.0, lambda: 0.3}"),
        ("mergekit:della_linear", "{weight: 0.3, density: 1.0}"),
    ):
        (line,) = said(tmp_path, text.format(method, values))
        assert line.startswith(f"nothing is drawn: the 2 seeds of {method} ")
        (cell,) = cells_of(tmp_path, text.format(method, values))
        assert torch.equal(merged(cell, seed=0), merged(cell, seed=1))


@pytest.mark.parametrize("method", ["ties", "dare_ties"])
def test_weight_of_one_vector_that_is_divided_out_is_refused(tmp_path: Any, method: str) -> None:
    with pytest.raises(Exception, match="cancels"):
        said(tmp_path, f"zero_point: base\nmethod: {method}\nsweep: {{weights: [{{vlm: 0.5}}, {{vlm: 1}}]}}\n")
