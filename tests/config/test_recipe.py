import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from mergelab.config import Claims, Evals, Merge, Recipe, Sink, load_experiment, load_recipe, resolved
from mergelab.config.cells import MAX_CELLS
from mergelab.errors import RecipeError
from merges.parameters import ParameterErrors, build


def said(prefix, method, values, vectors=("base", "vlm"), conventions="paper"):
    """Return what the method itself says about its parameters, with the place in the recipe before it."""
    with pytest.raises(ParameterErrors) as caught:
        build(method, values, vectors, conventions)
    return [prefix + problem for problem in caught.value.problems]


GOOD = "name: a\npair: bench\nmethod: ties\n"

KNOWN = "dare_linear, dare_ties, iso_c, linear, slerp, star, task_arithmetic, ties, tsv"

BAD = {
    "top-level-parameters": (
        GOOD + "lambda: 0.5\ndensity: 0.2\nnormalize: true\n",
        [
            "lambda: a parameter (of dare_linear, dare_ties, iso_c, star, task_arithmetic, ties, tsv); write "
            "parameters: {lambda: 0.5}",
            "density: a parameter (of ties); write parameters: {density: 0.2}",
            "normalize: a parameter (of linear); write parameters: {normalize: true}",
        ],
    ),
    "swept-at-top": (
        GOOD + "density: [0.2, 0.5]\n",
        ["density: a parameter (of ties); write sweep: {density: [0.2, 0.5]}"],
    ),
    "other-block": (
        GOOD + "margin: 3\nlimit: 5\nlast_layers: 4\nevals: {alpha: 0.1, seeds: [0]}\n",
        [
            "evals.alpha: belongs under `claims:`; write claims: {alpha: 0.1}",
            "evals.seeds: belongs at the top level of the recipe, not under `evals:`",
            "margin: belongs under `claims:`; write claims: {margin: 3}",
            "limit: belongs under `evals:`; write evals: {limit: 5}",
            "last_layers: belongs under `sink:`; write sink: {last_layers: 4}",
        ],
    ),
    "pair-keys": (
        GOOD + "base: x\nancestor: y\n",
        [
            "base: a key of pairs, not of recipes; write it in a pair file and name that file with `pair:`",
            "ancestor: a key of pairs, not of recipes; write it in a pair file and name that file with `pair:`",
        ],
    ),
    "method-as-key": (GOOD + "linear: {}\n", ["linear: a method, not a key; write method: linear"]),
    "misspelt-keys": (
        "nam: a\npair: bench\nmethod: ties\nparamaters: {}\nevals: {limt: 3}\nsink: {qqq: 1}\n",
        [
            "name: missing, and required",
            "sink.qqq: unknown key; known are last_layers, prompts, dtype",
            "evals.limt: unknown key (did you mean `limit`?)",
            "nam: unknown key (did you mean `name`?)",
            "paramaters: unknown key (did you mean `parameters`?)",
        ],
    ),
    "values": (
        "name: a b\npair: bench\nmethod: ties\nzero_point: bas\noutput_dtype: bf16\nseeds: [0, "
        "true, 1.5, -1]\n"
        "controls: [endpoint]\nclaims: {margin: -1, alpha: yes}\nevals: {limit: 0, tasks: "
        "ifeval, batch_size: '8'}\n"
        "sink: {last_layers: some}\nkeep_weights: true\n",
        [
            'name: expected letters, digits, dots, dashes and underscores, the first a letter or digit, found "a b"',
            'zero_point: expected ancestor or base, found "bas" (did you mean `base`?)',
            "seeds.1: expected a whole number, found true",
            "seeds.2: expected a whole number, found 1.5",
            "seeds.3: expected at least 0, found -1",
            "controls.0: expected endpoints, gaussian or gaussian_per_merge, "
            'found "endpoint" (did you mean `endpoints`?)',
            'output_dtype: expected auto, float32, bfloat16 or float16, found "bf16" (did you mean `bfloat16`?)',
            "keep_weights: expected never or always, found true",
            'sink.last_layers: expected auto or a whole number, found "some"',
            'evals.tasks: expected auto or a list, found "ifeval"',
            "evals.limit: expected at least 1, found 0",
            'evals.batch_size: expected a whole number, found "8"',
            "claims.margin: expected a number above 0, found -1",
            "claims.alpha: expected a number, found true",
        ],
    ),
    "twice": (
        GOOD + "seeds: [1, 0, 1]\ncontrol_seeds: [2, 2]\nevals: {tasks: [a, b, a]}\n",
        [
            "seeds: 1 given twice; keep one",
            "control_seeds: 2 given twice; keep one",
            "evals.tasks: a given twice; keep one",
        ],
    ),
    "infinite": (
        GOOD + "claims: {margin: .nan, alpha: 0.6}\n",
        [
            "claims.margin: expected a finite number, found NaN",
            "claims.alpha: expected at most 0.5, found 0.6",
        ],
    ),
    "no-method": (
        "name: a\npair: bench\nevals: 3\n",
        [
            "evals: expected a mapping, found 3",
            "method: missing, and required (or a list under `merges`); `mergelab methods` lists them",
        ],
    ),
    "both-ways": (
        GOOD + "sweep: {density: [0.5]}\nmerges: [{method: tsv}]\n",
        ["merges: stands beside `method`, `sweep`; move these into an entry of `merges`, or drop `merges`"],
    ),
    "unknown-method": (
        "name: a\npair: bench\nmethod: tise\n",
        [f'method: "tise" is not a merge method (did you mean `ties`?); known are {KNOWN}'],
    ),
    "control-as-method": (
        "name: a\npair: bench\nmethod: gaussian\n",
        ["method: gaussian is a control, not a merge; write controls: [endpoints, gaussian]"],
    ),
    "sweep-form": (
        GOOD + "sweep: {density: 0.5, lambda: []}\n",
        [
            "sweep.density: expected a list, found 0.5",
            "sweep.lambda: expected a list of at least 1, found []",
        ],
    ),
    "cells": (
        GOOD + "parameters: {density: 0.2}\nsweep: {density: [0.2, 1.5], lambda: [1, yes]}\n",
        [
            *said("sweep.", "ties", {"lambda": True}),
            *said("sweep.", "ties", {"density": 1.5}),
        ],
    ),
    "same-point": (
        GOOD + "sweep: {density: [0.5, 0.50]}\n",
        ['ties {"density": 0.5}: makes the same point as ties {"density": 0.5}; keep one'],
    ),
    "same-point-by-default": (
        "name: a\npair: bench\nmerges: [{method: ties, parameters: {lambda: 1}}, {method: ties}]\n",
        ['merges.1.ties {}: makes the same point as merges.0.ties {"lambda": 1}; keep one'],
    ),
    "several-merges": (
        "name: a\npair: bench\nmerges:\n  - method: ties\n    parameters: {densty: 0.2}\n"
        "  - method: linear\n    parameters: {weights: {base: 0.5, vlm: 0.6}}\n    lambda: 2\n  "
        "- method: lineal\n",
        [
            "merges.1.lambda: a parameter (of dare_linear, dare_ties, iso_c, star, task_arithmetic, ties, tsv); "
            "write parameters: {lambda: 2}",
            f'merges.2.method: "lineal" is not a merge method (did you mean `linear`?); known are {KNOWN}',
            *said("merges.0.parameters.", "ties", {"densty": 0.2}),
            *said("merges.1.parameters.", "linear", {"weights": {"base": 0.5, "vlm": 0.6}}),
        ],
    ),
    "one-vector": (
        "name: a\npair: bench\nzero_point: base\nmethod: tsv\n",
        [
            *said("", "tsv", {}, vectors=("vlm",)),
        ],
    ),
    "conventions": (
        "name: a\npair: bench\nconventions: official\nmethod: slerp\n",
        [
            *said("", "slerp", {}, conventions="official"),
        ],
    ),
    "no-ancestor": (
        "name: a\npair: molmo2-o-7b\nzero_point: ancestor\nmethod: ties\n",
        [
            "zero_point: ancestor, but the pair molmo2-o-7b has no ancestor; name one in the pair, or write "
            "zero_point: base"
        ],
    ),
    "bench-tasks-elsewhere": (
        "name: a\npair: qwen3-vl-8b\nmethod: ties\n"
        "evals: {protocol: bench-v1, tasks: [bench_format, ifeval], max_gen_toks: {bench_image: 3}}\n",
        [
            "evals.max_gen_toks.bench_image: bench_image is not among evals.tasks (bench_format, ifeval) "
            "(did you mean `bench_format`?)",
            "evals: bench_format, bench_image ask for what only the bench pair was taught, and the pair is "
            "qwen3-vl-8b; drop them, or run on pair: bench",
            "evals.protocol: bench-v1 is for the bench pair alone, and the pair is qwen3-vl-8b; "
            "write auto to take "
            "the pair's own",
        ],
    ),
    "references": (
        GOOD + "evals: {tasks: [ifeval], data: {ifevl: gone.jsonl}}\nsink: {prompts: mine.jsonl}\n"
        "claims: {primary: [gsm8k]}\n",
        [
            "evals.data.ifevl: no such file or folder: FOLDER/gone.jsonl",
            "sink.prompts: neither a built-in set (builtin-v1) nor a file: FOLDER/mine.jsonl",
            "evals.data.ifevl: ifevl is not among evals.tasks (ifeval) (did you mean `ifeval`?)",
            "claims.primary: gsm8k is not among evals.tasks (ifeval)",
        ],
    ),
    "unknown-pair-and-more": (
        "name: a\npair: benhc\nmethod: ties\nparameters: {density: 2}\n",
        [
            "pair benhc: no pair has this name (did you mean `bench`?). Known are bench, internvl3-8b, "
            "internvl3.5-8b, llava-onevision-qwen2-7b, molmo2-o-7b, qwen2.5-vl-7b, qwen3-vl-8b, "
            "smolvlm-256m; or "
            "give the path of a pair file (`mergelab pairs` lists them).",
            *said("parameters.", "ties", {"density": 2}),
        ],
    ),
}


