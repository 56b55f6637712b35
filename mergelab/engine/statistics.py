"""What is counted while a merge streams by: shares kept and changed, and how the task vectors lie."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mergelab.engine.by_mergekit import RANDOM_STREAM
from mergelab.engine.geometry import Plane
from mergelab.engine.plan import Operation, TensorJob
from merges.block import Survey
from merges.masks import count, differs
from merges.mergekit_methods import ByMergekit
from merges.parameters import DareLinear, DareTies
from merges.surveyor import threshold_value


@dataclass
class MergeStatistics:
    """Counters of one merge; ``record`` turns them into the body of ``merge.json``."""

    operation: Operation
    survey: Survey | None = None
    num_tensors: int = 0
    merged_entries: int = 0
    copied_entries: int = 0
    changed: Counter[str] = field(default_factory=Counter)
    entries: Counter[str] = field(default_factory=Counter)
    changed_kinds: Counter[tuple[str, str]] = field(default_factory=Counter)
    rounded_back: int = 0
    vector_entries: int = 0
    """Of all task vectors that are trimmed or thinned."""
    asked_entries: int = 0
    kept_entries: int = 0
    _plane: Plane = field(default_factory=Plane)

    def add(
        self,
        job: TensorJob,
        models: Mapping[str, torch.Tensor],
        merged: torch.Tensor,
        rounded: torch.Tensor,
        kept: Mapping[str, torch.Tensor] | None = None,
        same_dtype: Collection[str] = (),
    ) -> None:
        """Count one block: float32 inputs by role, the float32 result, and the result as it is stored.

        Args:
            job: The tensor.
            models: Inputs by role.
            merged: The result before rounding.
            rounded: The result after it.
            kept: The masks that a trimming or dropping method put on the task vectors.
            same_dtype: Roles whose tensor is stored in the dtype of ``rounded``.
        """
        size, kind, zero = merged.numel(), job.tensor.kind, self.operation.zero
        self.merged_entries += size
        self.entries[kind] += size
        written = rounded.to(torch.float32).view(merged.shape)
        for role, model in models.items():
            exact = role in same_dtype or rounded.dtype == torch.float32
            stored = model if exact else model.to(rounded.dtype).to(torch.float32)
            changed = count(differs(written, stored))
            self.changed[role] += changed
            self.changed_kinds[role, kind] += changed
            if role == zero:
                self.rounded_back += count(differs(merged, model)) - changed
        for mask in (kept or {}).values():
            self.vector_entries += mask.numel()
            self.kept_entries += count(mask)
        if zero is not None and len(self.operation.vectors) == 2:
            first, second = ((models[role] - models[zero]).reshape(-1) for role in self.operation.vectors)
            # Three more products: worth it beside a decomposition or a sort, not beside an addition.
            merge = (merged - models[zero]).reshape(-1) if self.operation.whole_tensors else None
            self._plane.add(first, second, merge)

    def add_statistics(self, other: MergeStatistics) -> None:
        """Add what was counted of other blocks of the same merge; the order does not matter."""
        self.num_tensors += other.num_tensors
        self.merged_entries += other.merged_entries
        self.copied_entries += other.copied_entries
        self.changed.update(other.changed)
        self.entries.update(other.entries)
        self.changed_kinds.update(other.changed_kinds)
        self.rounded_back += other.rounded_back
        self.vector_entries += other.vector_entries
        self.asked_entries += other.asked_entries
        self.kept_entries += other.kept_entries
        self._plane.add_plane(other._plane)

    def cosine(self) -> float | None:
        """Return the cosine of the two task vectors over all merged entries; None without two non-zero vectors."""
        return self._plane.cosine()

    def record(self) -> dict[str, Any]:
        """Return the counters as JSON-able values; shares are of the merged entries, in 0..1.

        ``changed_share_by_kind`` and ``rounded_back_share`` are told against the zero point, and None without one;
        ``changed_share_by_model_and_kind`` against every model that was read. ``outside_span_share`` is
        ``Plane.outside_share``, for methods that see whole tensors and two task vectors.
        """
        total = max(1, self.merged_entries)
        zero = self.operation.zero
        has_zero = zero is not None
        by_model = {
            role: {kind: self.changed_kinds[role, kind] / count for kind, count in sorted(self.entries.items())}
            for role in self.changed
        }
        parameters = self.operation.parameters
        by_mergekit = isinstance(parameters, ByMergekit) and parameters.draws
        survey = self.survey or Survey()
        asked = self.asked_entries + sum(survey.asked.values())
        if isinstance(parameters, DareLinear | DareTies):
            asked = round(self.vector_entries * (1 - parameters.drop_rate))
        return {
            "method": self.operation.method,
            "zero": zero,
            "vectors": list(self.operation.vectors),
            "tensors_merged": self.num_tensors,
            "entries_merged": self.merged_entries,
            "entries_copied": self.copied_entries,
            "changed_share": {role: count / total for role, count in self.changed.items()},
            "changed_share_by_kind": by_model.get(zero, {}) if zero is not None else None,
            "changed_share_by_model_and_kind": by_model,
            "rounded_back_share": self.rounded_back / total if has_zero else None,
            "asked_share": asked / self.vector_entries if self.vector_entries else None,
            "kept_share": self.kept_entries / self.vector_entries if self.vector_entries else None,
            "trim_thresholds": {role: threshold_value(bits) for role, bits in survey.thresholds.items()} or None,
            "majority_sign": None if self.survey is None else survey.majority,
            "task_vector_cosine": self.cosine(),
            "outside_span_share": self._plane.outside_share(),
            "random_stream": RANDOM_STREAM if by_mergekit else None,
        }
