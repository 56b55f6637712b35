"""Attention scores from queries and keys, a block of queries at a time: no (T, T) map is ever kept.

Pure: who made the queries and keys is ``capture``'s business.

Shape letters: H query heads, KV key heads, T tokens, D width of a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mergelab.sinks.metric import Rows, join_rows, measure_rows

BLOCK_ENTRIES = 2**20
"""Scores held at a time, over all heads: 4 MiB in float32, however long the prompt is."""


@dataclass(frozen=True)
class Projections:
    """What the scores of one layer are made of: linear in the number of tokens, unlike the scores."""

    query: Tensor
    """(H, T, D), rotated as the model rotates it."""
    key: Tensor
    """(KV, T, D)."""
    mask: Tensor | None
    """None for plain causal attention, else boolean (1, 1 or H, T, T), True where a key is visible."""
    scaling: float | None
    """Factor on the scores; None: D ** -0.5."""
    softcap: float | None = None
    """c of soft-capped scores, c * tanh(score / c); None: not capped."""
    sink_logits: Tensor | None = None
    """(H,) learned logits that join the softmax of every row; see ``metric.measure_rows``."""

    def to_cpu(self) -> Projections:
        """Return the same projections on the CPU."""
        mask = None if self.mask is None else self.mask.cpu()
        sink_logits = None if self.sink_logits is None else self.sink_logits.cpu()
        return replace(self, query=self.query.cpu(), key=self.key.cpu(), mask=mask, sink_logits=sink_logits)

    def rows(self) -> Rows:
        """Return the row statistics of the layer, (H, T), in float64 for float64 queries, else in float32."""
        dtype = torch.float64 if self.query.dtype == torch.float64 else torch.float32
        blocks = score_blocks(self, dtype)
        return join_rows([measure_rows(scores, visible, self.sink_logits) for scores, visible in blocks])


def score_rows(query: Tensor, key: Tensor, attention_mask: Tensor | None, scaling: float | None = None) -> Rows:
    """Compute the row statistics of causal attention from queries and keys, a block of queries at a time.

        scores[h, q, k] = scaling * sum_d query[h, q, d] * key[h // (H / KV), k, d]    in float32, k <= q

    Memory is BLOCK_ENTRIES scores and a few copies of them, plus the statistics: no (Q, K) map is kept.

    Args:
        query: (H, T, D), any float dtype; float64 is scored in float64, all others in float32.
        key: (KV, T, D) with H a multiple of KV; each key head serves H / KV neighbouring query heads.
        attention_mask: None for plain causal attention, else boolean (1, 1 or H, T, T), True where a key is
            visible. It may only narrow causal attention, as windows do.
        scaling: Factor on the scores, None for D ** -0.5.

    Returns:
        Rows of (H, T) on the device of ``query``.

    **Source**: scaled dot-product attention.

    **Deviations**: a bfloat16 model's eager attention rounds its scores to bfloat16 before the softmax; these
    stay float32.
    """
    return Projections(query, key, attention_mask, scaling).rows()


def score_blocks(projections: Projections, dtype: torch.dtype) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the scores of consecutive blocks of queries and which of them are visible.

    Layers of equal H and T are cut into the same blocks.

    Args:
        projections: Of one layer.
        dtype: float32 or float64, what the scores are computed in.

    Yields:
        Scores (H, q, k) and a boolean that broadcasts to them; k ends at the last query of the block.
    """
    num_heads, num_queries, width = projections.query.shape
    num_key_heads = projections.key.shape[0]
    scaling = width**-0.5 if projections.scaling is None else projections.scaling
    query = projections.query.to(dtype) * scaling
    key = projections.key.to(dtype)
    positions = torch.arange(num_queries, device=query.device)
    step = max(1, BLOCK_ENTRIES // (num_heads * num_queries))
    for start in range(0, num_queries, step):
        stop = min(start + step, num_queries)
        # Keys after the last query of the block are invisible to all of it.
        grouped = query[:, start:stop].reshape(num_key_heads, -1, width)
        scores = (grouped @ key[:, :stop].transpose(1, 2)).view(num_heads, stop - start, stop)
        if projections.softcap is not None:
            scores = projections.softcap * torch.tanh(scores / projections.softcap)
        visible = positions[:stop] <= positions[start:stop, None]
        if projections.mask is not None:
            visible = visible & projections.mask[0, :, start:stop, :stop]
        yield scores, visible
