"""Declaring the fields of parameter classes, those first that several methods share, and checking them.

A field carries its bounds and its meaning in its metadata. Standard library only.
"""

from __future__ import annotations

from dataclasses import field, fields
from typing import Any

from merges.bounds import Bounds, Choice, Number, ParameterErrors, Weights, Words


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
    words = "what a sum of exactly 0 elects: nothing (the zero point stays), plus, or the sign most entries elect"
    return parameter("nothing", Choice(("nothing", "plus", "majority")), words)


def divisor_field() -> Any:
    """Declare what the agreeing entries are divided by."""
    words = "what the sum of agreeing weighted entries is divided by: their weights, their number, or 1"
    return parameter("weights", Choice(("weights", "count", "none")), words)


KINDS = ("embedding", "head", "norm", "qk_norm", "bias", "attention", "mlp", "other")
"""Kinds of tensors that a recipe may exclude; ``qk_norm`` are the q and k norms, which ``norm`` includes."""


def exclude_field() -> Any:
    """Declare the kinds of tensors that are not merged."""
    return parameter((), Words(KINDS), "kinds of tensors that are not merged and stay the vlm's")


def svd_scope_field() -> Any:
    """Declare which matrices a method on singular values takes."""
    words = "matrices taken apart: linear maps and experts, or embeddings and heads as well"
    return parameter("linear", Choice(("linear", "matrices")), words)


def rest_field() -> Any:
    """Declare what a method on singular values makes of all other tensors."""
    words = "what other tensors get: the mean of the weighted task vectors, their sum, or nothing"
    return parameter("mean", Choice(("mean", "sum", "zero")), words)


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
        elif isinstance(bounds, Words):
            object.__setattr__(parameters, item.name, tuple(sorted(value)))
    if problems:
        raise ParameterErrors(problems)
