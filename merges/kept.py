"""The masks that trimming and dropping methods put on task vectors, for callers that count what is kept."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from merges.block import Block
from merges.dare import dare_mask
from merges.exclusion import is_excluded
from merges.parameters import DareLinear, DareTies, Parameters, Ties
from merges.ties import kept_mask


def kept_masks(
    zero: Tensor, models: Sequence[Tensor], parameters: Parameters, block: Block
) -> dict[str, Tensor] | None:
    """Return the mask of each task vector by role: what ``Block.kept`` takes, so that it is made once.

    Args:
        zero: The zero point, float32.
        models: In the order of ``block.models``, float32.
        parameters: Of any method.
        block: As the method will see it.

    Returns:
        Bool, the shape of the models; None where the method keeps every entry or leaves the block out.

    Raises:
        ValueError: As ``kept_mask``.
    """
    if not isinstance(parameters, Ties | DareLinear | DareTies):
        return None
    if is_excluded(parameters.exclude, block.kind, block.name):
        return None
    masks = {}
    for role, model in zip(block.models, models, strict=True):
        if isinstance(parameters, Ties):
            masks[role] = kept_mask(model - zero, role, parameters, block)
        else:
            masks[role] = dare_mask(role, parameters.drop_rate, block, model)
    return masks
