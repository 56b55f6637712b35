"""From a YAML file to an experiment: a recipe that fits its pair, or one error that lists everything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mergelab.config.cells import grid_cells, merge_methods, mergekit_takers, parameter_names, zero_point_of
from mergelab.config.document import Document, read_document
from mergelab.config.overrides import apply_overrides
from mergelab.config.packaged import list_recipes
from mergelab.config.pair import (
    BENCH_PROTOCOL,
    Pair,
    absolute,
    is_path,
    load_pair,
    looks_like_pair,
)
from mergelab.config.problems import did_you_mean, dotted, shown, validate
from mergelab.config.recipe import (
    MERGE_KEYS,
    Claims,
    Evals,
    Merge,
    Recipe,
    Sink,
    merge_key_problems,
)
from mergelab.errors import RecipeError, problem_list

BENCH_TASK_PREFIX = "bench_"
BUILT_IN_PROMPTS = "builtin-"
_BLOCKS: dict[str, type[Document]] = {"sink": Sink, "evals": Evals, "claims": Claims}
_NAMELESS = "?"


@dataclass(frozen=True)
class Experiment:
    """A recipe with the pair it runs on."""

    recipe: Recipe
    pair: Pair
    path: Path
    """The file of the recipe."""


def load_recipe(source: str | Path, overrides: Mapping[str, Any] | None = None, pair: Pair | None = None) -> Recipe:
    """Return the recipe of ``load_experiment``."""
    return load_experiment(source, overrides, pair).recipe


def load_experiment(
    source: str | Path, overrides: Mapping[str, Any] | None = None, pair: Pair | None = None
) -> Experiment:
    """Read a recipe and its pair, and check both and their fit before anything else is read.

    Args:
        source: The path of a recipe, or the name of a shipped one (``ties``).
        overrides: Values by dotted key that replace those of the file (``parse_settings``; ``--limit 100`` is
            ``{"evals.limit": 100}``). Paths in them are relative to the current folder, paths in the file to
            the file.
        pair: A pair made on the command line; it replaces the one that the recipe names.

    Returns:
        Recipe and pair, with all paths absolute.

    Raises:
        RecipeError: Everything that is wrong, in one message, each with its dotted path.
    """
    path = find_recipe(source)
    document = read_document(path)
    if looks_like_pair(document):
        raise RecipeError(
            f"{path}: this is a pair, not a recipe. Give a recipe as the argument, and this file with --pair."
        )
    document, problems = apply_overrides(document, overrides or {})
    if pair is not None:
        document["pair"] = pair.name
    partial, found = validate(Recipe, document, _unknown_key, {"name": "unnamed", "pair": _NAMELESS})
    problems += found
    keys = [key for key in MERGE_KEYS if document.get(key) is not None]
    problems += [problem for problem in merge_key_problems(keys) if problem not in problems]
    if partial is None:
        raise _refusal(path, overrides, problems)
    recipe = _anchored(partial, path.parent)
    if pair is None and recipe.pair != _NAMELESS:
        try:
            pair = load_pair(recipe.pair, path.parent)
        except RecipeError as error:
            problems.append(str(error).replace("\n", "\n  "))
    # Without a pair the zero point is open; with an ancestor the fewest parameters are wrong.
    zero_point = (recipe.zero_point or "ancestor") if pair is None else zero_point_of(recipe, pair)
    problems += [problem for problem in grid_cells(recipe, zero_point)[1] if problem not in problems]
    problems += _reference_problems(recipe)
    if pair is not None:
        problems += _fit_problems(recipe, pair)
    if problems or pair is None:
        raise _refusal(path, overrides, problems)
    return Experiment(recipe, pair, path)


def find_recipe(source: str | Path) -> Path:
    """Return the file of a recipe given by path or, for a shipped one, by name.

    Raises:
        RecipeError: There is none.
    """
    path = absolute(str(source), None)
    if path.is_file():
        return path
    shipped = list_recipes()
    names = ", ".join(shipped)
    if str(source) in shipped:
        return shipped[str(source)]
    if path.is_dir():
        raise RecipeError(f"recipe {source}: is a folder; give a YAML file, or a shipped recipe by name: {names}.")
    if not is_path(str(source)):
        raise RecipeError(
            f"recipe {source}: neither a file nor a shipped recipe{did_you_mean(str(source), shipped)}. "
            f"Shipped are {names}."
        )
    hint = f" A shipped recipe has this name: give `{path.stem}` alone." if path.stem in shipped else ""
    raise RecipeError(f"recipe {source}: no such file: {path}.{hint}")


def _refusal(path: Path, overrides: Mapping[str, Any] | None, problems: list[str]) -> RecipeError:
    changes = ", ".join(f"{key}={shown(value)}" for key, value in (overrides or {}).items())
    heading = f"{path}{f' with {changes}' if changes else ''}: this recipe is not valid:"
    return RecipeError(problem_list(heading, problems))


def _anchored(recipe: Recipe, folder: Path) -> Recipe:
    """Make the paths of a recipe absolute, relative to the folder it lies in."""
    data: str | dict[str, str]
    if isinstance(recipe.evals.data, str):
        data = str(absolute(recipe.evals.data, folder))
    else:
        data = {task: str(absolute(path, folder)) for task, path in recipe.evals.data.items()}
    tasks = recipe.evals.task_folder
    changes = {"data": data, "task_folder": None if tasks is None else str(absolute(tasks, folder))}
    prompts = recipe.sink.prompts
    if not prompts.startswith(BUILT_IN_PROMPTS):
        prompts = str(absolute(prompts, folder))
    pair = recipe.pair
    if is_path(pair):
        pair = str(absolute(pair, folder))
    return recipe.model_copy(
        update={
            "pair": pair,
            "evals": recipe.evals.model_copy(update=changes),
            "sink": recipe.sink.model_copy(update={"prompts": prompts}),
        }
    )


def _reference_problems(recipe: Recipe) -> list[str]:
    """Return the files that are not there and the tasks that are not run."""
    evals, claims = recipe.evals, recipe.claims
    data = {} if isinstance(evals.data, str) else evals.data
    problems = [
        f"evals.data.{task}: no such file or folder: {path}" for task, path in data.items() if not Path(path).exists()
    ]
    if isinstance(evals.data, str) and not Path(evals.data).is_dir():
        problems.append(f"evals.data: no such folder: {evals.data} (for one task write data: {{TASK: FILE.jsonl}})")
    if evals.task_folder is not None and not Path(evals.task_folder).is_dir():
        problems.append(f"evals.task_folder: no such folder: {evals.task_folder}")
    prompts = recipe.sink.prompts
    if not prompts.startswith(BUILT_IN_PROMPTS) and not Path(prompts).is_file():
        problems.append(f"sink.prompts: neither a built-in set (builtin-v1) nor a file: {prompts}")
    named = {"evals.tasks": evals.tasks, "claims.primary": claims.primary}
    for key, tasks in named.items():
        twice = sorted({task for task in tasks if tasks.count(task) > 1}) if tasks != "auto" else []
        if twice:
            problems.append(f"{key}: {', '.join(twice)} given twice; keep one")
    if evals.tasks != "auto":
        run = ", ".join(evals.tasks)
        named_elsewhere = [
            *((f"evals.data.{task}", task) for task in data),
            *((f"evals.max_gen_toks.{task}", task) for task in evals.max_gen_toks),
            *(("claims.primary", task) for task in (claims.primary if claims.primary != "auto" else ())),
        ]
        for key, task in named_elsewhere:
            if task not in evals.tasks:
                hint = did_you_mean(task, evals.tasks)
                problems.append(f"{key}: {task} is not among evals.tasks ({run}){hint}")
    return problems


def _fit_problems(recipe: Recipe, pair: Pair) -> list[str]:
    """Return what the recipe asks of this pair in vain."""
    problems = []
    if recipe.zero_point == "ancestor" and pair.ancestor is None:
        problems.append(
            f"zero_point: ancestor, but the pair {pair.name} has no ancestor; name one in the pair, or write "
            "zero_point: base"
        )
    if not pair.is_bench:
        evals = recipe.evals
        data = () if isinstance(evals.data, str) else evals.data
        named = [*(evals.tasks if evals.tasks != "auto" else ()), *data, *evals.max_gen_toks]
        tasks = list(dict.fromkeys(task for task in named if task.startswith(BENCH_TASK_PREFIX)))
        if tasks:
            problems.append(
                f"evals: {', '.join(tasks)} ask for what only the bench pair was taught, and the pair is "
                f"{pair.name}; drop them, or run on pair: bench"
            )
        if evals.protocol == BENCH_PROTOCOL:
            problems.append(
                f"evals.protocol: {BENCH_PROTOCOL} is for the bench pair alone, and the pair is {pair.name}; "
                "write auto to take the pair's own"
            )
    return problems


def _unknown_key(path: tuple[str | int, ...], value: object) -> str:
    """Say where an unknown key belongs, or what it may have been meant to be."""
    key, name = str(path[-1]), dotted(path)
    block = str(path[0]) if len(path) > 1 else ""
    siblings = {"merges": Merge.model_fields, **{b: model.model_fields for b, model in _BLOCKS.items()}}
    known = siblings.get(block, Recipe.model_fields)
    if key in parameter_names():
        methods = ", ".join(parameter_names()[key])
        home = "sweep" if isinstance(value, list) else "parameters"
        return f"{name}: a parameter (of {methods}); write {home}: {{{key}: {shown(value)}}}"
    owners = [owner for owner, model in _BLOCKS.items() if owner != block and key in model.model_fields]
    if not block and key in Pair.model_fields and not owners:
        return f"{name}: a key of pairs, not of recipes; write it in a pair file and name that file with `pair:`"
    if owners:
        return f"{name}: belongs under `{owners[0]}:`; write {owners[0]}: {{{key}: {shown(value)}}}"
    if block and key in Recipe.model_fields:
        return f"{name}: belongs at the top level of the recipe, not under `{block}:`"
    if key in merge_methods():
        return f"{name}: a method, not a key; write method: {key}"
    if takers := mergekit_takers(key):
        some = ", ".join(takers[:3]) + (f" and {len(takers) - 3} more" if len(takers) > 3 else "")
        return f"{name}: a parameter (of {some}); write parameters: {{{key}: {shown(value)}}}"
    return f"{name}: unknown key{did_you_mean(key, known) or '; known are ' + ', '.join(known)}"
