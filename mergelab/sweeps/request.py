"""A recipe's ``evals`` block on a pair, as the evaluation room takes it. No torch."""

from __future__ import annotations

from pathlib import Path

from mergelab.config import Pair, Recipe
from mergelab.evals.request import EvalRequest


def eval_request(recipe: Recipe, pair: Pair, tokenizer: Path | None = None) -> EvalRequest:
    """Return what the recipe asks for, with ``auto`` taken from the pair.

    Args:
        recipe: The recipe.
        pair: Its pair.
        tokenizer: Folder of base's tokenizer, for documents that are made to a length in tokens.
    """
    evals = recipe.evals
    return EvalRequest(
        protocol=pair.protocol if evals.protocol == "auto" else evals.protocol,
        tasks=None if evals.tasks == "auto" else tuple(evals.tasks),
        data={} if isinstance(evals.data, str) else {task: Path(path) for task, path in evals.data.items()},
        limit=evals.limit,
        batch_size=evals.batch_size,
        max_gen_toks=dict(evals.max_gen_toks),
        task_folder=None if evals.task_folder is None else Path(evals.task_folder),
        allow_code=evals.allow_code,
        tokenizer=tokenizer,
        data_folder=Path(evals.data) if isinstance(evals.data, str) else None,
        backend=evals.backend,
    )
