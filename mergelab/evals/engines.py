"""What an inference engine must offer to answer for a model, and how its weights are told from others.

An engine holds weights of its own, in a layout of its own. The adapter that asks it lm-eval's questions is
``engine_harness``; whether it answers with the weights it should have is checked in ``canary``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

BATCH_SIZE = 256
"""Answers an engine writes at a time where a recipe names no batch size: it schedules them itself, without padding."""

MAX_LENGTH = 32768
"""No engine keeps room for longer sequences: a context of 131072 tokens asks for more memory than the weights."""

_CHUNK = 1 << 24


@dataclass(frozen=True)
class Stops:
    """Where an answer ends: at one of these tokens, or with one of these strings."""

    ids: tuple[int, ...]
    strings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Completion:
    """One answer.

    Args:
        token_ids: All that was written, the end token or what completed a stop string included.
        reason: ``end``: an end token; ``stop``: a stop string; ``length``: the budget.
    """

    token_ids: tuple[int, ...]
    reason: Literal["end", "stop", "length"]

    @property
    def num_tokens(self) -> int:
        """Tokens without the end token, with a stop string: what a live model's answers count."""
        return len(self.token_ids) - (self.reason == "end")


class Engine(Protocol):
    """Answers for one set of weights; all decoding is greedy."""

    max_length: int
    """Most tokens of a prompt and its answer together."""

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stops: Stops) -> list[Completion]:
        """Continue each prompt, in the order given."""

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
        """Return for each (context, continuation) the continuation's log-likelihood, and whether it is the greedy one.

        A context that does not fit loses its beginning.
        """

    def close(self) -> None:
        """Give everything back; the engine is not used again."""


class ResidentEngine(Engine, Protocol):
    """An engine whose weights can be overwritten while it runs."""

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Overwrite all weights, named as a text checkpoint names them, and forget what came of the former ones.

        Keys and values of prompts that were seen before belong to the weights that computed them.
        """

    def content(self) -> Content | None:
        """Return what the weights in place add up to; None where the engine keeps none that can be read."""


@dataclass(frozen=True)
class EngineSetup:
    """What an engine is built from.

    Args:
        folder: A text checkpoint; for a resident engine its weights may be absent.
        tokenizer: Folder of the tokenizer that stop strings are looked for with.
        dtype: Of the weights and the arithmetic, as torch calls it.
        device: As torch calls it.
        batch_size: Answers written at a time.
        max_length: See ``Engine.max_length``.
    """

    folder: Path
    tokenizer: Path
    dtype: str
    device: str
    batch_size: int
    max_length: int


@dataclass(frozen=True)
class Content:
    """Sums over the bits of all weights: equal however the same weights are fused, transposed, padded or named."""

    first: int
    second: int


def weights_content(tensors: Iterable[Tensor]) -> Content:
    """Add up the bit patterns of all entries, and their squares, modulo 2^64.

    Sums over parts make the sum of the whole, whatever the parts are called and however they lie, and zeros
    that pad a matrix add nothing. Storage that is shared (a tied head) counts once.

    Args:
        tensors: Of a dtype of two or four bytes.
    """
    import torch

    seen: set[int] = set()
    first = second = 0
    for tensor in tensors:
        if tensor.numel() == 0 or tensor.data_ptr() in seen:
            continue
        seen.add(tensor.data_ptr())
        flat = tensor.detach().reshape(-1).view({2: torch.int16, 4: torch.int32}[tensor.element_size()])
        for start in range(0, flat.numel(), _CHUNK):
            bits = flat[start : start + _CHUNK].to(torch.int64)
            first += int(bits.sum())
            second += int((bits * bits * (bits ^ (bits >> 7))).sum())
    return Content(first % 2**64, second % 2**64)
