"""End a row at its first stop string, row by row.

lm-eval's own criterion only ends a batch when all of its rows are done: a finished row runs on, and how far
depends on its neighbours. The text up to the stop string is the same either way; the token count is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import StoppingCriteria


class StopStrings(StoppingCriteria):
    """Marks a row as done when the text it wrote contains one of ``stops``.

    Args:
        tokenizer: Decodes the last tokens of a row.
        stops: The stop strings.
        prompt_length: Tokens of the padded prompt, which are not looked at.
        num_rows: Rows of the batch.

    Attributes:
        stopped_at: For each row, the number of new tokens when its stop string was complete, or None.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], prompt_length: int, num_rows: int) -> None:
        self._tokenizer, self._stops, self._prompt_length = tokenizer, tuple(stops), prompt_length
        # Two tokens more than the string needs: the model may write it in another split than the tokenizer
        # does.
        lengths = [len(tokenizer.encode(stop, add_special_tokens=False)) for stop in stops]
        self._window = max(lengths) + 2
        self.stopped_at: list[int | None] = [None] * num_rows

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return a boolean per row, shape [rows]: whether it is done."""
        written = input_ids.shape[1] - self._prompt_length
        running = [row for row, at in enumerate(self.stopped_at) if at is None]
        if running and written > 0:
            tail = input_ids[running, self._prompt_length :][:, -self._window :]
            for row, text in zip(running, self._tokenizer.batch_decode(tail), strict=True):
                if any(stop in text for stop in self._stops):
                    self.stopped_at[row] = written
        done = [at is not None for at in self.stopped_at]
        return torch.tensor(done, dtype=torch.bool, device=input_ids.device)
