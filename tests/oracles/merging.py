"""The entrywise methods again, one entry at a time in Python floats (float64), straight from the papers.

Every function takes flat lists of numbers and returns one. Slow and obvious: this is the specification.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

Vector = Sequence[float]


def subtract(model: Vector, zero: Vector) -> list[float]:
    return [m - z for m, z in zip(model, zero, strict=True)]


def add(zero: Vector, delta: Vector, scale: float) -> list[float]:
    return [z + scale * d for z, d in zip(zero, delta, strict=True)]


def sign(number: float) -> int:
    return (number > 0) - (number < 0)


def linear(models: Sequence[Vector], weights: Vector) -> list[float]:
    total = math.fsum(weights)
    return [
        math.fsum(w * m for w, m in zip(weights, entries, strict=True)) / total for entries in zip(*models, strict=True)
    ]


def task_arithmetic(zero: Vector, models: Sequence[Vector], weights: Vector, scale: float) -> list[float]:
    merged = list(zero)
    for model, weight in zip(models, weights, strict=True):
        for i, delta in enumerate(subtract(model, zero)):
            merged[i] += scale * weight * delta
    return merged


def trim(delta: Vector, density: Fraction) -> list[float]:
    """Keep max(1, floor(density n)) entries: largest first, lowest index first among equals, zeros never."""
    count = max(1, math.floor(density * len(delta)))
    ranked = sorted(range(len(delta)), key=lambda i: (-abs(delta[i]), i))
    kept = set(ranked[:count])
    return [value if i in kept else 0.0 for i, value in enumerate(delta)]


def agreeing_mean(
    vectors: Sequence[Vector],
    weights: Vector,
    elect: str = "raw",
    zero_sum: str = "nothing",
    divisor: str = "weights",
) -> list[float]:
    merged = []
    for entries in zip(*vectors, strict=True):
        weighted = [w * t for w, t in zip(weights, entries, strict=True)]
        votes = {"raw": entries, "weighted": weighted, "count": [sign(t) for t in entries]}[elect]
        elected = sign(math.fsum(votes))
        if elected == 0 and zero_sum == "plus":
            elected = 1
        agrees = [sign(vote) == elected and sign(vote) != 0 for vote in votes]
        total = math.fsum(value for value, yes in zip(weighted, agrees, strict=True) if yes)
        shares = {
            "weights": math.fsum(w for w, yes in zip(weights, agrees, strict=True) if yes),
            "count": float(sum(agrees)),
            "none": 1.0,
        }[divisor]
        merged.append(total / shares if shares else 0.0)
    return merged


def ties(
    zero: Vector, models: Sequence[Vector], weights: Vector, scale: float, density: Fraction, **rules: str
) -> list[float]:
    trimmed = [trim(subtract(model, zero), density) for model in models]
    return add(zero, agreeing_mean(trimmed, weights, **rules), scale)


def drop(delta: Vector, keep: Sequence[bool], drop_rate: float, rescale: str = "inverse") -> list[float]:
    kept = [d if k else 0.0 for d, k in zip(delta, keep, strict=True)]
    before, after = (math.fsum(abs(d) for d in values) for values in (delta, kept))
    l1 = before / after if min(before, after) >= 1e-7 else 1.0
    factor = {"inverse": 1 / (1 - drop_rate), "l1": l1, "none": 1.0}[rescale]
    return [factor * d for d in kept]


def split_mix(key: int, index: int) -> int:
    """The 64 bits of one index in Python integers, as an unsigned number."""
    mask = 2**64 - 1
    z = (key + index * 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def normal_pair(bits: int) -> tuple[float, float]:
    u, v = ((bits >> 32) + 0.5) / 2**32, (bits & 0xFFFFFFFF) / 2**32
    radius = math.sqrt(-2 * math.log(u))
    return radius * math.cos(2 * math.pi * v), radius * math.sin(2 * math.pi * v)


def slerp(first: Vector, second: Vector, t: float) -> list[float]:
    norms = [math.sqrt(math.fsum(x * x for x in vector)) for vector in (first, second)]
    angle = math.acos(math.fsum(x * y for x, y in zip(first, second, strict=True)) / norms[0] / norms[1])
    near, far = math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)
    return [near * x + far * y for x, y in zip(first, second, strict=True)]


def official_trim(delta: Vector, density: Fraction) -> list[float]:
    """Keep what reaches the (floor(density n) + 1)-th magnitude of the flat vector, zeros never."""
    rank = min(len(delta), math.floor(density * len(delta)) + 1)
    threshold = sorted((abs(value) for value in delta), reverse=True)[rank - 1]
    return [value if abs(value) >= threshold else 0.0 for value in delta]


def official_ties(
    zero: Vector, models: Sequence[Vector], weights: Vector, scale: float, density: Fraction
) -> list[float]:
    """TIES of its authors' code on the flat vector of a whole model: raw election, majority sign, division by count."""
    trimmed = [official_trim(subtract(model, zero), density) for model in models]
    elected = [sign(math.fsum(entries)) for entries in zip(*trimmed, strict=True)]
    majority = sign(sum(elected))
    merged = []
    for entries, own in zip(zip(*trimmed, strict=True), elected, strict=True):
        chosen = own or majority
        agreeing = [(w, t) for w, t in zip(weights, entries, strict=True) if chosen and sign(t) == chosen]
        merged.append(math.fsum(w * t for w, t in agreeing) / len(agreeing) if agreeing else 0.0)
    return add(zero, merged, scale)
