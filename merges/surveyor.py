"""Passes before a merge: thresholds over the whole model or over a tensor, and the sign most entries elect.

Nothing is gathered but counts, so the result is the same for blocks of any size in any order, and no vector of
the size of the model, or of the tensor, exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from merges.block import Block, Survey
from merges.consensus import elected_balance
from merges.dare_ties import thinned_vectors
from merges.exclusion import is_excluded
from merges.masks import count, is_equal, places
from merges.parameters import DareTies, Parameters, Ties
from merges.ties import trimmed_vectors
from merges.trim import INFINITY, LOW_BITS, MAGNITUDE, bucket_of, count_lowers, count_uppers, kept_count, lowers_of
from merges.vectors import check_inputs, weight_list


@dataclass
class Counts:
    """What one pass has counted in some blocks: entries, histograms by role, and + less - signs."""

    entries: int = 0
    histograms: dict[str, Tensor] = field(default_factory=dict)
    balance: int = 0

    def add(self, other: Counts) -> None:
        """Add what was counted in other blocks."""
        self.entries += other.entries
        self.balance += other.balance
        for role, histogram in other.histograms.items():
            self.histograms[role] = self.histograms[role] + histogram if role in self.histograms else histogram


class Surveyor:
    """Counts over the whole model what ``ties`` and ``dare_ties`` need to know of it.

    For trim_scope model, with n the entries of all merged tensors and k = min(n, floor(density n) + 1): the
    threshold of each vector is its exact k-th magnitude. The first pass counts the upper 15 bits of all
    magnitudes, the second the lower 16 bits of those in the bucket that holds the k-th. For zero_sum majority a
    last pass counts the signs that the kept entries elect.

    Use: for each of ``num_passes`` passes call ``count`` with every block, from as many threads as you like, and
    then ``end_pass`` with the counts added up. ``survey`` is then whole. Memory: two tables of 2^16 counts for each
    vector, and for each block in work.

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
        self._buckets: dict[str, tuple[int, int]] = {}

    def count(self, block: Block, zero: Tensor | None, models: Sequence[Tensor]) -> Counts:
        """Count one block in the current pass; nothing is remembered.

        Args:
            block: The tensor, or the slice of it, as the method will see it; in the pass of the signs with the
                survey of its tensor, if it is a slice and trim_scope is tensor.
            zero: The zero point.
            models: In the order of ``block.models``.

        Raises:
            ValueError: As ``check_inputs``; a task vector leaves the range of float32.
        """
        parameters = self.parameters
        assert isinstance(parameters, Ties | DareTies)
        if is_excluded(parameters.exclude, block.kind, block.name):
            return Counts()
        start, checked = check_inputs(zero, models, block)
        what = self._passes[0]
        if what == "signs":
            known = block if block.survey is not None else replace(block, survey=self.survey)
            if isinstance(parameters, Ties):
                kept = trimmed_vectors(start, checked, parameters, known)
            else:
                kept = thinned_vectors(start, checked, parameters, known)
            return Counts(balance=elected_balance(kept, weight_list(parameters.weights, block), parameters.elect))
        histograms = {}
        for role, model in zip(block.models, checked, strict=True):
            delta = model - start
            histograms[role] = count_uppers(delta) if what == "uppers" else count_lowers(delta, self._buckets[role][0])
        return Counts(start.numel(), histograms)

    def end_pass(self, counts: Counts) -> None:
        """Draw from the counts of all blocks what the next pass, or the merge, needs."""
        what = self._passes.pop(0)
        if what == "signs":
            self.survey = replace(self.survey, majority=(counts.balance > 0) - (counts.balance < 0))
            return
        assert isinstance(self.parameters, Ties)
        self._num_entries = counts.entries
        rank = kept_count(self._num_entries, self.parameters.density, self.parameters.kept_count)
        if what == "uppers":
            self._buckets = {role: bucket_of(histogram, rank) for role, histogram in counts.histograms.items()}
            return
        thresholds = {}
        for role, histogram in counts.histograms.items():
            upper, above = self._buckets[role]
            thresholds[role] = (upper << LOW_BITS) | bucket_of(histogram, rank - above)[0]
        self.survey = Survey(self._num_entries, thresholds, asked=dict.fromkeys(self.models, rank))


