"""Points to mergekit's YAML and back: read by mergekit's own classes, compared by the values they merge to."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mergelab.config import Cell, Pair, Source, grid_cells, load_experiment, zero_point_of
from mergelab.config.mergekit_export import MergekitPoint, export_point
from mergelab.config.mergekit_import import import_mergekit
from mergelab.engine.by_mergekit import draw_key, merge_by_mergekit
from mergelab.errors import RecipeError
from merges.block import Block
from merges.dare import dare_mask
from merges.mergekit_methods import MERGEKIT, ByMergekit
from merges.methods import merge
from tests.merges.inputs import normal
from tests.merges.test_mergekit_methods import merge_methods, wanted

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from mergekit.config import MergeConfiguration

MODELS = {role: normal((24, 16), position) for position, role in enumerate(("ancestor", "base", "vlm"))}
PAIR = Pair(
    name="mine",
    base=Source(id="me/base", revision="v1"),
    vlm=Source(id="/models/vlm"),
    ancestor=Source(id="me/ancestor"),
)
REFERENCES = {"me/base@v1": "base", "/models/vlm": "vlm", "me/ancestor": "ancestor"}


def cell_of(tmp_path: Path, text: str) -> Cell:
    path = tmp_path / "recipe.yaml"
    path.write_text(f"name: a\npair: bench\n{text}")
    experiment = load_experiment(path)
    (cell,) = grid_cells(experiment.recipe, zero_point_of(experiment.recipe, experiment.pair))[0]
    return cell


def exported(cell: Cell, output_dtype: str = "float32") -> MergekitPoint:
    return export_point(PAIR, cell.method, cell.canonical, cell.zero_point, output_dtype)


def merged(cell: Cell) -> torch.Tensor:
    block = Block("w", "mlp", cell.vectors)
    zero = MODELS[cell.zero_point] if cell.zero_point else None
    models = [MODELS[role] for role in cell.vectors]
    if isinstance(cell.parameters, ByMergekit):
        return merge_by_mergekit(zero, models, cell.parameters, block)
    return merge(zero, models, cell.parameters, block)


def by_mergekit(text: str) -> torch.Tensor:
    """Merge what the YAML says, read by mergekit's own class, with its rule for where a parameter is looked up."""
    config = MergeConfiguration.model_validate(yaml.safe_load(text))
    assert config.models is not None and config.dtype == "float32"
    entries = {str(entry.model): entry.parameters or {} for entry in config.models}
    if config.base_model is not None:  # mergekit reads it also where it is not among the models
        entries.setdefault(str(config.base_model), {})
    names = list(entries)
    base = names.index(str(config.base_model)) if config.base_model is not None else None
    method = merge_methods.get(config.merge_method)
    top = config.parameters or {}
    parameters: dict[str, Any] = {}
    for spec in method.spec.parameters:
        if spec.scope.value == "shared":
            if spec.name in top:
                parameters[spec.name] = top[spec.name]
            continue
        values = {
            name: own.get(spec.name, top.get(spec.name))
            for name, own in entries.items()
            if spec.scope.value == "input" or names.index(name) != base
        }
        if any(value is not None for value in values.values()):
            parameters[spec.name] = values
    read = {slot.name for slot in MERGEKIT[config.merge_method].slots}
    assert set(top) <= read, "mergekit would leave it out silently"
    torch.manual_seed(draw_key(Block("w", "mlp", ())))
    result: torch.Tensor = merge_methods.merge_tensors(
        [MODELS[REFERENCES[name]] for name in names], method, parameters=parameters, ids=names, base_index=base
    )
    return result


