"""SLERP: from one model to another along the great circle of their directions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from merges.block import Block
from merges.parameters import Slerp
from merges.vectors import add_delta, check_models, check_whole

SMALLEST_NORM = 1e-8
"""Tensors below this norm have no direction, as in mergekit."""

PARALLEL = 1 - 1e-12
"""Above this absolute cosine no great circle is determined: sin a is 0 or rounding."""


def slerp(zero: Tensor | None, models: Sequence[Tensor], parameters: Slerp, block: Block) -> Tensor:
    """Return the spherical interpolation of two models, t = 0 the first (base) and t = 1 the second (vlm).

    Of whole tensors, flattened, with the angle a between them (cos a = <x, y> / (||x|| ||y||)):

        merged = sin((1 - t) a) / sin a * x  +  sin(t a) / sin a * y
        merged = x + t (y - x)                  where |cos a| > lerp_above or 1 - 1e-12, or a norm is below 1e-8

    It acts on the models themselves and not on task vectors, on tensors of every kind alike; packed experts share
    one angle. Fine-tunes of one model mostly have cosines above .9995, so that SLERP is the straight line for
    them. t = 0 and t = 1 return the model bit for bit; on the straight line equal entries keep their bits.

    Args:
        zero: Not used; the interpolation needs no zero point.
        models: Two, in the order of ``block.models``; any float dtype, equal shapes, any number of dimensions.
        parameters: t in [0, 1] and the cosine above which the way is straight.
        block: A whole tensor.

    Returns:
        Float32, the same shape, a new tensor. Norms and the inner product are float64. Memory: 4 tensors besides
        float32 copies of inputs of other dtypes.

    Raises:
        ValueError: As ``check_models``; there are not two models; the block starts inside its tensor.

    Source: Shoemake 1985, Animating rotation with quaternion curves, SIGGRAPH.
    Deviations: as mergekit does, the models are not normalised, and near-parallel ones go straight. mergekit takes
        a tensor of norm 0 for orthogonal to the other; here the way is straight.
    """
    checked = check_models(models, block)
    check_whole(block, "slerp")
    if len(checked) != 2:
        raise ValueError(f"slerp goes from one model to another, found {len(checked)} models")
    first, second = checked
    if parameters.t in (0, 1):
        return (second if parameters.t else first).clone()
    cosine = _cosine(first, second)
    if cosine is None or abs(cosine) > min(parameters.lerp_above, PARALLEL):
        return add_delta(first, (second - first) * parameters.t)
    angle = math.acos(cosine)
    near = math.sin((1 - parameters.t) * angle) / math.sin(angle)
    far = math.sin(parameters.t * angle) / math.sin(angle)
    return first * near + second * far


def _cosine(first: Tensor, second: Tensor) -> float | None:
    """Return the cosine of two tensors in [-1, 1]; None where one has no direction."""
    dot, one, two = 0.0, 0.0, 0.0
    for x, y in zip(first.reshape(-1).split(1 << 20), second.reshape(-1).split(1 << 20), strict=True):
        left, right = x.double(), y.double()
        dot += float(torch.dot(left, right))
        one += float(torch.dot(left, left))
        two += float(torch.dot(right, right))
    if math.sqrt(min(one, two)) < SMALLEST_NORM:
        return None
    return max(-1.0, min(1.0, dot / math.sqrt(one) / math.sqrt(two)))
