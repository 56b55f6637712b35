"""Random bits, masks and noise that depend on (seed, model, tensor name, flat index) and nothing else.

There is no generator and no state: the draw of an entry is a hash of its index under a key of the other
three, so slices, order, threads and devices do not matter. Masks are integer arithmetic and equal on every
device.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CPU_CHUNK = 1 << 17
"""Entries worked on at a time on a CPU: 1 MiB of int64 stays in the cache, twice as fast as whole tensors."""

DEVICE_CHUNK = 1 << 24
"""The same on an accelerator, where large kernels are the fast ones and memory is the limit."""


def stream_key(purpose: str, seed: int, model: str, name: str) -> int:
    """Return the 64-bit key of a stream, as a signed integer: BLAKE2b over the four as a JSON list."""
    text = json.dumps([purpose, int(seed), model, name])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def random_bits(key: int, start: int, stop: int, device: torch.device | str = "cpu") -> Tensor:
    """Return 64 random bits for every index of [start, stop), as int64 over its whole range.

    bits(i) = mix(key + i * 0x9E3779B97F4A7C15), the output function of SplitMix64, modulo 2^64.

    Source: Steele, Lea and Flood 2014, Fast splittable pseudorandom number generators.
    Deviations: the counter is the flat index, so entry i can be had without the entries before it.
    """
    if torch.device(device).type == "cpu":
        return torch.from_numpy(_bits_by_numpy(key, start, stop).view(np.int64))
    return _bits_by_torch(key, start, stop, device)


def _bits_by_numpy(key: int, start: int, stop: int) -> NDArray[np.uint64]:
    """Return the bits as unsigned numbers: on a CPU numpy multiplies and shifts them in half of torch's time."""
    bits = _ramp(stop - start) + np.uint64((key + start * 0x9E3779B97F4A7C15) % 2**64)
    shifted = np.right_shift(bits, np.uint64(30))
    bits ^= shifted
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= np.right_shift(bits, np.uint64(27), out=shifted)
    bits *= np.uint64(0x94D049BB133111EB)
    bits ^= np.right_shift(bits, np.uint64(31), out=shifted)
    return bits


@lru_cache(maxsize=4)
def _ramp(count: int) -> NDArray[np.uint64]:
    """Return i * 0x9E3779B97F4A7C15 for i below ``count``: the same for every part of every tensor."""
    return np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def _bits_by_torch(key: int, start: int, stop: int, device: torch.device | str) -> Tensor:
    bits = torch.arange(start, stop, dtype=torch.int64, device=device)
    bits.mul_(_signed(0x9E3779B97F4A7C15)).add_(key)
    bits.bitwise_xor_(_shift_right(bits, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
    bits.bitwise_xor_(_shift_right(bits, 27)).mul_(_signed(0x94D049BB133111EB))
    return bits.bitwise_xor_(_shift_right(bits, 31))


def keep_mask(key: int, start: int, count: int, drop_rate: float, device: torch.device | str = "cpu") -> Tensor:
    """Draw which of ``count`` entries from index ``start`` on are kept, each with probability 1 - drop_rate.

    An entry is dropped when its 64 bits, read as a number in [0, 2^64), lie below floor(drop_rate * 2^64); so
    the probability is exact to 2^-64, and a higher drop rate drops a superset.

    Args:
        key: From ``stream_key``.
        start: Flat index of the first entry, at least 0.
        count: Number of entries, at least 0.
        drop_rate: In [0, 1).
        device: Where the mask is made.

    Returns:
        Bool, shape (count,). Memory: 1 byte an entry and a constant.

    Raises:
        ValueError: drop_rate is outside [0, 1).
    """
    if not 0 <= drop_rate < 1:
        raise ValueError(f"drop_rate: expected in [0, 1), found {drop_rate}")
    # Drawn numbers run from -2^63 on, as int64 does, so the threshold is moved by as much.
    threshold = math.floor(drop_rate * 2.0**64) - 2**63
    kept = torch.empty(count, dtype=torch.bool, device=device)
    for first, last in _chunks(count, kept.device):
        part = kept[first:last]
        if kept.device.type == "cpu":
            bits = _bits_by_numpy(key, start + first, start + last)
            np.greater_equal(bits.view(np.int64), threshold, out=part.numpy())
        else:
            torch.ge(_bits_by_torch(key, start + first, start + last, device), threshold, out=part)
    return kept


def standard_normal(key: int, start: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """Draw ``count`` independent normal numbers of mean 0 and variance 1 from flat index ``start`` on.

    Box-Muller on the bits of pair j, for the entries 2j and 2j + 1: with u in (0, 1) from the upper and v in
    [0, 1) from the lower 32 bits, sqrt(-2 ln u) cos(2 pi v) and sqrt(-2 ln u) sin(2 pi v). The functions are
    float64 and the result is rounded to float32 once, so two devices whose logarithms differ in the last
    float64 bit agree but for about one entry in 10^8, and there by one float32 ulp.

    Returns:
        Float32, shape (count,), magnitudes up to 6.8. Memory: 4 bytes an entry and a constant.

    Source: Box and Muller 1958, A note on the generation of random normal deviates.
    Deviations: none.
    """
    noise = torch.empty(count, dtype=torch.float32, device=device)
    for first, last in _chunks(count, noise.device):
        low, high = start + first, start + last
        bits = random_bits(key, low // 2, (high + 1) // 2, device)
        u = _shift_right(bits, 32).double().add_(0.5).mul_(2.0**-32)
        v = bits.bitwise_and_(0xFFFFFFFF).double().mul_(2.0**-32)
        radius = u.log_().mul_(-2).sqrt_()
        angle = v.mul_(2 * math.pi)
        pairs = torch.stack((radius * angle.cos(), radius * angle.sin()), dim=-1).flatten()
        noise[first:last] = pairs[low % 2 : low % 2 + last - first]
    return noise


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _shift_right(bits: Tensor, places: int) -> Tensor:
    """Shift as an unsigned number: torch's shift of int64 drags the sign along."""
    return bits.bitwise_right_shift(places).bitwise_and_((1 << (64 - places)) - 1)


def _chunks(count: int, device: torch.device) -> Iterator[tuple[int, int]]:
    size = CPU_CHUNK if device.type == "cpu" else DEVICE_CHUNK
    for first in range(0, count, size):
        yield first, min(first + size, count)
