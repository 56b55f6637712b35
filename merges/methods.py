"""The merge methods by name: what a recipe calls, and the function that computes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from merges.block import Block
from merges.dare_linear import dare_linear
from merges.dare_ties import dare_ties
from merges.exclusion import is_excluded
from merges.gaussian import gaussian
from merges.iso_c import iso_c, iso_c_delta
from merges.linear import linear
from merges.matrices import Spectral, add_matrix_delta
from merges.mergekit_methods import ByMergekit
from merges.parameters import Gaussian, Parameters
from merges.slerp import slerp
from merges.star import star, star_delta
from merges.task_arithmetic import task_arithmetic
from merges.ties import ties
from merges.tsv import tsv, tsv_delta
from merges.vectors import check_models

METHODS: dict[str, Callable[..., Tensor]] = {
    "linear": linear,
    "task_arithmetic": task_arithmetic,
    "ties": ties,
    "dare_linear": dare_linear,
    "dare_ties": dare_ties,
    "tsv": tsv,
    "star": star,
    "iso_c": iso_c,
    "slerp": slerp,
    "gaussian": gaussian,
}
"""Each is called as method(zero, models, parameters, block); parameters are of the class of the same name in
``parameters.PARAMETERS``."""

SPECTRAL: dict[str, Callable[..., Tensor | None]] = {
    "tsv": tsv_delta,
    "star": star_delta,
    "iso_c": iso_c_delta,
}
"""What the methods on singular values add to the zero point before they scale it by lambda: called like the
methods, None for tensors they do not take apart. A sweep over lambda keeps it and hands it to ``merge``."""


def merge(
    zero: Tensor | None,
    models: Sequence[Tensor],
    parameters: Parameters,
    block: Block,
    unscaled: Tensor | None = None,
) -> Tensor:
    """Merge a block by the method of its parameters, or leave it as the vlm's where its kind is excluded.

    Args:
        zero: The zero point; None for methods on whole models.
        models: In the order of ``block.models``; the vlm is the last of them or of that name.
        parameters: Of any method of ours.
        block: The tensor, or a slice of it where the method allows that.
        unscaled: What ``SPECTRAL`` gave for this tensor, if it is at hand; the result has the same bits without.

    Returns:
        Float32, the shape of the models, a new tensor.

    Raises:
        ValueError: As the method.
    """
    if not isinstance(parameters, Gaussian | ByMergekit) and is_excluded(parameters.exclude, block.kind, block.name):
        vlm = block.models.index("vlm") if "vlm" in block.models else -1
        return check_models(models, block)[vlm].clone()
    if unscaled is not None and isinstance(parameters, Spectral):
        return add_matrix_delta(zero, models, parameters, block, unscaled)
    return METHODS[parameters.method](zero, models, parameters, block)
