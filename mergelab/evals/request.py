"""What a caller asks of the evaluation layer: one plain value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mergelab.evals.documents import named_data


@dataclass(frozen=True)
class EvalRequest:
    """The ``evals`` block of a recipe, resolved for one pair.

    Args:
        protocol: A key of ``PROTOCOLS``.
        tasks: Task names in the order to run; None takes the protocol's own.
        data: Task name -> JSONL file of its documents, or a folder with ``<split>.jsonl`` files where
            few-shot examples come from another split. Tasks left out come from the local Hugging Face cache.
        limit: At most this many documents a task, drawn by ``subset_seed``; None takes all.
        batch_size: Rows a batch; None takes the protocol's.
        max_gen_toks: Task name -> new tokens, over the protocol's budget.
        subset_seed: Seeds the draw of ``limit``; the same documents for every model.
        task_folder: Folder of tasks of the user's own.
        allow_code: Whether programs that a model writes, and Python beside the user's own tasks, may run.
        tokenizer: Folder of the tokenizer that documents of a given length are made with.
        data_folder: Folder with ``TASK.jsonl`` or ``TASK/<split>.jsonl`` for tasks that ``data`` does not name.
    """

    protocol: str
    tasks: tuple[str, ...] | None = None
    data: Mapping[str, Path] = field(default_factory=dict)
    limit: int | None = None
    batch_size: int | None = None
    max_gen_toks: Mapping[str, int] = field(default_factory=dict)
    subset_seed: int = 0
    task_folder: Path | None = None
    allow_code: bool = False
    tokenizer: Path | None = None
    data_folder: Path | None = None

    def source(self, task: str) -> Path | None:
        """Return where the documents of a task are to be read; None for its own source.

        Raises:
            RecipeError: The data folder has both a file and a folder of this name.
        """
        if task in self.data or self.data_folder is None:
            return self.data.get(task)
        return named_data(self.data_folder, task)
