"""Keep lm-eval and its companions quiet: stdout is data, and a sweep calls the harness hundreds of times.

Also skips what lm-eval collects about the machine at the end of each call (git in the user's folder, a
two-second inventory by sub-processes): our records say what ran.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Progress = Callable[[int, int], None]
"""Called with (rows done, rows in all)."""

_LOGGERS = ("lm_eval", "transformers", "datasets", "huggingface_hub", "langdetect")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drop log lines, warnings and prints of the libraries for the duration; errors still raise."""
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set ``owner.name`` for the duration, and put back what was there, or nothing if nothing was."""
    own = vars(owner)
    had, before = name in own, own.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


class Bar:
    """Stands in for a tqdm bar: prints nothing and reports to a callback."""

    def __init__(self, iterable: Iterable[Any] = (), *, total: int = 0, progress: Progress | None = None, **_: Any):
        self._iterable, self._total, self._progress, self._done = iterable, total, progress, 0

    def __iter__(self) -> Iterator[Any]:
        return iter(self._iterable)

    def update(self, rows: int = 1) -> None:
        """Count ``rows`` more as done."""
        self._done += rows
        if self._progress:
            self._progress(self._done, self._total)

    def close(self) -> None:
        """Do nothing; the callback has seen the last row."""


@contextlib.contextmanager
def quiet_harness(progress: Progress | None = None) -> Iterator[None]:
    """``quiet``, plus lm-eval's bars turned into ``progress`` and its inventory of the machine left out."""
    with quiet():
        import lm_eval.api.task
        import lm_eval.evaluator
        import lm_eval.models.huggingface

        def model_bar(**settings: Any) -> Bar:
            return Bar(total=settings.get("total", 0), progress=progress)

        with (
            replaced(lm_eval.api.task, "tqdm", Bar),
            replaced(lm_eval.models.huggingface, "tqdm", model_bar),
            replaced(lm_eval.evaluator, "add_env_info", lambda storage: None),
            replaced(lm_eval.evaluator, "get_git_commit_hash", lambda: None),
        ):
            yield
