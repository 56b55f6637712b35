"""The cells of a recipe's grid: each merge with its parameters, checked by the method itself.

The order of the written lists is kept; the first swept key changes slowest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mergelab.config.canonical import canonical_json
from mergelab.config.pair import Pair
from mergelab.config.problems import did_you_mean, shown
from mergelab.config.recipe import Merge, Recipe
from mergelab.errors import RecipeError, problem_list
from merges.mergekit_methods import MERGEKIT, PREFIX, is_mergekit, unknown_method
from merges.parameters import PARAMETERS, ParameterErrors, Parameters, build, canonical, describe, inputs_of

CONTROL_METHODS = ("gaussian",)
"""Methods that are controls: they stand under ``controls``, not among the merges."""

MAX_CELLS = 10_000
"""A larger grid is a slip: at one minute a point it would run for a week."""


Inputs = tuple[tuple[str, ...], str | None]
"""The models that a method merges, and what it measures them from; see ``inputs_of``."""


@dataclass(frozen=True)
class Cell:
    """One method with one choice of its parameters."""

    method: str
    values: Mapping[str, Any]
    """What the recipe says, by YAML name; defaults are left out."""

    parameters: Parameters
    """The same, checked, with defaults."""

    vectors: tuple[str, ...]
    """The models that are merged, in the order that the method sees them."""

    zero_point: str | None
    """What the method measures them from; None for averages of the models themselves."""

    @property
    def canonical(self) -> dict[str, Any]:
        """Every parameter, defaults and conventions included, as records and ids take it."""
        return dict(canonical(self.parameters))

    @property
    def draws(self) -> bool:
        """True if the result depends on a seed."""
        return self.parameters.draws

    def conventions(self, asked: str) -> str:
        """Return the conventions the point has: those of the recipe, but methods of mergekit have their own."""
        return "mergekit" if is_mergekit(self.method) else asked


def zero_point_of(recipe: Recipe, pair: Pair) -> str:
    """Return what task vectors are measured from: the recipe's choice, or ancestor, or base."""
    return recipe.zero_point or ("base" if pair.ancestor is None else "ancestor")


def merge_methods() -> tuple[str, ...]:
    """Return the methods of our own that a recipe may merge with, sorted."""
    return tuple(sorted(set(PARAMETERS) - set(CONTROL_METHODS)))


def parameter_names() -> dict[str, tuple[str, ...]]:
    """Return the methods of our own that take a parameter, by its YAML name."""
    names: dict[str, list[str]] = {}
    for method in merge_methods():
        for info in describe(method):
            names.setdefault(info.name, []).append(method)
    return {name: tuple(methods) for name, methods in names.items()}


def mergekit_takers(parameter: str) -> tuple[str, ...]:
    """Return the methods ``mergekit:NAME`` that take a parameter."""
    return tuple(PREFIX + name for name, spec in MERGEKIT.items() if parameter in {slot.name for slot in spec.slots})


def grid_cells(recipe: Recipe, zero_point: str) -> tuple[tuple[Cell, ...], list[str]]:
    """Return the cells that ``mergelab run`` makes, in order, and everything that is wrong with the merges.

    Args:
        recipe: The form of it is valid.
        zero_point: ``ancestor`` or ``base``: decides which task vectors exist.
    """
    problems: list[str] = []
    methods = [entry.method for entry in recipe.entries]
    for index, entry in enumerate(recipe.entries):
        problems += _method_problems(entry.method, _prefix(recipe, index))
    # Lengths are multiplied before a single cell is made: a slip here could fill the memory.
    num_cells = sum(_num_cells(entry) for entry in recipe.entries)
    if num_cells > MAX_CELLS:
        problems.append(f"sweep: makes {num_cells} points, more than {MAX_CELLS}; sweep fewer values")
    if num_cells > MAX_CELLS or not methods:
        return (), problems
    cells: list[Cell] = []
    seen: dict[str, str] = {}
    for index, entry in enumerate(recipe.entries):
        prefix = _prefix(recipe, index)
        if _method_problems(entry.method, prefix):
            continue
        made, found = _entry_cells(entry, prefix, inputs_of(entry.method, zero_point), recipe.conventions)
        problems += found
        for cell in made:
            key = canonical_json([cell.method, cell.canonical])
            name = f"{prefix}{cell.method} {shown(cell.values)}"
            if key in seen:
                problems.append(f"{name}: makes the same point as {seen[key]}; keep one")
            else:
                seen[key] = name
                cells.append(cell)
    return tuple(cells), problems


