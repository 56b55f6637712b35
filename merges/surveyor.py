"""Passes over all tensors before a merge: thresholds over the whole model, and the sign most entries elect.

Nothing is gathered but counts, so the result is the same for blocks of any size in any order, and no vector of
the size of the model exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from merges.block import Block, Survey
from merges.consensus import elected_balance
from merges.dare_ties import thinned_vectors
from merges.exclusion import is_excluded
from merges.parameters import DareTies, Parameters, Ties
from merges.ties import trimmed_vectors
from merges.trim import LOW_BITS, bucket_of, count_lowers, count_uppers, kept_count
from merges.vectors import check_inputs, weight_list


class Surveyor:
    """Counts over the whole model what ``ties`` and ``dare_ties`` need to know of it.

    For trim_scope model, with n the entries of all merged tensors and k = min(n, floor(density n) + 1): the
    threshold of each vector is its exact k-th magnitude. The first pass counts the upper 15 bits of all
    magnitudes, the second the lower 16 bits of those in the bucket that holds the k-th. For zero_sum majority a
    last pass counts the signs that the kept entries elect.

    Use: for each of ``num_passes`` passes call ``add`` with every block and then ``end_pass``. ``survey`` is then
    whole. Memory: two tables of 2^16 counts for each vector.

    Source: Yadav et al. 2023, TIES-Merging, arXiv 2306.01708, Algorithm 1, and its authors' code: entries at or
        above the k-th magnitude of the flattened model are kept; zero sums take the majority sign.
    Deviations: entries that are 0 are never kept.
    """

    def __init__(self, parameters: Parameters, models: Sequence[str]) -> None:
        """Take the parameters of a method and the roles of its vectors, in order."""
        self.parameters = parameters
        self.models = tuple(models)
        self.survey = Survey()
        self._passes: list[str] = []
        if isinstance(parameters, Ties) and parameters.trim_scope == "model":
            self._passes = ["uppers", "lowers"]
        if isinstance(parameters, Ties | DareTies) and parameters.zero_sum == "majority" and len(self.models) > 1:
            self._passes.append("signs")
        self.num_passes = len(self._passes)
        self._num_entries = 0
        self._counts: dict[str, Tensor] = {}
        self._buckets: dict[str, tuple[int, int]] = {}
        self._balance = 0

    def add(self, block: Block, zero: Tensor | None, models: Sequence[Tensor]) -> None:
        """Count one block in the current pass.

        Args:
            block: The tensor, or the slice of it, as the method will see it.
            zero: The zero point.
            models: In the order of ``block.models``.

        Raises:
            ValueError: As ``check_inputs``; a task vector leaves the range of float32.
        """
        parameters = self.parameters
        assert isinstance(parameters, Ties | DareTies)
        if is_excluded(parameters.exclude, block.kind, block.name):
            return
        start, checked = check_inputs(zero, models, block)
        what = self._passes[0]
        if what == "signs":
            known = replace(block, survey=self.survey)
            if isinstance(parameters, Ties):
                kept = trimmed_vectors(start, checked, parameters, known)
            else:
                kept = thinned_vectors(start, checked, parameters, known)
            self._balance += elected_balance(kept, weight_list(parameters.weights, block), parameters.elect)
            return
        self._num_entries += start.numel() if what == "uppers" else 0
        for role, model in zip(block.models, checked, strict=True):
            delta = model - start
            counts = count_uppers(delta) if what == "uppers" else count_lowers(delta, self._buckets[role][0])
            self._counts[role] = self._counts[role] + counts if role in self._counts else counts

    def end_pass(self) -> None:
        """Draw from the counts what the next pass, or the merge, needs."""
        what = self._passes.pop(0)
        if what == "signs":
            self.survey = replace(self.survey, majority=(self._balance > 0) - (self._balance < 0))
            return
        assert isinstance(self.parameters, Ties)
        counts, self._counts = self._counts, {}
        rank = kept_count(self._num_entries, self.parameters.density, self.parameters.kept_count)
        if what == "uppers":
            self._buckets = {role: bucket_of(histogram, rank) for role, histogram in counts.items()}
            return
        thresholds = {}
        for role, histogram in counts.items():
            upper, above = self._buckets[role]
            thresholds[role] = (upper << LOW_BITS) | bucket_of(histogram, rank - above)[0]
        self.survey = Survey(self._num_entries, thresholds, dict.fromkeys(self.models, rank))


def threshold_value(bits: int) -> float:
    """Return a threshold of a survey as the number it stands for."""
    return float(torch.tensor(bits, dtype=torch.int32).view(torch.float32))
