"""Which tensors a recipe leaves out of a merge, by kind. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Collection

QK_NORM = re.compile(r"\.(?:q|k|query|key)_?(?:layer)?norm\.(?:weight|bias)$")
"""Norms of queries and keys, in the spellings of the model families: q_norm, k_norm, q_layernorm, key_layernorm."""


def is_excluded(exclude: Collection[str], kind: str, name: str) -> bool:
    """Return True if a tensor of this kind and name is not merged.

    Args:
        exclude: Kinds; ``qk_norm`` stands for the q and k norms alone, which are of kind norm.
        kind: Kind of the tensor.
        name: Its canonical name.
    """
    return kind in exclude or ("qk_norm" in exclude and QK_NORM.search(name) is not None)
