"""What a merge will do, tensor by tensor, before a byte is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from mergelab.checkpoints.headers import Checkpoint
from mergelab.engine.by_mergekit import check_installed
from mergelab.errors import PairingError
from mergelab.towers.pairing import PairedTensor, Pairing
from merges.block import Block, Survey
from merges.mergekit_methods import is_mergekit
from merges.parameters import Parameters, build, inputs_of

BLOCK_ENTRIES = 1 << 22
"""Entries a block holds for methods that work entry by entry: 16 MiB of float32 for every input."""

COPY = "copy"
"""The method of the endpoint controls: one parent sent through the stream as it is."""

MATCHED = "matched"
"""Key under which a gaussian control names the merge that it is as large as."""

OUTPUT_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True)
class Operation:
    """One way to fill the tower: a merge method with its parameters, or a plain copy of one parent.

    ``vectors`` are the models that give task vectors (or the models themselves for methods that average), in the
    order the method sees them; ``zero`` is what task vectors are measured from, None for copies and averages.
    """

    method: str
    vectors: tuple[str, ...]
    zero: str | None = None
    parameters: Parameters | None = None
    seed: int = 0
    matched: Operation | None = None
    """Of the gaussian control: the merge whose change of base gives the noise its size; None for that of the vlm."""

    @property
    def roles(self) -> tuple[str, ...]:
        """All models whose tensors are read."""
        zero = (self.zero,) if self.zero is not None else ()
        matched = self.matched.roles if self.matched is not None else ()
        return tuple(dict.fromkeys((*zero, *self.vectors, *matched)))

    @property
    def whole_tensors(self) -> bool:
        """True if the method needs a tensor at once; False if any slice of it will do."""
        return self.parameters is not None and self.parameters.scope == "tensor"


@dataclass(frozen=True)
class TensorJob:
    """One tower tensor of the output."""

    tensor: PairedTensor
    dtype: str
    """safetensors code of the output dtype, e.g. BF16"""

    @property
    def num_entries(self) -> int:
        """Entries of the output tensor."""
        return math.prod(self.tensor.shape)


def operation(
    method: str,
    values: Mapping[str, object],
    zero_point: str | None,
    *,
    conventions: str = "paper",
    seed: int = 0,
) -> Operation:
    """Return the operation of one point.

    Args:
        method: A name of ``merges.methods.METHODS``, ``mergekit:NAME``, or ``copy`` with ``{"of": role}``.
        values: Parameters by their YAML names; absent ones take the default of the conventions. ``gaussian`` may have
            ``matched``: a point (method, parameters, zero_point, conventions, seed).
        zero_point: ``ancestor`` or ``base``; None for copies and averages. From ancestor there are two task
            vectors, base and vlm, from base the vlm's alone.
        conventions: A preset of ``merges.parameters``.
        seed: For methods that draw.

    Raises:
        merges.parameters.ParameterErrors: All that is wrong with the parameters.
        MachineError: mergekit is needed and is missing or of another version.
    """
    if method == COPY:
        return Operation(method=COPY, vectors=(str(values["of"]),))
    if MATCHED in values:
        noise = {key: value for key, value in values.items() if key != MATCHED}
        point = cast("Mapping[str, Any]", values[MATCHED])
        merge = operation(
            point["method"],
            point["parameters"],
            point["zero_point"],
            conventions=point["conventions"],
            seed=point["seed"] or 0,
        )
        return replace(operation(method, noise, zero_point, seed=seed), matched=merge)
    if is_mergekit(method):
        check_installed()
    vectors, zero = inputs_of(method, zero_point)
    parameters = build(method, values, vectors, conventions)
    return Operation(method, vectors, zero, parameters, seed)


def block_of(job: TensorJob, operation: Operation, start: int, survey: Survey | None = None) -> Block:
    """Return how the merge of ``operation`` sees a part of a tensor that begins at flat index ``start``."""
    return Block(
        name=job.tensor.name,
        kind=job.tensor.kind,
        models=operation.vectors,
        seed=operation.seed,
        start=start,
        survey=survey,
    )


def plan_jobs(pairing: Pairing, checkpoints: Mapping[str, Checkpoint], output_dtype: str = "auto") -> list[TensorJob]:
    """Return one job for every tower tensor, in the order in which the vlm stores them on disk.

    Args:
        pairing: The total pairing of the models.
        checkpoints: The models by role, with headers.
        output_dtype: ``auto`` keeps the dtype of each vlm tensor; or ``float32``, ``bfloat16``, ``float16``.

    Raises:
        PairingError: A name of a dtype nobody knows.
    """
    if output_dtype != "auto" and output_dtype not in OUTPUT_DTYPES:
        known = ", ".join(OUTPUT_DTYPES)
        raise PairingError(f"output_dtype: {output_dtype} is not one of auto, {known}.")

    def place(paired: PairedTensor) -> tuple[str, int, int]:
        header = checkpoints["vlm"].header(paired.stored["vlm"])
        return str(header.path), header.start, 0 if header.view is None else header.view.offset

    return [
        TensorJob(paired, paired.dtype if output_dtype == "auto" else OUTPUT_DTYPES[output_dtype])
        for paired in sorted(pairing.tensors, key=place)
    ]
