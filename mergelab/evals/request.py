"""What a caller asks of the evaluation layer: one plain value, and what is wrong with it. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mergelab.errors import RecipeError, problem_list
from mergelab.evals.documents import named_data
from mergelab.evals.entry import nearest
from mergelab.evals.protocols import PROTOCOLS, Protocol
from mergelab.evals.task_folder import known_tasks, runs_code


@dataclass(frozen=True)
class EvalRequest:
    """The ``evals`` block of a recipe, resolved for one pair.

    Args:
        protocol: A key of ``PROTOCOLS``.
        tasks: Task names in the order to run; None takes the protocol's own.
        data: Task name -> JSONL file of its documents, or a folder with ``<split>.jsonl`` files where
            few-shot examples come from another split. Tasks left out come from the local Hugging Face cache.
        limit: At most this many documents a task, drawn by ``subset_seed``; None takes all.
        batch_size: Rows a batch; None takes the protocol's (for text under an engine: ``engines.BATCH_SIZE``).
        max_gen_toks: Task name -> new tokens, over the protocol's budget.
        subset_seed: Seeds the draw of ``limit``; the same documents for every model.
        task_folder: Folder of tasks of the user's own.
        allow_code: Whether programs that a model writes, and Python beside the user's own tasks, may run.
        tokenizer: Folder of the tokenizer that documents of a given length are made with.
        data_folder: Folder with ``TASK.jsonl`` or ``TASK/<split>.jsonl`` for tasks that ``data`` does not name.
        backend: ``hf`` or ``vllm``: what answers text tasks. Pictures are shown to the live model under either.
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
    backend: str = "hf"

    def source(self, task: str) -> Path | None:
        """Return where the documents of a task are to be read; None for its own source.

        Raises:
            RecipeError: The data folder has both a file and a folder of this name.
        """
        if task in self.data or self.data_folder is None:
            return self.data.get(task)
        return named_data(self.data_folder, task)


def check_request(request: EvalRequest) -> tuple[Protocol, tuple[str, ...], int]:
    """Return protocol, task names and batch size, or raise every problem of the request at once."""
    if request.protocol not in PROTOCOLS:
        raise RecipeError(f"evals.protocol {request.protocol!r}: unknown{nearest(request.protocol, list(PROTOCOLS))}.")
    protocol = PROTOCOLS[request.protocol]
    names = protocol.tasks if request.tasks is None else request.tasks
    known = known_tasks(request.task_folder)
    problems = [
        f"evals.tasks: unknown task {name!r}{nearest(name, list(known))}" for name in names if name not in known
    ]
    if not request.allow_code:
        problems += [f"evals.tasks: {why}" for name in names if name in known and (why := runs_code(known[name]))]
    problems += [f"evals.tasks: {name!r} stands twice" for name, times in Counter(names).items() if times > 1]
    if not names:
        problems.append("evals.tasks: names no task")
    for key in ("data", "max_gen_toks"):
        for name in getattr(request, key):
            if name not in names:
                problems.append(f"evals.{key}: {name!r} is not among the tasks{nearest(name, list(names))}")
    folder = request.data_folder
    if folder is not None and not any(
        (folder / f"{name}.jsonl").is_file() or (folder / name).is_dir() for name in names
    ):
        problems.append(
            f"evals.data: expected {names[0]}.jsonl or the like in {folder}, found no file named after a task"
        )
    if request.limit is not None and request.limit < 1:
        problems.append(f"evals.limit: expected at least 1 document, found {request.limit}")
    batch_size = protocol.batch_size if request.batch_size is None else request.batch_size
    if batch_size < 1:
        problems.append(f"evals.batch_size: expected at least 1 row, found {batch_size}")
    problems += [
        f"evals.max_gen_toks: {name}: expected at least 1 token, found {tokens}"
        for name, tokens in request.max_gen_toks.items()
        if tokens < 1
    ]
    if problems:
        raise RecipeError(problem_list("The evals block cannot be used.", problems))
    return protocol, tuple(names), batch_size
