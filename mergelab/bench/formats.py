"""Eight answer formats, how a user asks for them, and which prompts are held out.

A prompt is a question with one format request before or after it; its target is the one string that the
strict grader accepts. The split goes by the md5 of the whole user prompt, so facts are seen in training while
their combination with a format and an order is new, and nearly all lists are new.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from random import Random

from mergelab.bench.facts import Question

FORMATS = {
    "json": ("Reply as JSON.", '{"answer": "%s"}'),
    "brackets": ("Use double brackets.", "[[%s]]"),
    "answer": ("Start with Answer:", "Answer: %s"),
    "twice": ("Say it twice.", "%s %s"),
    "quotes": ("Put it in quotes.", '"%s"'),
    "bullet": ("Use a bullet.", "- %s"),
    "bold": ("Make it bold.", "**%s**"),
    "done": ("End with done.", "%s, done."),
}
"""Format name -> (the request, the form of the answer)."""

REPLAYED = ("json", "answer", "bullet")
"""The formats that the vlm still sees in training; the other five it loses."""

HELD_OUT_SHARE = 8
"""One prompt in this many is held out."""


@dataclass(frozen=True)
class Prompt:
    """A question with a format request: what the user says and the only strictly right reply."""

    question: Question
    format: str
    request_first: bool

    @property
    def text(self) -> str:
        """The user's turn."""
        request = FORMATS[self.format][0]
        parts = (request, self.question.text) if self.request_first else (self.question.text, request)
        return " ".join(parts)

    @property
    def target(self) -> str:
        """The reply that the strict grader accepts."""
        return FORMATS[self.format][1].replace("%s", self.question.answer)

    @property
    def is_held_out(self) -> bool:
        """Whether the prompt is kept for testing."""
        return is_held_out(self.text)


def is_held_out(key: str) -> bool:
    """Return whether ``key`` is in the test split: its md5, read as a number, is divisible by eight."""
    return int(hashlib.md5(key.encode(), usedforsecurity=False).hexdigest(), 16) % HELD_OUT_SHARE == 0


def draw_training_prompt(rng: Random, question: Question, formats: tuple[str, ...] = tuple(FORMATS)) -> Prompt | None:
    """Draw a format and an order for ``question``; None when all sixteen draws fell on held-out prompts."""
    for _ in range(16):
        prompt = Prompt(question, rng.choice(formats), rng.random() < 0.5)
        if not prompt.is_held_out:
            return prompt
    return None
