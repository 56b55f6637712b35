"""Does an engine answer with the weights it should have? Asked before every point, whatever the engine says.

An update that did nothing, reached only some tensors, or left keys and values of the former weights behind gives
answers that look like answers. Two looks at the engine: what its weights add up to must be what the point's add up
to, where the engine can tell; and on fixed sentences it must say what the live model says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from mergelab.errors import MachineError
from mergelab.evals.engines import Engine, Stops

SENTENCES = (
    "The capital of France is Paris, a city on the river Seine in the north of the country. Its best known buildings "
    "are the cathedral on the island, the tower of iron that was built for a fair, and the museum in the former palace "
    "of the kings, where",
    "Question: a farmer has seventeen sheep, buys five more at the market and sells nine of them a week later. How "
    "many sheep are left? Let us think step by step. At first there are seventeen sheep; after the market there are",
    "def mean(values):\n    total = 0.0\n    for value in values:\n        total += value\n    return total / len("
    "values)\n\n\ndef variance(values):\n    middle = mean(values)\n    return mean([",
)
"""Prose, reasoning and code: longer than a block of a prefix cache, so that a stale one is met."""

MAX_TOKENS = 96
NEW_TOKENS = 8

TOLERANCES = {torch.float32: 0.001, torch.float16: 0.03, torch.bfloat16: 0.15}
"""How far the mean log-probability of a token may lie from the live model's, in nats. Measured with vLLM in bfloat16:
0.02 for the same weights, 0.45 for those of a model fine-tuned from them."""

REGRET_FACTOR = 8.0
"""A token that the engine chose may be this many tolerances less likely than the live model's own choice. Measured:
0 nats for the same weights, 4.9 and more for the others."""


@dataclass(frozen=True)
class Agreement:
    """How far engine and live model are apart, in nats: mean over tokens read, largest over tokens written."""

    reading: float
    writing: float


def compare(engine: Engine, model: PreTrainedModel, tokenizer: Any) -> Agreement:
    """Let both read and continue the same sentences.

    Args:
        engine: Asked first to continue, so that its prefix cache is used as for a task, then to score.
        model: The live model with the weights that the engine should have.
        tokenizer: Of both.
    """
    room = engine.max_length - NEW_TOKENS - 1
    prompts = [tokenizer.encode(sentence)[: min(MAX_TOKENS, room)] for sentence in SENTENCES]
    # No stop token: what comes after one is as good a witness.
    written = [list(one.token_ids) for one in engine.generate(prompts, NEW_TOKENS, Stops(ids=()))]
    read = engine.score([(prompt[:1], prompt[1:]) for prompt in prompts])
    difference, tokens, regret = 0.0, 0, 0.0
    for prompt, answer, (score, _) in zip(prompts, written, read, strict=True):
        logprobs = _logprobs(model, [*prompt, *answer])
        own = sum(float(logprobs[place - 1, prompt[place]]) for place in range(1, len(prompt)))
        difference += abs(score - own)
        tokens += len(prompt) - 1
        for place, token in enumerate(answer, start=len(prompt)):
            regret = max(regret, float(logprobs[place - 1].max() - logprobs[place - 1, token]))
    return Agreement(difference / max(1, tokens), regret)


def check_engine(engine: Engine, model: PreTrainedModel, tokenizer: Any, what: str) -> Agreement:
    """Refuse an engine that says something else than the live model.

    Raises:
        MachineError: They are further apart than rounding explains.
    """
    found = compare(engine, model, tokenizer)
    allowed = TOLERANCES[model.dtype]
    # not <=: NaN is refused as well
    if not (found.reading <= allowed and found.writing <= REGRET_FACTOR * allowed):
        raise MachineError(
            f"{what}: the engine does not answer with these weights. Expected log-probabilities within {allowed:g} "
            f"nats a token of the live model's, found them {found.reading:.3g} away; expected written tokens within "
            f"{REGRET_FACTOR * allowed:g} nats of its own choice, found one {found.writing:.3g} below. Nothing was "
            "graded. Use evals.backend: hf, or another version of the engine."
        )
    return found


def _logprobs(model: PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """Return log-probabilities of the next token after each position, float32 [length, vocabulary]."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([list(ids)], device=model.device)).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)