WAITING_ENTRIES = 1 << 20
"""Entries that may wait to be counted: 4 MiB."""

Parts = Callable[[], Iterator[tuple[int, Mapping[str, Tensor]]]]
"""Called once a pass: yields the task vectors of one tensor in slices, in order, as (flat index, delta by role)."""


def survey_tensor(parameters: Ties, num_entries: int, parts: Parts) -> Survey:
    """Return the thresholds at which trim_scope tensor cuts the task vectors of one tensor, seen in slices.

    With them ``ties`` keeps in any slice the entries that ``merges.trim.trim_mask`` keeps in the whole tensor: those
    above the exact k-th magnitude, and of those at it the first ones in flat order, or with kept_count threshold all.

    Args:
        parameters: Density and kept count.
        num_entries: Entries of the tensor.
        parts: The slices; float32, equal cuts in every pass.

    Raises:
        ValueError: A task vector leaves the range of float32.

    Source: Yadav et al. 2023, TIES-Merging, arXiv 2306.01708, Algorithm 1, step 1.
    Deviations: as ``trim_mask``.
    """
    rank = kept_count(num_entries, parameters.density, parameters.kept_count)
    uppers = _counted_uppers(parts)
    if rank == 0:
        return Survey(num_entries, dict.fromkeys(uppers, INFINITY), asked=dict.fromkeys(uppers, 0))
    buckets = {role: bucket_of(histogram, rank) for role, histogram in uppers.items()}
    lowers = _counted_lowers(parts, {role: upper for role, (upper, _) in buckets.items()})
    thresholds, wanted = {}, {}
    for role, histogram in lowers.items():
        upper, above = buckets[role]
        lower, above_here = bucket_of(histogram, rank - above)
        thresholds[role] = (upper << LOW_BITS) | lower
        if parameters.kept_count != "threshold" and thresholds[role]:
            wanted[role] = (rank - above - above_here, int(histogram[lower]))
    few = {role: kept for role, (kept, found) in wanted.items() if kept < found}
    return Survey(num_entries, thresholds, _last_kept(parts, thresholds, few), dict.fromkeys(thresholds, rank))


def _counted_uppers(parts: Parts) -> dict[str, Tensor]:
    counts: dict[str, Tensor] = {}
    for _, deltas in parts():
        for role, delta in deltas.items():
            try:
                here = count_uppers(delta)
            except ValueError as error:
                raise ValueError(f"task vector of {role}: {error}") from error
            counts[role] = counts[role].add_(here) if role in counts else here
    return counts


def _counted_lowers(parts: Parts, buckets: Mapping[str, int]) -> dict[str, Tensor]:
    counts: dict[str, Tensor] = {}
    waiting: dict[str, list[Tensor]] = {role: [] for role in buckets}

    def count_waiting(role: str) -> None:
        here = torch.bincount(torch.cat(waiting[role]), minlength=1 << LOW_BITS)
        counts[role] = counts[role].add_(here) if role in counts else here
        waiting[role].clear()

    for _, deltas in parts():
        for role, delta in deltas.items():
            # A slice has few entries in the bucket and the table many rows, so slices are put together.
            waiting[role].append(lowers_of(delta, buckets[role]))
            if sum(lowers.numel() for lowers in waiting[role]) > WAITING_ENTRIES:
                count_waiting(role)
    for role in [role for role in buckets if waiting[role]]:
        count_waiting(role)
    return counts


def _last_kept(parts: Parts, thresholds: Mapping[str, int], wanted: Mapping[str, int]) -> dict[str, int]:
    """Return, by role, the flat index of the entry at the threshold that is the ``wanted``-th of them in order."""
    left, last = dict(wanted), dict[str, int]()
    for start, deltas in parts() if left else ():
        for role in [role for role in left if role not in last]:
            at_threshold = is_equal(deltas[role].flatten().view(torch.int32) & MAGNITUDE, thresholds[role])
            found = count(at_threshold)
            if found >= left[role]:
                last[role] = start + int(places(at_threshold)[left[role] - 1])
            left[role] -= found
        if len(last) == len(left):
            break
    return last


def threshold_value(bits: int) -> float:
    """Return a threshold of a survey as the number it stands for."""
    return float(torch.tensor(bits, dtype=torch.int32).view(torch.float32))
