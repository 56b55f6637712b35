"""The points of an experiment in run order: parents, controls, then the cells of the grid."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from mergelab.config import Cell, Pair, Recipe, control_cell, grid_cells, selected_cells, zero_point_of
from mergelab.errors import RecipeError, problem_list

PointRole = Literal["ancestor", "base", "vlm", "control", "merge"]

COPY = "copy"
"""Method of the endpoint controls: a parent sent through the stream unchanged."""


NUM_CONTROL_SEEDS = 3
"""Draws of the gaussian control on a real pair."""


@dataclass(frozen=True)
class PointSpec:
    """One point before it is made: everything about it that a recipe decides.

    Fields that do not apply are None: parents have no method, copies and averages no zero point, and only
    methods that draw have a seed.
    """

    role: PointRole
    method: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Canonical: every parameter by its YAML name, defaults included."""

    seed: int | None = None
    zero_point: str | None = None
    conventions: str | None = None
    inputs: tuple[str, ...] = ()
    """The models whose contents decide the weights of the point, in the order ancestor, base, vlm."""

    @property
    def is_parent(self) -> bool:
        """True for a model of the pair as it is."""
        return self.role in ("ancestor", "base", "vlm")


def expand(recipe: Recipe, pair: Pair) -> tuple[PointSpec, ...]:
    """Return the points that ``mergelab run`` makes, in run order.

    The parents (ancestor if the pair has one, base, vlm), the controls (``endpoints``: copies of base and of vlm;
    ``gaussian``: one point per control seed; ``gaussian_per_merge``: that for every merge), then every cell of the
    grid in the written order, once per seed for methods that draw.

    Args:
        recipe: From ``load_experiment``.
        pair: The pair it runs on.

    Raises:
        RecipeError: The merges of the recipe are not valid on this pair.
    """
    zero_point = zero_point_of(recipe, pair)
    cells, problems = grid_cells(recipe, zero_point)
    if problems:
        raise RecipeError(problem_list(f"recipe {recipe.name} on pair {pair.name}:", problems))
    parents = tuple(PointSpec(role=role, inputs=(role,)) for role in pair.sources)
    merges = _merges(cells, recipe.seeds, recipe.conventions)
    return parents + _controls(recipe, pair, merges) + merges


def selected_points(recipe: Recipe, pair: Pair) -> tuple[PointSpec, ...]:
    """Return the points that ``parameters`` names, one per merge of the recipe, drawn with its first seed.

    They are what ``mergelab merge`` makes, and need not lie on the grid.

    Raises:
        RecipeError: A merge whose ``parameters`` do not name a whole point.
    """
    zero_point = zero_point_of(recipe, pair)
    return _merges(selected_cells(recipe, zero_point), recipe.seeds[:1], recipe.conventions)


def control_seeds(recipe: Recipe, pair: Pair) -> tuple[int, ...]:
    """Return the seeds of the gaussian control: the recipe's ``control_seeds``.

    ``auto`` takes ``seeds``, and on any pair but the bench fills them up to ``NUM_CONTROL_SEEDS`` with the smallest
    others: one draw does not tell what noise of this size does.
    """
    if not isinstance(recipe.control_seeds, str):
        return recipe.control_seeds
    missing = 0 if pair.is_bench else max(0, NUM_CONTROL_SEEDS - len(recipe.seeds))
    others = (seed for seed in itertools.count() if seed not in recipe.seeds)
    return recipe.seeds + tuple(itertools.islice(others, missing))


def _controls(recipe: Recipe, pair: Pair, merges: tuple[PointSpec, ...]) -> tuple[PointSpec, ...]:
    points: list[PointSpec] = []
    for control in recipe.controls:
        if control == "endpoints":
            # The copy of base is written in the layout of vlm, whose shapes and dtypes it takes.
            points += [
                PointSpec(role="control", method=COPY, parameters={"of": "base"}, inputs=("base", "vlm")),
                PointSpec(role="control", method=COPY, parameters={"of": "vlm"}, inputs=("vlm",)),
            ]
        else:
            # Noise is added to base, whatever the zero point of the merges is.
            cell = control_cell("gaussian")
            for matched in (None,) if control == "gaussian" else merges:
                points += [
                    PointSpec(
                        role="control",
                        method=cell.method,
                        parameters={**cell.canonical, **({"matched": _as_values(matched)} if matched else {})},
                        seed=seed,
                        zero_point="base",
                        inputs=("base", "vlm") if matched is None else matched.inputs,
                    )
                    for seed in control_seeds(recipe, pair)
                ]
    return tuple(points)


def _as_values(spec: PointSpec) -> dict[str, Any]:
    """Return what a matched control says of its merge."""
    return {
        "method": spec.method,
        "parameters": dict(spec.parameters),
        "zero_point": spec.zero_point,
        "conventions": spec.conventions,
        "seed": spec.seed,
    }


def _merges(cells: Iterable[Cell], seeds: tuple[int, ...], conventions: str) -> tuple[PointSpec, ...]:
    return tuple(
        PointSpec(
            role="merge",
            method=cell.method,
            parameters=cell.canonical,
            seed=seed,
            zero_point=cell.zero_point,
            conventions=cell.conventions(conventions),
            inputs=("ancestor", "base", "vlm") if cell.zero_point == "ancestor" else ("base", "vlm"),
        )
        for cell in cells
        for seed in (seeds if cell.draws else (None,))
    )
