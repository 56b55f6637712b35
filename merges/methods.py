"""The merge methods by name: what a recipe calls, and the function that computes it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from merges.dare_linear import dare_linear
from merges.dare_ties import dare_ties
from merges.gaussian import gaussian
from merges.linear import linear
from merges.task_arithmetic import task_arithmetic
from merges.ties import ties
from merges.tsv import tsv

METHODS: dict[str, Callable[..., Tensor]] = {
    "linear": linear,
    "task_arithmetic": task_arithmetic,
    "ties": ties,
    "dare_linear": dare_linear,
    "dare_ties": dare_ties,
    "tsv": tsv,
    "gaussian": gaussian,
}
"""Each is called as method(zero, models, parameters, block); parameters are of the class of the same name in
``parameters.PARAMETERS``."""