AGREE = {
    "linear": "method: linear\nparameters: {weights: {base: 0.3, vlm: 0.7}}\n",
    "linear-normalized": "method: linear\nparameters: {weights: {base: 1, vlm: 3}, normalize: true}\n",
    "task_arithmetic": "method: task_arithmetic\nparameters: {weights: {base: 0.5, vlm: -1.5}, lambda: 0.7}\n",
    "task_arithmetic-base": "zero_point: base\nmethod: task_arithmetic\nparameters: {lambda: 0.7}\n",
    "ties-mergekit": "conventions: mergekit\nmethod: ties\nparameters: {density: 1.0, weights: {base: 1, vlm: 0.3}}\n",
    "ties-none": "conventions: mergekit\nmethod: ties\nparameters: {density: 1.0, divisor: none, lambda: 0.4}\n",
    "ties-count": "conventions: mergekit\nmethod: ties\n"
    "parameters: {density: 1.0, divisor: count, weights: {base: 0.5, vlm: 0.5}, lambda: 0.8}\n",
    "ties-base": "zero_point: base\nmethod: ties\nparameters: {density: 1.0, lambda: 0.6}\n",
    "dare-of-nothing": "method: dare_linear\nparameters: {drop_rate: 0.0, lambda: 0.3}\n",
}
TRIMMED = {
    "ties": "method: ties\nparameters: {density: 0.3, lambda: 0.7}\n",
    "ties-mergekit": "conventions: mergekit\nmethod: ties\n"
    "parameters: {density: 0.3, weights: {base: 1.6, vlm: 0.2}}\n",
    "ties-base": "zero_point: base\nmethod: ties\nparameters: {density: 0.3, lambda: 0.7}\n",
}


@pytest.mark.parametrize("name", AGREE)
def test_where_semantics_agree_mergekit_makes_the_same_and_no_difference_is_named(tmp_path: Path, name: str) -> None:
    cell = cell_of(tmp_path, AGREE[name])
    point = exported(cell)
    assert point.differences == ()
    text = point.text("heading")
    assert "# differs: nowhere beyond rounding." in text
    torch.testing.assert_close(by_mergekit(text), merged(cell), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", TRIMMED)
def test_trimming_differs_at_equal_magnitudes_alone(tmp_path: Path, name: str) -> None:
    cell = cell_of(tmp_path, TRIMMED[name])
    point = exported(cell)
    assert any(line.startswith("equal magnitudes") for line in point.differences)
    torch.testing.assert_close(by_mergekit(point.text("")), merged(cell), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("method: ties\nparameters: {density: 1.0, weights: {base: 2, vlm: 1}}\n", "that of the raw sum"),
        ("conventions: peft\nmethod: ties\nparameters: {density: 1.0, elect: count}\n", "that of the majority"),
        (
            "conventions: mergekit\nmethod: ties\n"
            "parameters: {density: 1.0, divisor: count, weights: {base: 2, vlm: 1}}\n",
            "divides by the weights of the agreeing vectors",
        ),
        ("method: dare_linear\nparameters: {drop_rate: 0.5, lambda: 1}\n", "back to its L1 norm"),
        ("method: task_arithmetic\nparameters: {lambda: 1, exclude: [mlp]}\n", "leaves mlp as the vlm's"),
        ("method: dare_ties\nparameters: {drop_rate: 0.5, lambda: 1, rescale: none}\n", "one global stream"),
    ],
)
def test_named_difference_is_one(tmp_path: Path, text: str, words: str) -> None:
    cell = cell_of(tmp_path, text)
    point = exported(cell)
    assert any(words in line for line in point.differences), point.differences
    assert f"# differs: {point.differences[0]}" in point.text("")
    assert float((by_mergekit(point.text("")) - merged(cell)).abs().max()) > 1e-3


def test_zero_sum_is_a_difference_where_entries_cancel(tmp_path: Path) -> None:
    point = exported(cell_of(tmp_path, "method: ties\nparameters: {density: 1.0}\n"))
    assert point.differences == (
        "ties of signs: where kept entries cancel to exactly 0 mergekit elects plus, mergelab here nothing.",
    )


