"""What a caller asks of the evaluation layer: one plain value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class EvalRequest:
    """The ``evals`` block of a recipe, resolved for one pair.

    Args:
        protocol: A key of ``PROTOCOLS``.
        tasks: Task names in the order to run; None takes the protocol's own.
        data: Task name -> JSONL file of its documents, or a folder with ``<split>.jsonl`` files where
            few-shot examples come from another split. Tasks left out come from the local Hugging Face cache.
        limit: At most this many documents a task, drawn by ``subset_seed``; None takes all.
        batch_size: Rows a batch; None takes the protocol's (for text under an engine: ``engines.BATCH_SIZE``).
        max_gen_toks: Task name -> new tokens, over the protocol's budget.
        subset_seed: Seeds the draw of ``limit``; the same documents for every model.
        backend: ``hf`` or ``vllm``: what answers text tasks. Pictures are shown to the live model under either.
    """

    protocol: str
    tasks: tuple[str, ...] | None = None
    data: Mapping[str, Path] = field(default_factory=dict)
    limit: int | None = None
    batch_size: int | None = None
    max_gen_toks: Mapping[str, int] = field(default_factory=dict)
    subset_seed: int = 0
    backend: str = "hf"