def selected_cells(recipe: Recipe, zero_point: str) -> tuple[Cell, ...]:
    """Return the points that ``parameters`` names, one for each merge of the recipe.

    Raises:
        RecipeError: A merge whose ``parameters`` leave out what only its ``sweep`` gives, or that is not
        valid.
    """
    cells: list[Cell] = []
    problems: list[str] = []
    for index, entry in enumerate(recipe.entries):
        prefix = _prefix(recipe, index)
        if wrong := _method_problems(entry.method, prefix):
            problems += wrong
            continue
        inputs = inputs_of(entry.method, zero_point)
        made = _build(entry, entry.parameters or {}, prefix, inputs, recipe.conventions)
        if isinstance(made, Cell):
            cells.append(made)
        else:
            problems += made
    if problems:
        advice = "Name one point in full under `parameters:`, or choose one of the grid by its id."
        raise RecipeError(problem_list(f"recipe {recipe.name}: `parameters` is not a point:", problems, advice))
    return tuple(cells)


def control_cell(method: str) -> Cell:
    """Return a control made by a merge method: ``gaussian``, base plus noise of the size of tower - base."""
    vectors = ("vlm",)
    return Cell(method, {}, build(method, {}, vectors), vectors, "base")


def _prefix(recipe: Recipe, index: int) -> str:
    return f"merges.{index}." if recipe.merges is not None else ""


def _method_problems(method: str, prefix: str) -> list[str]:
    known = merge_methods()
    if method in known:
        return []
    if method in CONTROL_METHODS:
        return [f"{prefix}method: {method} is a control, not a merge; write controls: [endpoints, {method}]"]
    if is_mergekit(method):
        name = method.removeprefix(PREFIX)
        return [] if name in MERGEKIT else [f"{prefix}method: {unknown_method(method)}"]
    hint = f" (did you mean `{PREFIX}{method}`?)" if method in MERGEKIT else did_you_mean(method, known)
    return [f"{prefix}method: {shown(method)} is not a merge method{hint}; known are {', '.join(known)}"]


def _num_cells(entry: Merge) -> int:
    return math.prod(len(values) for values in (entry.sweep or {}).values())


def _grid(entry: Merge) -> Iterator[dict[str, Any]]:
    sweep = entry.sweep or {}
    for choice in itertools.product(*sweep.values()):
        yield {**(entry.parameters or {}), **dict(zip(sweep, choice, strict=True))}


def _entry_cells(entry: Merge, prefix: str, inputs: Inputs, conventions: str) -> tuple[list[Cell], list[str]]:
    cells: list[Cell] = []
    problems: list[str] = []
    # `parameters` may leave out what the sweep gives; anything else that is wrong with it counts.
    complete = set(entry.sweep or {}) <= set(entry.parameters or {})
    choices = [*([entry.parameters or {}] if complete else []), *_grid(entry)]
    for position, values in enumerate(choices):
        made = _build(entry, values, prefix, inputs, conventions)
        if isinstance(made, Cell):
            if position > 0 or not complete:
                cells.append(made)
        else:
            problems += [problem for problem in made if problem not in problems]
    return cells, problems


def _build(entry: Merge, values: Mapping[str, Any], prefix: str, inputs: Inputs, conventions: str) -> Cell | list[str]:
    vectors, zero_point = inputs
    try:
        parameters = build(entry.method, values, vectors, conventions)
        return Cell(entry.method, values, parameters, vectors, zero_point)
    except ParameterErrors as error:
        return [_placed(problem, entry, values, prefix) for problem in error.problems]


def _placed(problem: str, entry: Merge, values: Mapping[str, Any], prefix: str) -> str:
    """Put the dotted path of the recipe before what the method says about a parameter."""
    name = problem.partition(":")[0]
    if name == "conventions":
        return problem
    if name == "method":
        return f"{prefix}{problem}"
    if name in (entry.sweep or {}) and values.get(name) != (entry.parameters or {}).get(name):
        return f"{prefix}sweep.{problem}"
    return f"{prefix}parameters.{problem}"