def test_dare_with_conventions_of_mergekit_differs_in_the_masks_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = cell_of(tmp_path, "conventions: mergekit\nmethod: dare_linear\nparameters: {drop_rate: 0.4, lambda: 0.7}\n")
    point = exported(cell)
    assert len(point.differences) == 1 and point.differences[0].startswith("random choices")
    masks = iter(
        [dare_mask(role, 0.4, Block("w", "mlp", cell.vectors), MODELS["vlm"]).float() for role in cell.vectors]
    )
    monkeypatch.setattr(torch, "bernoulli", lambda _: next(masks))
    torch.testing.assert_close(by_mergekit(point.text("")), merged(cell), rtol=1e-5, atol=1e-5)


def methods_of_mergekit() -> list[str]:
    return sorted(name for name in MERGEKIT if name != "passthrough")


def mergekit_text(name: str) -> str:
    zero = "zero_point: base\n" if MERGEKIT[name].max_inputs == 2 else ""
    values = wanted(name) | ({"density": 0.6} if name.startswith("della") else {})
    return f"{zero}method: mergekit:{name}\nparameters: {values}\n"


@pytest.mark.parametrize("name", methods_of_mergekit())
def test_every_method_of_mergekit_goes_out_and_comes_back(tmp_path: Path, name: str) -> None:
    cell = cell_of(tmp_path, mergekit_text(name))
    text = exported(cell).text("")
    assert torch.equal(by_mergekit(text), merged(cell)), "the draws are set to the same state"
    back = imported_cell(tmp_path, text)
    if back.method == cell.method:
        assert torch.equal(merged(back), merged(cell))
    else:
        assert back.method == name, "one of ours that computes the same"
        torch.testing.assert_close(merged(back), merged(cell), rtol=1e-5, atol=1e-5)


def imported_cell(tmp_path: Path, text: str) -> Cell:
    path = tmp_path / "theirs.yaml"
    path.write_text(text)
    imported = import_mergekit(path)
    (tmp_path / "pairs").mkdir(exist_ok=True)
    (tmp_path / "pairs" / f"{imported.pair['name']}.yaml").write_text(imported.pair_text())
    recipe = tmp_path / "imported.yaml"
    recipe.write_text(imported.recipe_text())
    experiment = load_experiment(recipe)
    assert {role: source.location for role, source in experiment.pair.sources.items()}["vlm"] == "/models/vlm"
    assert experiment.pair.base == PAIR.base
    (cell,) = grid_cells(experiment.recipe, zero_point_of(experiment.recipe, experiment.pair))[0]
    return cell


