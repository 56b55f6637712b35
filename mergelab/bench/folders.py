"""Writing a model as a standard Hugging Face folder: bf16 weights, tokenizer, template, greedy settings."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from mergelab.bench.models import greedy_generation

FILE_MODE = 0o644


@contextmanager
def no_bars() -> Iterator[None]:
    """Silence the progress bars of transformers inside the block; they would mix with our own lines."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a copy of ``model``, rounded to bf16, and its tokenizer into ``folder``.

    The names inside the file are those of ``save_pretrained``; a tied head is not stored. Files are readable
    by everybody, where ``save_pretrained`` leaves the weights to their owner alone.
    """
    folder.mkdir(exist_ok=True)
    stored = copy.deepcopy(model)
    stored.bfloat16()
    text = stored.config.get_text_config()
    stored.generation_config = greedy_generation(text.bos_token_id, text.eos_token_id, text.pad_token_id)
    with no_bars():
        stored.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(FILE_MODE)
