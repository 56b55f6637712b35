"""What is counted while a merge streams by: shares kept and changed, and how the task vectors lie."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mergelab.engine.by_mergekit import RANDOM_STREAM
from mergelab.engine.geometry import Plane
from mergelab.engine.plan import Operation, TensorJob, block_of
from merges.block import Survey
from merges.dare import dare_mask
from merges.exclusion import is_excluded
from merges.mergekit_methods import ByMergekit
from merges.parameters import DareLinear, DareTies, Ties
from merges.surveyor import threshold_value
from merges.ties import kept_mask
from merges.trim import trim_counts


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
    asked_entries: int = 0
    kept_entries: int = 0
    _plane: Plane = field(default_factory=Plane)

    def add(
        self,
        job: TensorJob,
        models: Mapping[str, torch.Tensor],
        merged: torch.Tensor,
        rounded: torch.Tensor,
        start: int,
    ) -> None:
        """Count one block: float32 inputs by role, the float32 result, and the flat result as it is stored.

        ``start`` is the flat index of the first entry, as the method saw it.
        """
        size, kind, zero = merged.numel(), job.tensor.kind, self.operation.zero
        self.merged_entries += size
        self.entries[kind] += size
        for role, model in models.items():
            changed = int((rounded != model.reshape(-1).to(rounded.dtype)).sum())
            self.changed[role] += changed
            self.changed_kinds[role, kind] += changed
            if role == zero:
                self.rounded_back += int((merged != model).sum()) - changed
        if zero is not None:
            self._count_kept(job, models, start)
        if zero is not None and len(self.operation.vectors) == 2:
            first, second = ((models[role] - models[zero]).reshape(-1) for role in self.operation.vectors)
            # Three more products: worth it beside a decomposition or a sort, not beside an addition.
            merge = (merged - models[zero]).reshape(-1) if self.operation.whole_tensors else None
            self._plane.add(first, second, merge)

    def _count_kept(self, job: TensorJob, models: Mapping[str, torch.Tensor], start: int) -> None:
        """Count the entries of the task vectors that a trimming or dropping method asks for and keeps."""
        parameters, zero = self.operation.parameters, self.operation.zero
        assert zero is not None
        if not isinstance(parameters, Ties | DareLinear | DareTies):
            return
        if is_excluded(parameters.exclude, job.tensor.kind, job.tensor.name):
            return
        block = block_of(job, self.operation, start, self.survey)
        for role in self.operation.vectors:
            size = models[role].numel()
            if isinstance(parameters, Ties) and parameters.trim_scope == "model":
                asked = 0  # of the whole model: from the survey, in the record
                kept = int(kept_mask(models[role] - models[zero], role, parameters, block).sum())
            elif isinstance(parameters, Ties):
                asked, kept = trim_counts(models[role] - models[zero], parameters.density, parameters.kept_count)
            else:
                kept = int(dare_mask(role, parameters.drop_rate, block, models[role]).sum())
                asked = round(size * (1 - parameters.drop_rate))
            self.vector_entries += size
            self.asked_entries += asked
            self.kept_entries += kept

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