@pytest.mark.parametrize("name", [*AGREE, *(f"trimmed {name}" for name in TRIMMED)])
def test_round_trip_keeps_the_values(tmp_path: Path, name: str) -> None:
    cell = cell_of(tmp_path, TRIMMED[name.split()[1]] if " " in name else AGREE[name])
    back = imported_cell(tmp_path, exported(cell).text(""))
    assert back.method == cell.method
    torch.testing.assert_close(merged(back), merged(cell), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("method", ["tsv", "copy", "gaussian"])
def test_what_mergekit_lacks_is_not_exported(method: str) -> None:
    with pytest.raises(RecipeError, match=f"{method}: mergekit 0.1.5 has nothing that computes it"):
        export_point(PAIR, method, {}, "ancestor", "auto")


def test_model_that_mergekit_would_misread_is_refused() -> None:
    pair = PAIR.model_copy(update={"vlm": Source(id="/models/vlm+lora")})
    with pytest.raises(RecipeError, match=r"vlm: /models/vlm\+lora holds @ or \+"):
        export_point(pair, "mergekit:sce", {"select_topk": 1.0, "int8_mask": False}, "ancestor", "auto")


THEIRS: dict[str, Any] = {
    "merge_method": "ties",
    "base_model": "me/ancestor",
    "models": [
        {"model": "me/base@v1", "parameters": {"weight": 1.0, "density": 0.5}},
        {"model": "/models/vlm", "parameters": {"weight": 0.5, "density": 0.5}},
    ],
    "parameters": {"lambda": 0.7},
    "dtype": "float32",
}


def imported(tmp_path: Path, document: Mapping[str, Any], vlm: str | None = None) -> Any:
    path = tmp_path / "theirs.yaml"
    path.write_text(yaml.safe_dump(dict(document)))
    return import_mergekit(path, vlm)


def test_usual_file_becomes_ours_with_conventions_of_mergekit(tmp_path: Path) -> None:
    result = imported(tmp_path, THEIRS)
    assert result.recipe == {
        "name": "theirs",
        "pair": "theirs-pair",
        "zero_point": "ancestor",
        "conventions": "mergekit",
        "method": "ties",
        "parameters": {"weights": {"base": 1.0, "vlm": 0.5}, "lambda": 0.7, "density": 0.5, "divisor": "weights"},
        "output_dtype": "float32",
    }
    assert result.pair == {
        "name": "theirs-pair",
        "ancestor": "me/ancestor",
        "base": {"id": "me/base", "revision": "v1"},
        "vlm": "/models/vlm",
    }


def test_which_model_is_the_vlm_can_be_said(tmp_path: Path) -> None:
    result = imported(tmp_path, THEIRS, vlm="me/base@v1")
    assert result.pair["base"] == "/models/vlm"
    assert result.recipe["parameters"]["weights"] == {"base": 0.5, "vlm": 1.0}
    with pytest.raises(RecipeError, match="--vlm other: not among the merged models"):
        imported(tmp_path, THEIRS, vlm="other")


@pytest.mark.parametrize(
    "change",
    [
        {"models": [THEIRS["models"][0], {"model": "/models/vlm", "parameters": {"weight": 1, "density": 0.2}}]},
        {"parameters": {"rescale": True}},
        {"models": [THEIRS["models"][0], {"model": "/models/vlm", "parameters": {"weight": -0.5, "density": 0.5}}]},
        {
            "merge_method": "task_arithmetic",
            "parameters": {"normalize": True, "density": 1.0, "weight": 1},
            "models": [{"model": "me/base@v1"}, {"model": "/models/vlm"}],
        },
    ],
)
def test_what_ours_cannot_say_stays_a_method_of_mergekit(tmp_path: Path, change: dict[str, Any]) -> None:
    document = {**THEIRS, **change}
    result = imported(tmp_path, document)
    assert result.recipe["method"] == f"mergekit:{document['merge_method']}"
    cell = imported_cell(tmp_path, yaml.safe_dump(document))
    assert torch.equal(merged(cell), by_mergekit(yaml.safe_dump(document)))


def test_base_model_among_the_models_and_values_for_all(tmp_path: Path) -> None:
    document = {
        **THEIRS,
        "models": [{"model": "me/ancestor"}, {"model": "me/base@v1"}, {"model": "/models/vlm"}],
        "parameters": {"weight": 0.5, "density": 0.4, "int8_mask": True},
        "dtype": None,
        "out_dtype": "bfloat16",
    }
    result = imported(tmp_path, document)
    assert result.recipe["parameters"]["weights"] == {"base": 0.5, "vlm": 0.5}
    assert result.recipe["output_dtype"] == "bfloat16"
    assert any("mergekit computes in that of the checkpoints here, mergelab in float32" in r for r in result.remarks)
    theirs = {**document, "parameters": {"weight": 0.5, "density": 0.4, "int8_mask": True}, "dtype": "float32"}
    cell = imported_cell(tmp_path, yaml.safe_dump(theirs))
    torch.testing.assert_close(merged(cell), by_mergekit(yaml.safe_dump(theirs)), rtol=1e-5, atol=1e-6)


def test_one_model_on_a_base_is_a_pair_without_ancestor(tmp_path: Path) -> None:
    document = {**THEIRS, "merge_method": "slerp", "base_model": "me/base@v1", "parameters": {"t": 0.4}}
    document["models"] = [{"model": "me/base@v1"}, {"model": "/models/vlm"}]
    cell = imported_cell(tmp_path, yaml.safe_dump(document))
    assert (cell.method, cell.vectors, cell.zero_point) == ("mergekit:slerp", ("vlm",), "base")
    assert torch.equal(merged(cell), by_mergekit(yaml.safe_dump(document)))


def model(**parameters: Any) -> dict[str, Any]:
    return {"model": "/models/vlm", "parameters": {"weight": 1, **parameters}}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"slices": [{"sources": []}]}, "slices: layers put together from several places"),
        ({"modules": {"text": {}}}, "modules: parts of a model merged in different ways"),
        ({"tokenizer_source": "union"}, "tokenizer_source: an output has the tokenizer of the vlm"),
        ({"tokenizer": {"source": "base"}}, "tokenizer: an output has the tokenizer"),
        ({"chat_template": "chatml"}, "chat_template: the template of an output"),
        (
            {"paramters": {"lambda": 1}},
            "paramters: mergekit has no such key and leaves it out (did you mean `parameters`?)",
        ),
        ({"merge_method": "tise"}, "merge_method: mergekit 0.1.5 has no 'tise' (did you mean `mergekit:ties`?)"),
        ({"merge_method": None}, "merge_method: missing"),
        ({"merge_method": "passthrough"}, "merge_method: passthrough takes one model"),
        ({"base_model": None}, "base_model: missing, and ties needs it"),
        ({"base_model": "me/ancestor+lora"}, "base_model: me/ancestor+lora puts a LoRA on a model"),
        ({"models": []}, "models: expected a list of models, found []"),
        ({"models": [model(density=[0.1, 0.9])]}, "models.0.parameters.density: a gradient over the layers"),
        (
            {"models": [model(density=[{"filter": "mlp", "value": 0.5}, 0.3])]},
            "models.0.parameters.density: values by filter on tensor names",
        ),
        ({"parameters": {"lambda": [0.1, 0.5]}}, "parameters.lambda: a gradient over the layers"),
        ({"models": [model(lambda_=1)]}, "models.0.parameters.lambda_: ties has no such parameter"),
        ({"models": [model(normalize=False)]}, "models.0.parameters.normalize: mergekit reads it only under the top"),
        ({"parameters": {"densty": 0.5}}, "parameters.densty: ties has no such parameter (did you mean `density`?)"),
        ({"models": [{"model": "/models/vlm"}]}, "weight: missing for /models/vlm, and mergekit needs it"),
        ({"models": [model(density="0.5")]}, "parameters.density: expected a number in (0, 1], found the text '0.5'"),
        ({"models": [{**model(), "layer_range": [0, 3]}]}, "models.0.layer_range: mergekit has no such key here"),
        ({"models": [model(), model()]}, "models.1.model: /models/vlm stands there twice"),
        (
            {"models": [{"model": "me/ancestor", "parameters": {"weight": 1}}, model()]},
            "models: the parameters of me/ancestor have no effect, since it is the base model",
        ),
        (
            {"models": [{"model": f"m{i}", "parameters": {"weight": 1}} for i in range(3)]},
            "models: expected 1 or 2 besides a base model, which make base and vlm of a pair, found 3",
        ),
        ({"dtype": "float64"}, 'dtype: expected float32, bfloat16, float16, found "float64"'),
        ({"merge_method": "model_stock", "models": [{"model": "x"}], "parameters": {}}, "takes at least 3 models"),
        (
            {"models": [{"model": "/models/vlm", "parameters": {"weight": 0.3}}]},
            "parameters.weight: the weight of a single vector cancels",
        ),
    ],
)
def test_what_cannot_be_expressed_is_refused(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    with pytest.raises(RecipeError) as caught:
        imported(tmp_path, {**THEIRS, **change})
    assert problem in str(caught.value)


def test_all_problems_are_said_at_once(tmp_path: Path) -> None:
    change = {"tokenizer_source": "base", "dtype": "int8", "parameters": {"lambda": [0, 1], "gama": 1}}
    with pytest.raises(RecipeError) as caught:
        imported(tmp_path, {**THEIRS, **change})
    for word in ("tokenizer_source:", "dtype:", "parameters.lambda:", "parameters.gama:"):
        assert word in str(caught.value)
