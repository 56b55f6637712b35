"""What was made of prompts for one point serves the next: every point of a sweep is asked the same questions."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PromptMemory:
    """Prompts of one tokenizer under one template, kept by whoever asks several models.

    Args:
        rendered: Conversation (as JSON) -> the text that the template makes of it.
        encoded: Text -> token ids, of prompts to be continued. As arrays: lists would take ten times the memory.
    """

    rendered: dict[str, str] = field(default_factory=dict)
    encoded: dict[str, array[int]] = field(default_factory=dict)
