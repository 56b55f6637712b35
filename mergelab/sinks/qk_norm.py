"""Which kind of query and key normalisation a model has, read off tensor shapes alone. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

NONE = "none"
PER_HEAD = "per head"
LAYERWISE = "layerwise"
UNKNOWN = "unknown"

_NORM = re.compile(r"\.(q|k|query|key)_?(?:layer)?norm\.weight$")


def qk_norm_kind(shapes: Mapping[str, Sequence[int]], config: Mapping[str, Any]) -> str:
    """Return how queries and keys are normalised before their product.

    Args:
        shapes: Canonical tensor name -> shape, of the whole text model.
        config: Its text config: ``num_attention_heads``, ``num_key_value_heads``, ``head_dim`` or ``hidden_size``.

    Returns:
        ``none`` without such a norm; ``per head`` if every gain has ``head_dim`` entries (or one row of them a
        head); ``layerwise`` if it spans all heads together; ``unknown`` for any other shape. With a single head the
        two are the same and ``per head`` is said.

    **Source**: arXiv 2609.00746 names the three kinds; lengths as in transformers (Qwen3, Gemma 3: head_dim;
    OLMo 2 and 3: all heads).

    **Deviations**: none.
    """
    found = {name: tuple(shape) for name, shape in shapes.items() if _NORM.search(name)}
    if not found:
        return NONE
    heads = config.get("num_attention_heads")
    key_heads = config.get("num_key_value_heads") or heads
    if not isinstance(heads, int) or not isinstance(key_heads, int):
        return UNKNOWN
    width = config.get("head_dim") or config.get("hidden_size", 0) // heads
    kinds = set()
    for name, shape in found.items():
        match = _NORM.search(name)
        own = heads if match is not None and match[1].startswith("q") else key_heads
        if shape in ((width,), (own, width)):
            kinds.add(PER_HEAD)
        else:
            kinds.add(LAYERWISE if shape == (own * width,) else UNKNOWN)
    return kinds.pop() if len(kinds) == 1 else UNKNOWN
