"""What was made of prompts for one point serves the next: every point of a sweep is asked the same questions."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
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

    def render(
        self,
        chat_history: list[dict[str, str]],
        add_generation_prompt: bool,
        template: Callable[[list[dict[str, str]], bool], str],
    ) -> str:
        """Return what ``template`` makes of a conversation; it is asked once per conversation."""
        key = json.dumps([chat_history, add_generation_prompt])
        if key not in self.rendered:
            self.rendered[key] = template(chat_history, add_generation_prompt)
        return self.rendered[key]
