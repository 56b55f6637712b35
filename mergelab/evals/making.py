"""Documents that lm-eval makes itself, up to a length in tokens (RULER): with our tokenizer, each time the same."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mergelab.errors import RecipeError
from mergelab.evals.entry import TaskEntry
from mergelab.evals.quiet import quiet, replaced

_SENTENCE = "The quick brown fox jumps over the lazy dog."
_MOST_TOKENS = 20
"""Of that sentence; real tokenizers need about ten. With one token a byte the makers of some documents never end: their
example alone is longer than it may be."""

SEEDS = {"random": 0, "numpy": 1234}
"""lm-eval's own, which it sets before it loads a task named on its command line."""


@contextlib.contextmanager
def made_with(entry: TaskEntry, config: dict[str, Any], tokenizer: Path | None) -> Iterator[None]:
    """Set up how the documents of a task are made meanwhile; nothing for tasks with documents of their own.

    lm-eval draws them with the global generators, which are put back afterwards, and loads the tokenizer from a folder
    that it is told in ``metadata``, whose code it would run. Here no code of it runs.

    Raises:
        RecipeError: No tokenizer is given, or it cuts words into too many tokens.
    """
    if not entry.tokenized:
        yield
        return
    if tokenizer is None:
        raise RecipeError(
            f"task {entry.name}: its documents are made to a length in tokens, and there is no tokenizer to count them "
            f"on this machine. Give them with evals.data (of a command: --data {entry.name}=FILE.jsonl)."
        )
    import numpy as np
    import requests
    import transformers
    from huggingface_hub import constants

    load = transformers.AutoTokenizer.from_pretrained
    fetch = requests.get

    def load_here(name: str, **_: Any) -> Any:
        return load(name, local_files_only=True, trust_remote_code=False)

    def fetch_if_allowed(*given: Any, **named: Any) -> Any:
        if constants.HF_HUB_OFFLINE:
            raise ConnectionError("the network is forbidden")
        return fetch(*given, **named)

    with quiet():
        length = len(load_here(str(tokenizer))(_SENTENCE).input_ids)
    if not 0 < length <= _MOST_TOKENS:
        raise RecipeError(
            f"task {entry.name}: the tokenizer at {tokenizer} needs {length} tokens for {_SENTENCE!r}, expected at "
            f"most {_MOST_TOKENS}: no documents can be made with it. Give some with evals.data, or leave the task out."
        )
    config["metadata"] = {**(config.get("metadata") or {}), "tokenizer": str(tokenizer)}
    states = random.getstate(), np.random.get_state()
    random.seed(SEEDS["random"])
    np.random.seed(SEEDS["numpy"])
    try:
        with (
            replaced(transformers.AutoTokenizer, "from_pretrained", load_here),
            replaced(requests, "get", fetch_if_allowed),
        ):
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
