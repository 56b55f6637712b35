"""Which tensors the methods on singular values take apart, matrix by matrix, and what the others get.

    kind                               svd_scope linear      svd_scope matrices
    attention, mlp, other, 2-D         taken apart           taken apart
    the same, 3-D and more             each matrix of the    each matrix of the
    (packed experts)                   last two dimensions   last two dimensions
    embedding, head                    rest                  taken apart
    norm, q and k norms, bias, 1-D     rest                  rest
    scalars, empty tensors             rest                  rest

A fused qkv or gate and up projection is one matrix, as it is stored. ``rest`` is with weighted task vectors v_i
of T models: zero + lambda * mean_i v_i (mean), zero + lambda * sum_i v_i (sum), zero (zero). Rows of embeddings
and heads are separate vectors, one a token, which is why ``linear`` does not take them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from merges.block import Block
from merges.parameters import IsoC, Star, Tsv
from merges.vectors import add_delta, add_scaled, check_inputs, check_whole, weight_list

LINEAR_KINDS = ("attention", "mlp", "other")
TOKEN_KINDS = ("embedding", "head")

Spectral = Tsv | Star | IsoC


def is_matrix(block: Block, shape: Sequence[int], svd_scope: str, smallest: int = 1) -> bool:
    """Return True if a tensor is taken apart: its kind is in the scope and its shorter side at least ``smallest``."""
    kinds = LINEAR_KINDS + TOKEN_KINDS if svd_scope == "matrices" else LINEAR_KINDS
    return block.kind in kinds and len(shape) >= 2 and min(shape[-2:]) >= smallest


def matrix_delta(
    zero: Tensor | None,
    models: Sequence[Tensor],
    parameters: Spectral,
    block: Block,
    combine: Callable[[list[Tensor]], Tensor],
    smallest: int = 1,
) -> Tensor | None:
    """Return the merged task matrices before they are scaled by lambda; None for tensors not taken apart.

    Args:
        zero: The zero point.
        models: In the order of ``block.models``; any float dtype, equal shapes.
        parameters: Weights by role and the scope.
        block: A whole tensor.
        combine: From the weighted task matrices, all (m, n) float64, to one of that shape; it may use their memory.
        smallest: Matrices with a shorter side below this are not taken apart.

    Returns:
        Float32, the shape of the models: each entry rounded from float64 once.

    Raises:
        ValueError: As ``check_inputs``; a model has no weight; the block starts inside its tensor.
    """
    start, checked = check_inputs(zero, models, block)
    check_whole(block, parameters.method)
    weights = weight_list(parameters.weights, block)
    if start.numel() == 0 or not is_matrix(block, start.shape, parameters.svd_scope, smallest):
        return None
    delta = torch.empty_like(start, memory_format=torch.contiguous_format)
    shape = (-1, *start.shape[-2:])
    slices = zip(delta.view(shape), start.reshape(shape), *(m.reshape(shape) for m in checked), strict=True)
    for out, origin, *matrices in slices:
        out.copy_(combine([(matrix - origin).double().mul_(w) for matrix, w in zip(matrices, weights, strict=True)]))
    return delta


def add_matrix_delta(
    zero: Tensor | None, models: Sequence[Tensor], parameters: Spectral, block: Block, delta: Tensor | None
) -> Tensor:
    """Return zero + lambda * delta, or without a delta what ``parameters.rest`` says of the other tensors.

    Entries whose merged delta is 0 keep the bits of the zero point.

    Args:
        zero: The zero point.
        models: In the order of ``block.models``; any float dtype, equal shapes.
        parameters: Weights by role, lambda and the rest rule.
        block: A whole tensor.
        delta: From ``matrix_delta`` of the same tensors; it is not changed.

    Returns:
        Float32, the same shape, a new tensor.

    Raises:
        ValueError: As ``matrix_delta``.
    """
    start, checked = check_inputs(zero, models, block)
    if delta is not None:
        return add_delta(start, delta * parameters.lambda_)
    if parameters.rest == "zero":
        return start.clone()
    share = len(checked) if parameters.rest == "mean" else 1
    weights = weight_list(parameters.weights, block)
    return add_scaled(start, checked, [parameters.lambda_ * weight / share for weight in weights])