@pytest.mark.parametrize(("text", "problems"), BAD.values(), ids=BAD.keys())
def test_bad_recipe_is_refused_in_one_message(tmp_path, text, problems):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    heading, *lines = str(caught.value).replace(str(tmp_path), "FOLDER").split("\n")
    assert heading == "FOLDER/bad.yaml: this recipe is not valid:"
    assert lines == [f"  - {problem}" for problem in problems]


def test_endless_grid_is_refused_before_it_is_made(tmp_path):
    path = tmp_path / "huge.yaml"
    values = list(range(1, 1001))
    path.write_text(json.dumps({"name": "a", "pair": "bench", "method": "ties", "sweep": {
        "lambda": values, "density": values, "elect": values, "divisor": values,
    }}))  # fmt: skip
    with pytest.raises(RecipeError, match=f"makes {10**12} points, more than {MAX_CELLS}"):
        load_recipe(path)


def test_pair_given_as_recipe_says_so(tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text("name: p\nbase: a\nvlm: b\n")
    with pytest.raises(RecipeError, match=r"p.yaml: this is a pair, not a recipe\. Give .* this file with --pair"):
        load_recipe(path)


def test_smallest_recipe_takes_the_documented_defaults(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(GOOD)
    recipe = load_recipe(path)
    assert recipe == Recipe(name="a", pair="bench", method="ties")
    assert recipe.zero_point is None
    assert (recipe.conventions, recipe.seeds, recipe.controls) == ("paper", (0,), ("endpoints", "gaussian"))
    assert (recipe.output_dtype, recipe.keep_weights, recipe.track) == ("auto", "never", "none")
    assert recipe.sink == Sink(last_layers="auto", prompts="builtin-v1", dtype="auto")
    assert recipe.evals == Evals(protocol="auto", tasks="auto", data={}, limit=None, batch_size=None, max_gen_toks={})
    assert (recipe.evals.backend, recipe.evals.template) == ("hf", "base")
    assert recipe.claims == Claims(margin=2.0, alpha=0.05, primary="auto", correction="holm")
    assert recipe.entries == (Merge(method="ties"),)


def test_evals_auto_is_the_block_of_defaults(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(GOOD + "evals: auto\n")
    assert load_recipe(path).evals == Evals()


def test_lambda_keeps_its_name_and_weights_may_be_swept(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(
        "name: a\npair: bench\nmethod: task_arithmetic\nparameters: {lambda: 1e-1}\n"
        "sweep: {weights: [{base: 0, vlm: 1}, {base: 1, vlm: 1}]}\n"
    )
    recipe = load_recipe(path)
    assert recipe.parameters == {"lambda": 0.1}
    assert recipe.sweep == {"weights": ({"base": 0, "vlm": 1}, {"base": 1, "vlm": 1})}


FULL = """
name: full
pair: qwen2.5-vl-7b
zero_point: base
conventions: mergekit
merges:
  - {method: linear, parameters: {weights: {base: 0.5, vlm: 0.5}}, sweep: {normalize: [true, false]}}
  - {method: dare_linear, parameters: {drop_rate: 1e-05}}
seeds: [3, 1]
controls: []
output_dtype: float32
keep_weights: always
sink: {last_layers: 3, prompts: ../prompts.jsonl, dtype: float32}
evals:
  tasks: [ifeval, gsm8k]
  data: {ifeval: data/ifeval.jsonl}
  limit: 100
  batch_size: 4
  max_gen_toks: {ifeval: 512}
claims: {margin: 3, alpha: 0.1, primary: [ifeval]}
"""


@pytest.fixture
def full(tmp_path):
    (tmp_path / "recipes" / "data").mkdir(parents=True)
    (tmp_path / "recipes" / "data" / "ifeval.jsonl").write_text("{}\n")
    (tmp_path / "prompts.jsonl").write_text("{}\n")
    path = tmp_path / "recipes" / "full.yaml"
    path.write_text(FULL)
    return path


def test_paths_are_relative_to_the_recipe(full):
    recipe = load_recipe(full)
    assert recipe.evals.data == {"ifeval": str(full.parent / "data" / "ifeval.jsonl")}
    assert recipe.sink.prompts == str(full.parent.parent / "prompts.jsonl")


def test_resolved_recipe_loads_back_equal_from_another_folder(full, tmp_path):
    recipe = load_recipe(full)
    elsewhere = tmp_path / "elsewhere" / "recipe.json"
    elsewhere.parent.mkdir()
    elsewhere.write_text(json.dumps(resolved(recipe)))
    assert Recipe.model_validate(json.loads(elsewhere.read_text())) == recipe
    assert load_recipe(elsewhere) == recipe


def test_resolved_recipe_has_every_field_filled_in(full):
    assert set(resolved(load_recipe(full))) == set(Recipe.model_fields)
    assert resolved(load_recipe(full))["claims"] == {
        "margin": 3.0, "alpha": 0.1, "primary": ["ifeval"], "correction": "holm",
    }  # fmt: skip


def test_pairs_beside_the_recipe_come_before_shipped_ones(tmp_path):
    (tmp_path / "pairs").mkdir()
    (tmp_path / "pairs" / "bench.yaml").write_text("name: bench\nbase: org/b\nvlm: org/v\nprotocol: bench-v1\n")
    (tmp_path / "a.yaml").write_text(GOOD)
    assert load_experiment(tmp_path / "a.yaml").pair.base.id == "org/b"


def test_invalid_pair_is_part_of_the_one_message(tmp_path):
    (tmp_path / "p.yaml").write_text("name: p\nbase: org/b\nvml: org/v\n")
    (tmp_path / "a.yaml").write_text("name: a\npair: ./p.yaml\nmethod: ties\nparameters: {density: 0}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(tmp_path / "a.yaml")
    assert str(caught.value).replace(str(tmp_path), "FOLDER").split("\n") == [
        "FOLDER/a.yaml: this recipe is not valid:",
        "  - FOLDER/p.yaml: this pair is not valid:",
        "    - vlm: missing, and required",
        "    - vml: unknown key (did you mean `vlm`?)",
        "  The keys of a pair are name, base, vlm, ancestor, family and protocol.",
        *(f"  - {line}" for line in said("parameters.", "ties", {"density": 0})),
    ]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "tis",
            "recipe tis: neither a file nor a shipped recipe (did you mean `ties`?). "
            "Shipped are dare, iso_c, linear, mergekit, slerp, star, task_arithmetic, ties, tsv.",
        ),
        (
            "/nowhere/ties.yaml",
            "recipe /nowhere/ties.yaml: no such file: /nowhere/ties.yaml. "
            "A shipped recipe has this name: give `ties` alone.",
        ),
        ("/nowhere/x.yaml", "recipe /nowhere/x.yaml: no such file: /nowhere/x.yaml."),
    ],
)
def test_missing_recipe_is_named_with_the_nearest(source, message):
    with pytest.raises(RecipeError) as caught:
        load_recipe(source)
    assert str(caught.value) == message


def test_recipe_made_in_code_is_held_to_the_same_form():
    with pytest.raises(ValidationError, match="stands beside `method`"):
        Recipe(name="a", pair="bench", method="ties", merges=(Merge(method="tsv"),))
    with pytest.raises(ValidationError, match="frozen"):
        Recipe(name="a", pair="bench", method="ties").name = "b"


@pytest.mark.parametrize("model", [Recipe, Merge, Sink, Evals, Claims])
def test_every_field_says_what_it_means(model):
    assert [name for name, info in model.model_fields.items() if not info.description] == []


def test_folders_of_data_and_tasks_are_relative_to_the_recipe(full):
    folder = full.parent
    text = FULL.replace("data: {ifeval: data/ifeval.jsonl}", "data: data\n  task_folder: mine\n  allow_code: true")
    full.write_text(text)
    with pytest.raises(RecipeError, match=r"evals\.task_folder: no such folder: .*recipes/mine"):
        load_recipe(full)
    (folder / "mine").mkdir()
    evals = load_recipe(full).evals
    assert (evals.data, evals.task_folder, evals.allow_code) == (str(folder / "data"), str(folder / "mine"), True)
    given = load_recipe(full, {"evals.data": "tests", "evals.task_folder": "tests"}).evals
    assert (Path(given.data), Path(given.task_folder)) == (Path("tests").resolve(), Path("tests").resolve())
    with pytest.raises(
        RecipeError, match=r"evals\.data: no such folder: .*for one task write data: \{TASK: FILE\.jsonl\}"
    ):
        load_recipe(full, {"evals.data": str(folder / "data" / "ifeval.jsonl")})


def test_folder_of_splits_of_one_task_is_accepted(full):
    (full.parent / "splits").mkdir()
    full.write_text(FULL.replace("data/ifeval.jsonl", "splits"))
    assert load_recipe(full).evals.data == {"ifeval": str(full.parent / "splits")}
