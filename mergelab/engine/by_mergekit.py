"""Hands one tensor to mergekit and takes the merged one back. The only place that imports mergekit."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from mergelab.errors import MachineError
from merges.block import Block
from merges.mergekit_methods import PREFIX, VERSION, ByMergekit
from merges.random import stream_key
from merges.vectors import check_inputs, check_models

RANDOM_STREAM = "mergekit: torch's global generator, seeded by (seed, tensor name) for every tensor"
"""How records call the draws of a method of mergekit. They differ between a CPU and a GPU."""


def check_installed() -> None:
    """Refuse to call another version of mergekit than the one that the table of its methods describes.

    Raises:
        MachineError: mergekit is missing or of another version.
    """
    try:
        found = version("mergekit")
    except PackageNotFoundError:
        found = "none"
    if found != VERSION:
        raise MachineError(
            f"mergekit: expected version {VERSION} for methods {PREFIX}NAME, found {found}. "
            f"Install it: pip install mergekit=={VERSION}"
        )


def draw_key(block: Block) -> int:
    """Return the seed of torch's generators for one tensor; every method draws from the same state."""
    return stream_key("mergekit", block.seed, "all", block.name)


def merge_by_mergekit(
    zero: torch.Tensor | None, models: Sequence[torch.Tensor], parameters: ByMergekit, block: Block
) -> torch.Tensor:
    """Return what mergekit makes of one whole tensor, in float32.

    The zero point is its ``base_model``, the models are the other inputs in the order of ``block.models``. Around the
    call torch's global generators are set to a state made from (seed, tensor name) alone and put back afterwards,
    so that a random mask does not depend on the other tensors, their order, or what ran before.

    Args:
        zero: The zero point; None for methods that are given no base model.
        models: In the order of ``block.models``; float32, whole tensors, equal shapes.
        parameters: The name of the method and its values.
        block: Name, models and seed.

    Raises:
        ValueError: As ``merges.vectors.check_inputs``; mergekit refuses the tensors, or returns NaN or infinity.
    """
    if zero is None:
        inputs = check_models(models, block)
    else:
        start, others = check_inputs(zero, models, block)
        inputs = [start, *others]
    if inputs[0].numel() == 0:
        return inputs[0].clone()
    ids = [*(("zero point",) if zero is not None else ()), *block.models]
    device = inputs[0].device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(draw_key(block))
        try:
            merged: torch.Tensor = _merge_methods().merge_tensors(
                inputs,
                parameters.name,
                parameters=dict(parameters.values),
                ids=ids,
                base_index=0 if zero is not None else None,
                name=block.name,
                dtype=torch.float32,
                out_dtype=torch.float32,
            )
        except torch.OutOfMemoryError:
            raise
        except (ValueError, TypeError, RuntimeError) as error:
            raise ValueError(f"mergekit refuses it: {error}") from error
    if not bool(torch.isfinite(merged).all()):
        count = int((~torch.isfinite(merged)).sum())
        raise ValueError(f"mergekit returned {count} NaN or infinite entries")
    return merged


def _merge_methods() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the libraries that mergekit imports
        from mergekit import merge_methods

    return merge_methods
