"""Points of a grid that cannot differ, or that are a parent: told before the run, so that none looks like a finding.

What cannot change the result at all is refused by the methods themselves (the weight of a single vector that is
divided out, TSV-M with one vector). Here is what is legal, and easy to misread afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mergelab.config.canonical import canonical_json
from mergelab.config.cells import Cell, grid_cells, zero_point_of
from mergelab.config.pair import Pair
from mergelab.config.problems import shown
from mergelab.config.recipe import Recipe
from merges.mergekit_methods import PREFIX, is_mergekit

DIGITS = 9
"""Factors that agree to this many decimals are the same: 0.1 + 0.2 and 0.3."""

_SUMS = ("task_arithmetic", "dare_linear", "breadcrumbs", "della_linear")
"""Methods that add task vectors without electing signs, by mergekit's names; ours are among them."""

_MEANS = ("ties", "dare_ties", "breadcrumbs_ties", "della")
"""Methods that elect a sign first; with a single vector there is nothing to elect."""


def announcements(recipe: Recipe, pair: Pair) -> list[str]:
    """Return one line for every point, or group of points, whose result is known beforehand.

    Points with the same result up to rounding, points that are a parent, thinning that thins nothing, seeds that
    draw nothing.

    Args:
        recipe: Valid on the pair.
        pair: The pair it runs on.
    """
    cells, _ = grid_cells(recipe, zero_point_of(recipe, pair))
    return [*_equal_points(cells), *_parents(cells), *_nothing_thinned(cells, len(recipe.seeds))]


def _equal_points(cells: Sequence[Cell]) -> list[str]:
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(canonical_json(_outcome(cell)), []).append(cell)
    lines = []
    for group in groups.values():
        if len(group) > 1:
            factors = _factors(group[0])
            reason = f"all are {_sum_text(factors)}" if factors is not None else "what tells them apart has no effect"
            lines.append(f"the same weights up to rounding: {_names(group)}; {reason}.")
    return lines


def _parents(cells: Sequence[Cell]) -> list[str]:
    lines = []
    for cell in cells:
        factors = _factors(cell)
        if factors is not None and len(factors) == 1:
            role, factor = next(iter(factors.items()))
            if factor == 1:
                what = f"the zero point, {role}" if role == cell.zero_point else role
                lines.append(f"no merge: {_name(cell)} is {what} itself.")
    return lines


def _nothing_thinned(cells: Sequence[Cell], num_seeds: int) -> list[str]:
    lines = []
    for cell in cells:
        if _thins(cell) is False:
            if cell.method.removeprefix(PREFIX) in _MEANS and len(cell.vectors) > 1:
                lines.append(f"nothing is dropped: {_name(cell)} only elects signs.")
            if cell.draws and num_seeds > 1:
                lines.append(f"nothing is drawn: the {num_seeds} seeds of {_name(cell)} give the same weights.")
    return lines


def _outcome(cell: Cell) -> Any:
    """Return a value that is equal for cells whose merged weights are equal up to rounding."""
    factors = _factors(cell)
    if factors is not None:
        return factors
    values = dict(cell.canonical)
    key = "weight" if is_mergekit(cell.method) else "weights"
    weights = values.get(key)
    if isinstance(weights, Mapping) and _normalizes(cell) and (total := sum(weights.values())) > 0:
        values[key] = {role: round(weight / total, DIGITS) for role, weight in weights.items()}
    if values.get("lambda") == 0:
        values = {"lambda": 0, "exclude": values.get("exclude")}
    values.pop("int8_mask", None)
    if _thins(cell) is False:
        for name in ("epsilon", "gamma", "rescale"):
            values.pop(name, None)
    return [cell.method, values]


def _factors(cell: Cell) -> dict[str, float] | None:
    """Return the factor of each model where the merge is a plain sum of models, without zeros; else None."""
    values, name = cell.canonical, cell.method.removeprefix(PREFIX)
    if values.get("exclude"):  # tensors that stay the vlm's have other factors than the rest
        return None
    weights = values.get("weight" if is_mergekit(cell.method) else "weights")
    if values.get("lambda") == 0 and cell.zero_point is not None:
        return {cell.zero_point: 1.0}
    if name in _ENDS:
        return _end(cell, name, values)
    if not isinstance(weights, Mapping):
        return None
    # A sum of 0 that is divided by is refused by the method.
    total = sum(weights.values()) if _normalizes(cell) else 1.0
    if name == "linear":
        return _rounded({role: weight / total for role, weight in weights.items()})
    adds = name in _SUMS or (name in _MEANS and len(cell.vectors) == 1)
    if not adds or _thins(cell) is not False or cell.zero_point is None:
        return None
    factors = {role: values["lambda"] * weight / total for role, weight in weights.items()}
    factors[cell.zero_point] = factors.get(cell.zero_point, 0.0) + 1 - sum(factors.values())
    return _rounded(factors)


_ENDS = ("slerp", "nearswap", "passthrough")
"""Methods with a single number, which at its ends is a parent; ours is slerp."""


def _end(cell: Cell, name: str, values: Mapping[str, Any]) -> dict[str, float] | None:
    if name == "passthrough":
        (scale,) = values["scale"].values()
        return _rounded({cell.vectors[0]: 1.0 if scale is None else scale})
    if values["t"] == 0:
        # mergekit starts from the zero point; our slerp has none and starts from the first model.
        return {cell.zero_point or cell.vectors[0]: 1.0}
    return {cell.vectors[-1]: 1.0} if name == "slerp" and values["t"] == 1 else None


def _normalizes(cell: Cell) -> bool:
    """True where multiplying all weights by one number changes nothing."""
    values = cell.canonical
    if is_mergekit(cell.method):
        return cell.method == f"{PREFIX}nuslerp" or True in (values.get("normalize"), values.get("normalize_weights"))
    return values.get("divisor") == "weights" or values.get("normalize") is True


def _thins(cell: Cell) -> bool | None:
    """True if the method drops entries, False if its parameters keep all, None if it has no such step."""
    values = cell.canonical
    if "drop_rate" in values:
        return bool(values["drop_rate"] > 0)
    density = values.get("density")
    if density is None:
        return False if cell.method.removeprefix(PREFIX) == "task_arithmetic" else None
    return any(value < 1 for value in density.values()) if isinstance(density, Mapping) else bool(density < 1)


def _rounded(factors: Mapping[str, float]) -> dict[str, float]:
    return {role: value for role in sorted(factors) if (value := round(factors[role], DIGITS)) != 0}


def _sum_text(factors: Mapping[str, float]) -> str:
    return " + ".join(f"{factor:g} {role}" for role, factor in factors.items()) or "0"


def _name(cell: Cell) -> str:
    return f"{cell.method} {shown(dict(cell.values))}"


def _names(cells: Iterable[Cell]) -> str:
    return ", ".join(_name(cell) for cell in cells)
