"""What methods on singular values need again at another lambda, kept in memory so that a sweep decomposes once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from mergelab.engine.inputs import KEEP_SHARE_OF_FREE_MEMORY, free_memory_bytes
from mergelab.engine.plan import Operation
from merges.block import Block
from merges.exclusion import is_excluded
from merges.matrices import Spectral
from merges.methods import SPECTRAL


@dataclass
class UnscaledDeltas:
    """Keeps the merged task matrices of one operation before lambda, on the CPU, float32.

    Points that differ in lambda alone share them; the first point of another operation throws them away. When they
    would take more than ``limit_bytes`` the rest is computed anew at every point: the result is the same.
    """

    limit_bytes: int | None = None
    """None takes ``KEEP_SHARE_OF_FREE_MEMORY`` of what is free when the first one is kept."""

    _operation: Operation | None = field(default=None, init=False, repr=False)
    _kept: dict[str, torch.Tensor] = field(default_factory=dict, init=False, repr=False)
    _bytes: int = field(default=0, init=False, repr=False)

    def of(
        self, operation: Operation, zero: torch.Tensor | None, models: Sequence[torch.Tensor], block: Block
    ) -> torch.Tensor | None:
        """Return the unscaled delta of a whole tensor; None where the method takes no matrix apart.

        Raises:
            ValueError: As the method.
        """
        parameters = operation.parameters
        if not isinstance(parameters, Spectral) or parameters.lambda_ == 0:
            return None
        if is_excluded(parameters.exclude, block.kind, block.name):
            return None
        family = replace(operation, parameters=replace(parameters, lambda_=1.0))
        if family != self._operation:
            self._operation, self._bytes = family, 0
            self._kept.clear()
        if self.limit_bytes is None:
            self.limit_bytes = int(KEEP_SHARE_OF_FREE_MEMORY * free_memory_bytes())
        if block.name in self._kept:
            return self._kept[block.name].to(models[0].device)
        delta = SPECTRAL[operation.method](zero, models, parameters, block)
        if delta is not None and self._bytes + delta.nbytes <= self.limit_bytes:
            self._kept[block.name] = delta.cpu()
            self._bytes += delta.nbytes
        return delta
