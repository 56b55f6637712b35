"""One spelling for equal values: the JSON that hashes and comparisons are made of.

``0.5`` and ``0.50``, ``1`` and ``1.0`` are the same number to a person and to the arithmetic, so they are
the same text here. What a hash is made *of* is decided elsewhere (``sweeps/identity.py``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

EXACT_INTEGERS = 2.0**53
"""Up to here every whole float is the integer it prints as."""


def canonical_json(value: Any) -> str:
    """Return ``value`` as JSON with sorted keys, no spaces, and one spelling per number.

    Whole floats become integers, negative zero becomes zero, tuples become lists. True and 1 stay different.

    Args:
        value: None, booleans, numbers, text, and mappings with text keys or sequences of these.

    Raises:
        ValueError: A NaN or an infinity, which JSON cannot say.
        TypeError: Anything else that JSON cannot say, or a key that is not text.
    """
    return json.dumps(_normal(value), sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _normal(value: Any) -> Any:
    if isinstance(value, bool) or value is None or isinstance(value, (int, str)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} is not a number that JSON can say")
        return int(value) if value.is_integer() and abs(value) <= EXACT_INTEGERS else value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"key {key!r} is not text")
        return {key: _normal(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_normal(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no canonical JSON")
