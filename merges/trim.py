"""Keeping the largest entries of a task vector, exactly as many as asked for."""

from __future__ import annotations

import math

import torch
from torch import Tensor

CPU_CHUNK = 1 << 17
"""Entries counted at a time on a CPU, so that the temporaries of counting stay in the cache."""

MAGNITUDE = 0x7FFFFFFF
"""The bits of a float32 without its sign."""

INFINITY = 0x7F800000
"""The magnitude of infinity; those of NaN are above."""

LOW_BITS = 16
"""The 31 bits of a magnitude are counted in two steps: its upper 15 bits, then its lower 16."""

LOW_MASK = (1 << LOW_BITS) - 1


def kept_count(num_entries: int, density: float, at_least_one: bool = True) -> int:
    """Return how many of ``num_entries`` a density keeps: max(1, floor(density * num_entries)), and 0 of 0.

    The floor forgives the rounding of the product: .29 * 100 is 28.999999999999996 in float64 and counts as
        29, as
    1/3 * 300 counts as 100. It rounds up only when the product is within 2 float64 ulps of the integer.

    Args:
        num_entries: At least 0.
        density: In (0, 1].
        at_least_one: False gives the bare floor, so that small tensors may lose all entries.

    Raises:
        ValueError: density is outside (0, 1].

    Source: Yadav et al. 2023, arXiv 2306.01708, Algorithm 1.
    Deviations: mergekit and peft floor the float64 product as it is.
    """
    if not 0 < density <= 1:
        raise ValueError(f"density: expected in (0, 1], found {density}")
    count = min(num_entries, math.floor(density * num_entries * (1 + 2.0**-51)))
    return max(count, min(1, num_entries)) if at_least_one else count


def trim_counts(delta: Tensor, density: float, at_least_one: bool = True) -> tuple[int, int]:
    """Return how many entries a trim asks for, and keeps: fewer when delta has fewer that are not 0."""
    asked = kept_count(delta.numel(), density, at_least_one)
    return asked, min(asked, int(torch.count_nonzero(delta)))


def trim_mask(delta: Tensor, density: float, at_least_one: bool = True) -> Tensor:
    """Mark the entries of ``delta`` with the largest magnitudes, ``kept_count`` of them.

    Of equal magnitudes at the threshold those of the lowest flat index are kept. Zeros are never kept, so
    fewer are marked when delta has fewer entries that are not 0. The threshold is the exact k-th magnitude,
    found by counting instead of sorting.

    Args:
        delta: Float32, any shape, finite.
        density: In (0, 1].
        at_least_one: Keep one entry where density * n is below 1.

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
    count = kept_count(delta.numel(), density, at_least_one)
    if count == 0:
        return torch.zeros(delta.shape, dtype=torch.bool, device=delta.device)
    # Magnitudes of floats are ordered as their bits are, read as integers without the sign.
    bits = delta.contiguous().flatten().view(torch.int32)
    chunks = bits.split(CPU_CHUNK) if bits.device.type == "cpu" else (bits,)
    histogram = torch.zeros(1 << (31 - LOW_BITS), dtype=torch.int64, device=bits.device)
    for chunk in chunks:
        uppers = (chunk & MAGNITUDE).bitwise_right_shift_(LOW_BITS)
        histogram += torch.bincount(uppers, minlength=histogram.numel())
    if int(histogram[INFINITY >> LOW_BITS :].sum()):
        raise ValueError(f"expected finite entries, found {int((~torch.isfinite(delta)).sum())} that are not")
    upper, above = _bucket_of(histogram, count)
    mask = torch.empty(bits.shape, dtype=torch.bool, device=bits.device)
    open_places, open_bits = [], []
    first = 0
    for chunk in chunks:
        magnitudes = chunk & MAGNITUDE
        torch.gt(magnitudes, (upper << LOW_BITS) | LOW_MASK, out=mask[first : first + chunk.numel()])
        places = ((magnitudes >> LOW_BITS) == upper).nonzero().flatten()
        open_bits.append(magnitudes[places] & LOW_MASK)
        open_places.append(places + first)
        first += chunk.numel()
    places, lowers = torch.cat(open_places), torch.cat(open_bits)
    lower, above_here = _bucket_of(torch.bincount(lowers, minlength=LOW_MASK + 1), count - above)
    if upper == 0 and lower == 0:
        return delta != 0
    mask[places[lowers > lower]] = True
    mask[places[lowers == lower][: count - above - above_here]] = True
    return mask.view(delta.shape)


def _bucket_of(histogram: Tensor, rank: int) -> tuple[int, int]:
    """Return the bucket that holds the ``rank``-th largest, and how many lie in buckets above it."""
    from_top = histogram.flip(0).cumsum(0)
    place = int(torch.searchsorted(from_top, rank))
    above = int(from_top[place - 1]) if place else 0
    return histogram.numel() - 1 - place, above
