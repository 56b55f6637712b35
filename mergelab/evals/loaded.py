"""A task ready to be graded: its lm-eval objects, the documents drawn, and the key of its stage."""

from __future__ import annotations

import hashlib
import platform
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from mergelab.evals import code_eval
from mergelab.evals.entry import TaskEntry
from mergelab.evals.families import subtask_name
from mergelab.evals.loading import LoadedSubtask
from mergelab.evals.pictures import Picture
from mergelab.evals.protocols import Protocol
from mergelab.evals.request import EvalRequest
from mergelab.evals.resources import NEEDS

SEEDS = {
    "random_seed": 0,
    "numpy_random_seed": 1234,
    "torch_random_seed": 1234,
    "fewshot_random_seed": 1234,
}
"""Passed to every call; lm-eval sets the global generators to them."""

_LIBRARIES = ("lm_eval", "transformers", "torch", "tokenizers", "datasets")


@dataclass(frozen=True)
class Part:
    """One lm-eval task object, the ids of its documents to grade (None: all), and where its ids start."""

    loaded: LoadedSubtask
    doc_ids: tuple[int, ...] | None
    first_doc_id: int


@dataclass(frozen=True)
class LoadedTask:
    """A task ready to be graded.

    Args:
        name: Its name.
        modality: "text" or "vision": which view of the live model answers it.
        n: Documents that will be graded.
        protocol: Name of the protocol.
        backend: What answers it: ``hf``, the live model, or ``vllm``.
        strict_key: lm-eval's result key of the strict grader.
        flexible_key: The key of the lenient twin, or None.
        stage: Everything that determines the answers besides the model, its tokenizer and template;
            JSON-able.
        max_gen_toks: New tokens, of a family the most that a member has; None for log-likelihood tasks.
        parts: The task objects (one, or the members of a family).
        entry: The row of the task.
    """

    name: str
    modality: str
    n: int
    protocol: str
    strict_key: str
    flexible_key: str | None
    stage: dict[str, Any]
    max_gen_toks: int | None
    parts: tuple[Part, ...] = field(repr=False, compare=False)
    entry: TaskEntry = field(repr=False, compare=False)
    backend: str = "hf"

    @property
    def needs_processor(self) -> bool:
        """Whether its pictures go through the vlm's own processor."""
        return bool(self.entry.pictures)

    def documents(self) -> Iterator[dict[str, Any]]:
        """Yield every document as JSON can hold it: pictures in base64, in a family with the subtask it belongs to."""
        for part in self.parts:
            task = part.loaded.task
            for document in task.eval_docs:
                subject = {self.entry.subject: subtask_name(task.config)} if self.entry.subject else {}
                pictures = {name: one.encoded() for name, one in document.items() if isinstance(one, Picture)}
                yield {**subject, **document, **pictures}


def draw_documents(task: str, total: int, limit: int | None, seed: int) -> tuple[int, ...] | None:
    """Return the sorted ids of ``limit`` of ``total`` documents, drawn by (seed, task); None means all."""
    if limit is None or limit >= total:
        return None
    return tuple(sorted(random.Random(f"mergelab:{seed}:{task}").sample(range(total), limit)))


def ready_task(
    entry: TaskEntry, subtasks: list[LoadedSubtask], request: EvalRequest, protocol: Protocol, batch_size: int
) -> LoadedTask:
    """Draw the documents of a loaded task and write down what determines its answers."""
    total = sum(subtask.num_documents for subtask in subtasks)
    drawn = draw_documents(entry.name, total, request.limit, request.subset_seed)
    parts = tuple(_parts(subtasks, drawn))
    first = subtasks[0]
    checkers = tuple(package for need in entry.needs for package in NEEDS[need].packages)
    stage = {
        "task": entry.name,
        "protocol": protocol.name,
        "apply_chat_template": protocol.apply_chat_template,
        "fewshot_as_multiturn": protocol.fewshot_as_multiturn,
        "enable_thinking": protocol.enable_thinking,
        "num_fewshot": first.task.config.num_fewshot,
        "generation_kwargs": first.task.config.generation_kwargs if first.is_generative else None,
        "definition_sha256": sha256_text("".join(subtask.definition_sha256 for subtask in subtasks)),
        "data_sha256": sha256_text("".join(subtask.data_sha256 for subtask in subtasks)),
        "documents": {"of": total, "ids": None if drawn is None else list(drawn)},
        "batch_size": batch_size,
        "seeds": SEEDS,
        "strict_key": entry.strict,
        "flexible_key": entry.flexible,
        "versions": {library: version(library) for library in _LIBRARIES + checkers},
        **({"scale": [entry.unit, entry.lowest]} if entry.unit != 100 else {}),
        **({"registry": [entry.cluster, entry.unparsable]} if entry.home == "folder" else {}),
        **({"code": [code_eval.VERSION, platform.python_version()]} if entry.code else {}),
    }
    return LoadedTask(
        name=entry.name,
        modality=entry.modality,
        n=total if drawn is None else len(drawn),
        protocol=protocol.name,
        strict_key=entry.strict,
        flexible_key=entry.flexible,
        stage=stage,
        max_gen_toks=max(one.task.config.generation_kwargs["max_gen_toks"] for one in subtasks)
        if first.is_generative
        else None,
        parts=parts,
        entry=entry,
        backend=request.backend if entry.modality == "text" else "hf",
    )


def _parts(subtasks: Iterable[LoadedSubtask], drawn: tuple[int, ...] | None) -> Iterable[Part]:
    """Yield the subtasks that have documents to grade: lm-eval takes an empty list of ids for "all"."""
    start = 0
    for subtask in subtasks:
        end = start + subtask.num_documents
        if drawn is None:
            yield Part(subtask, None, start)
        elif own := tuple(doc_id - start for doc_id in drawn if start <= doc_id < end):
            yield Part(subtask, own, start)
        start = end


def sha256_text(text: str) -> str:
    """Return the hex SHA-256 of a text."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
