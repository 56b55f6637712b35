"""Fix the order of answer options by the question itself.

lm-eval's GPQA shuffles them with the global generator inside ``datasets.map``: the order then depends on the
machine's cache, and two models may be asked differently. Here it is a function of the document alone.
"""

from __future__ import annotations

import random
from typing import Any


def gpqa_documents(dataset: Any) -> Any:
    """Return the GPQA documents as lm-eval words them, the options in an order drawn from the question."""
    from lm_eval.tasks.gpqa.cot_zeroshot.utils import preprocess

    def arrange(document: dict[str, Any]) -> dict[str, Any]:
        correct = preprocess(document["Correct Answer"])
        choices = [*(preprocess(document[f"Incorrect Answer {number}"]) for number in (1, 2, 3)), correct]
        random.Random("gpqa:" + document["Question"]).shuffle(choices)
        named = {f"choice{number}": choice for number, choice in enumerate(choices, start=1)}
        return {**named, "choices": choices, "answer": f"({'ABCD'[choices.index(correct)]})"}

    return dataset.map(arrange)
