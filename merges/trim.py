"""Keeping the largest entries of a task vector, exactly as many as asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from merges.masks import count, is_above, is_below, places, reaches_bound

CPU_CHUNK = 1 << 18
"""Entries counted at a time on a CPU, so that the temporaries of counting stay in the cache."""

MAGNITUDE = 0x7FFFFFFF
"""The bits of a float32 without its sign."""

INFINITY = 0x7F800000
"""The magnitude of infinity; those of NaN are above."""

LOW_BITS = 16
"""The 31 bits of a magnitude are counted in two steps: its upper 15 bits, then its lower 16."""

LOW_MASK = (1 << LOW_BITS) - 1


def kept_count(num_entries: int, density: float, rule: str = "at_least_one") -> int:
    """Return how many of ``num_entries`` a density keeps, and 0 of 0.

        max(1, floor(density * num_entries))                at_least_one
        floor(density * num_entries)                        floor: small tensors may lose all entries
        min(num_entries, floor(density * num_entries) + 1)  threshold: the rank of the smallest kept magnitude

    The floor forgives the rounding of the product: .29 * 100 is 28.999999999999996 in float64 and counts as 29.
    It rounds up only when the product is within about 2 float64 ulps of the integer.

    Args:
        num_entries: At least 0.
        density: In (0, 1].
        rule: at_least_one, floor or threshold.

    Raises:
        ValueError: density is outside (0, 1].

    Source: Yadav et al. 2023, arXiv 2306.01708, Algorithm 1; threshold is the rule of its authors' code.
    Deviations: mergekit and peft floor the float64 product as it is.
    """
    if not 0 < density <= 1:
        raise ValueError(f"density: expected in (0, 1], found {density}")
    count = min(num_entries, math.floor(density * num_entries * (1 + 2.0**-51)))
    if rule == "threshold":
        return min(num_entries, count + 1)
    return max(count, min(1, num_entries)) if rule == "at_least_one" else count


def trim_counts(delta: Tensor, density: float, rule: str = "at_least_one") -> tuple[int, int]:
    """Return how many entries a trim asks for, and keeps: fewer when delta has fewer that are not 0.

    By threshold it keeps more when magnitudes equal the threshold.
    """
    asked = kept_count(delta.numel(), density, rule)
    if rule == "threshold":
        return asked, count(trim_mask(delta, density, rule))
    return asked, min(asked, int(torch.count_nonzero(delta)))


def trim_mask(delta: Tensor, density: float, rule: str = "at_least_one") -> Tensor:
    """Mark the entries of ``delta`` with the largest magnitudes, ``kept_count`` of them.

    Of equal magnitudes at the threshold those of the lowest flat index are kept, or with rule threshold all. Zeros
    are never kept, so fewer are marked when delta has fewer entries that are not 0. The threshold is the exact k-th
    magnitude, found by counting instead of sorting.

    Args:
        delta: Float32, any shape, finite.
        density: In (0, 1].
        rule: As in ``kept_count``.

    Returns:
        Bool, the shape of delta. Memory: the mask, a bounded part of delta at a time, and 12 bytes for each
        entry that shares the upper 15 bits of the threshold, which are few unless magnitudes are.

    Raises:
        ValueError: density is outside (0, 1], delta is not float32, or has NaN or infinite entries.

    Source: Yadav et al. 2023, TIES-Merging, arXiv 2306.01708, Algorithm 1, step 1.
    Deviations: per tensor, where the paper trims the whole vector; the order among ties, which the paper
        leaves open.
    """
    if delta.dtype != torch.float32:
        raise ValueError(f"expected float32 to trim, found {delta.dtype}")
    rank = kept_count(delta.numel(), density, rule)
    if rank == 0:
        return torch.zeros(delta.shape, dtype=torch.bool, device=delta.device)
    histogram = count_uppers(delta)
    bits, chunks = magnitude_chunks(delta)
    upper, above = bucket_of(histogram, rank)
    mask = torch.empty(bits.shape, dtype=torch.bool, device=bits.device)
    open_places, open_bits = [], []
    first = 0
    for chunk in chunks:
        magnitudes = chunk & MAGNITUDE
        mask[first : first + chunk.numel()] = is_above(magnitudes, (upper << LOW_BITS) | LOW_MASK)
        here, lowers = _of_bucket(magnitudes, upper)
        open_bits.append(lowers)
        open_places.append(here + first)
        first += chunk.numel()
    bucket, lowers = torch.cat(open_places), torch.cat(open_bits)
    lower, above_here = bucket_of(torch.bincount(lowers, minlength=LOW_MASK + 1), rank - above)
    if upper == 0 and lower == 0:
        return delta != 0
    if rule == "threshold":
        mask[bucket[lowers >= lower]] = True
        return mask.view(delta.shape)
    mask[bucket[lowers > lower]] = True
    mask[bucket[lowers == lower][: rank - above - above_here]] = True
    return mask.view(delta.shape)


def magnitude_chunks(delta: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
    """Return a float32 tensor as flat int32 bits, and the same in parts of a size that suits its device.

    Magnitudes of floats are ordered as their bits are, read as integers without the sign.
    """
    bits = delta.contiguous().flatten().view(torch.int32)
    return bits, bits.split(CPU_CHUNK) if bits.device.type == "cpu" else (bits,)


def count_uppers(delta: Tensor) -> Tensor:
    """Return how many entries have which upper 15 bits of magnitude, int64, one count a bucket.

    Raises:
        ValueError: An entry is NaN or infinite.
    """
    bits, chunks = magnitude_chunks(delta)
    histogram = torch.zeros(1 << (31 - LOW_BITS), dtype=torch.int64, device=bits.device)
    for chunk in chunks:
        uppers = (chunk & MAGNITUDE).bitwise_right_shift_(LOW_BITS)
        histogram += torch.bincount(uppers, minlength=histogram.numel())
    if int(histogram[INFINITY >> LOW_BITS :].sum()):
        raise ValueError(f"expected finite entries, found {int((~torch.isfinite(delta)).sum())} that are not")
    return histogram


def count_lowers(delta: Tensor, upper: int) -> Tensor:
    """Return how many entries of the bucket ``upper`` have which lower 16 bits of magnitude, int64."""
    return torch.bincount(lowers_of(delta, upper), minlength=LOW_MASK + 1)


def lowers_of(delta: Tensor, upper: int) -> Tensor:
    """Return the lower 16 bits of the magnitudes in the bucket ``upper``, int32, in flat order."""
    _, chunks = magnitude_chunks(delta)
    return torch.cat([_of_bucket(chunk & MAGNITUDE, upper)[1] for chunk in chunks])


def _of_bucket(magnitudes: Tensor, upper: int) -> tuple[Tensor, Tensor]:
    """Return the flat indices of the magnitudes with these upper 15 bits, and their lower 16 bits."""
    lowers = magnitudes.bitwise_xor(upper << LOW_BITS)  # below 2^16 only where the upper bits are these
    here = places(is_below(lowers, LOW_MASK + 1))
    return here, lowers[here]


def reaches(delta: Tensor, threshold: int, last: int | None = None) -> Tensor:
    """Mark the entries whose magnitude, as bits, is at least ``threshold``, and not 0.

    Args:
        delta: Float32, any shape.
        threshold: The 31 bits of a float32 magnitude.
        last: The flat index of the last entry at the threshold that is marked; it may lie before or behind the
            tensor. None marks them all.

    Returns:
        Bool, the shape of delta.
    """
    magnitudes = delta.contiguous().view(torch.int32) & MAGNITUDE
    low = max(threshold, 1)
    end = delta.numel() if last is None else min(max(last + 1, 0), delta.numel())
    if end == delta.numel():
        return reaches_bound(magnitudes, low)
    if end == 0:
        return reaches_bound(magnitudes, low + 1)
    flat = magnitudes.flatten()
    mask = torch.cat((reaches_bound(flat[:end], low), reaches_bound(flat[end:], low + 1)))
    return mask.view(delta.shape)


def bucket_of(histogram: Tensor, rank: int) -> tuple[int, int]:
    """Return the bucket that holds the ``rank``-th largest, and how many lie in buckets above it."""
    from_top = histogram.flip(0).cumsum(0)
    place = int(torch.searchsorted(from_top, rank))
    above = int(from_top[place - 1]) if place else 0
    return histogram.numel() - 1 - place, above
