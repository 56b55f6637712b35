"""Declaring the fields of parameter classes, those first that several methods share, and checking them.

A field carries its bounds and its meaning in its metadata. Standard library only.
"""

from __future__ import annotations

from dataclasses import field, fields
from typing import Any

from merges.bounds import Bounds, Choice, Number, ParameterErrors, Weights


def parameter(default: object, bounds: Bounds, meaning: str) -> Any:
    """Declare a field of a parameter class: default, what it may be, and its meaning in one line."""
    # Weights are a dict, which has no hash; all other fields are hashed.
    hashed = None if not isinstance(bounds, Weights) else False
    return field(default=default, hash=hashed, metadata={"bounds": bounds, "meaning": meaning})


def weights_field(meaning: str = "factor of each task vector; 1 each when absent") -> Any:
    """Declare the weight of each task vector, or of each model."""
    return parameter(None, Weights(), meaning)


def lambda_field(meaning: str = "factor of the merged task vector") -> Any:
    """Declare the scale of the merged task vector."""
    return parameter(1.0, Number(), meaning)


def drop_rate_field() -> Any:
    """Declare the p of DARE."""
    return parameter(0.9, Number(0, 1, high_open=True), "share of the entries of each task vector that is dropped")


def rescale_field() -> Any:
    """Declare how DARE makes up for what it drops."""
    words = "what kept entries are multiplied by: 1/(1-p), the L1 norm before over after dropping, or 1"
    return parameter("inverse", Choice(("inverse", "l1", "none")), words)


def elect_field() -> Any:
    """Declare what elects the sign of an entry."""
    words = "what is summed to elect a sign: kept entries, kept entries times weight, or their signs"
    return parameter("raw", Choice(("raw", "weighted", "count")), words)


def zero_sum_field() -> Any:
    """Declare what a tie of signs elects."""
    refused = {"majority": "it needs the sign sums of the whole model, and trim_scope model is not implemented"}
    words = "what a sum of exactly 0 elects: nothing (the zero point stays) or plus"
    return parameter("nothing", Choice(("nothing", "plus"), refused), words)


def divisor_field() -> Any:
    """Declare what the agreeing entries are divided by."""
    words = "what the sum of agreeing weighted entries is divided by: their weights, their number, or 1"
    return parameter("weights", Choice(("weights", "count", "none")), words)


def recipe_name(field_name: str) -> str:
    """Return the name of a field in a recipe: ``lambda`` for ``lambda_``, which Python does not allow."""
    return field_name.removesuffix("_")


def settle(parameters: Any) -> None:
    """Check every field on its own, then hold numbers as floats so that 1 and 1.0 are the same point."""
    problems = []
    for item in fields(parameters):
        bounds = item.metadata["bounds"]
        value = getattr(parameters, item.name)
        problem = bounds.problem(recipe_name(item.name), value)
        if problem:
            problems.append(problem)
        elif isinstance(bounds, Number):
            object.__setattr__(parameters, item.name, float(value))
        elif isinstance(bounds, Weights) and value is not None:
            floats = {role: float(value[role]) for role in sorted(value)}
            object.__setattr__(parameters, item.name, floats)
    if problems:
        raise ParameterErrors(problems)
