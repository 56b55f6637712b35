"""What a module is, decided from its canonical name and its number of dimensions."""

from __future__ import annotations

import re
from collections.abc import Sequence

ATTENTION = re.compile(r"\.(?:self_attn|attn|attention|linear_attn)\.")
MLP = re.compile(r"\.(?:mlp|feed_forward|block_sparse_moe)\.")
NORM = re.compile(r"norm\.weight$")


def module_kind(name: str, shape: Sequence[int]) -> str:
    """Return embedding, head, norm, bias, attention, mlp or other.

    norm are 1-D gains (q and k norms included), bias are 1-D ``*.bias`` (the head's too), attention and mlp
    are 2-D matrices of a layer. Everything else is other: convolutions, stacked experts, gates, scalars.
    """
    if len(shape) == 1:
        if name.endswith(".bias"):
            return "bias"
        return "norm" if NORM.search(name) else "other"
    if len(shape) != 2:
        return "other"
    if name == "lm_head.weight":
        return "head"
    if name == "model.embed_tokens.weight":
        return "embedding"
    if ATTENTION.search(name):
        return "attention"
    return "mlp" if MLP.search(name) else "other"
