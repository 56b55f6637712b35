"""A control: noise as long as the change of the vlm, in a random direction."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from merges.block import Block
from merges.parameters import Gaussian
from merges.random import standard_normal, stream_key
from merges.vectors import add_delta, check_inputs, check_whole


def gaussian(zero: Tensor | None, models: Sequence[Tensor], parameters: Gaussian, block: Block) -> Tensor:
    """Return the zero point plus Gaussian noise whose norm is that of the vlm's change.

        g      = independent normal numbers                      (``standard_normal``)
        merged = zero + scale * ||vlm - zero|| * g / ||g||

    The norms are Euclidean, over the tensor, in float64; the noise is scaled in float64 and rounded to
    float32 once, so its norm is the asked one to about 1e-8. Where the vlm equals the zero point, for scale
    0, for tensors of kind norm and for empty ones the zero point comes back bit for bit.

    Args:
        zero: What the noise is added to; for the control of a run it is base.
        models: In the order of ``block.models``, ``vlm`` among them; the others are not read.
        parameters: The scale.
        block: A whole tensor; the draw depends on its seed and name.

    Returns:
        Float32, the same shape, a new tensor. Memory: 5 tensors of that size at most, besides float32 copies
        of inputs of other dtypes.

    Raises:
        ValueError: As ``check_inputs``; there is no vlm; the block starts inside its tensor.

    Source: a control of this project: what a change of this size does that carries no information.
    Deviations: none.
    """
    start, checked = check_inputs(zero, models, block)
    check_whole(block, "gaussian")
    if "vlm" not in block.models:
        raise ValueError(f"gaussian: expected the vlm among the models, found {block.models}")
    if block.kind == "norm" or start.numel() == 0:
        return start.clone()
    delta = checked[block.models.index("vlm")] - start
    norm = parameters.scale * float(torch.linalg.vector_norm(delta, dtype=torch.float64))
    noise = standard_normal(stream_key("noise", block.seed, "vlm", block.name), 0, start.numel(), start.device)
    factor = norm / float(torch.linalg.vector_norm(noise, dtype=torch.float64))
    # The loop over slices is what keeps the float64 product from being a whole tensor.
    for part in noise.split(1 << 20):
        part.copy_(part.double() * factor)
    return add_delta(start, noise.view(start.shape))
