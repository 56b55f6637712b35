"""Say when a grader drew lots: MMMU's picks a random option where it reads no answer.

lm-eval draws from the global generator, so one unreadable answer changes the luck of all later ones, and grading the
same answers again gives other scores. Here the draw is a function of the question alone, and whether it was made
becomes a score of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

READ = "read_acc"
"""The accuracy in which a drawn answer counts as wrong."""

GUESSED = "guessed"
"""1 where the answer was drawn."""

METRICS = tuple(
    {"metric": name, "aggregation": "mean", "higher_is_better": better}
    for name, better in ((READ, True), (GUESSED, False))
)
"""What a task's ``metric_list`` has to name besides ``acc``."""

Grade = Callable[[Mapping[str, Any], Sequence[str]], dict[str, Any]]


def tell_guesses(grade: Grade) -> Grade:
    """Return ``grade`` with its draws fixed by the question, and ``read_acc`` and ``guessed`` beside its ``acc``."""
    names: dict[str, Any] = grade.__globals__

    def graded(document: Mapping[str, Any], results: Sequence[str]) -> dict[str, Any]:
        lots = _Lots(f"{document['question']}\n{document['options']}")
        shared, names["random"] = names["random"], lots
        try:
            metrics = grade(document, results)
        finally:
            names["random"] = shared
        return {**metrics, READ: 0.0 if lots.drawn else metrics["acc"], GUESSED: float(lots.drawn)}

    return graded


class _Lots:
    """Stands in for the module ``random`` while one answer is graded."""

    def __init__(self, question: str) -> None:
        self._generator = random.Random("mmmu:" + question)
        self.drawn = False

    def choice(self, options: Sequence[str]) -> str:
        """Return one of the options and note that it was drawn."""
        self.drawn = True
        return self._generator.choice(options)
