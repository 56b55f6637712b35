"""Silences the libraries: their bars, warnings and chatter are not ours to print."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

QUIET = {
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
}
"""Environment of the libraries, set before they are imported; a value the user has set stays."""


@contextmanager
def silenced() -> Iterator[None]:
    """Keep libraries quiet for the duration; errors still raise."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
