"""The tasks this tool knows: where each is defined, which grader is strict, which lenient, and what to watch.

A table a person can read; no torch and no lm-eval at import. Adding a task means adding its row, with both
result keys checked against a real run. Building the task is in ``loading``.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from mergelab.errors import MachineError

Modality = Literal["text", "vision"]


@dataclass(frozen=True)
class TaskEntry:
    """One known task.

    Args:
        name: Its lm-eval name.
        modality: Which view of the live model answers it.
        home: Where its YAML is: the installed lm-eval or the bench's package data.
        path: The YAML (or for a group the folder) under that home.
        strict: lm-eval's result key ``metric,filter`` of the demanding grader.
        flexible: The key of its lenient twin, or None if the task has none.
        fields: Field -> type that every local document must have.
        group: The task is a family of subtasks, scored together weighted by size.
        subject: Field of a document that says which subtask of a family it belongs to.
        cluster: Document field that ties documents together (a shared fact, a shared picture).
        unparsable: When no answer could be read out of the text: no filter of the two graders found one
            ("filter"), the text is empty, where graders read all of it ("empty"), the grader drew lots for want of
            one ("guessed"), or never, where no text is written ("never").
        listed: Field of a local line that lists several documents, for data that holds a picture with its questions.
        punkt: The graders need NLTK's punkt_tab tables.
        shuffled: The task draws the order of its options; we fix that order by the question.
        members: Pattern of the YAMLs of a family's subtasks; ``<name>_*.yaml`` where it says nothing.
        pictures: Fields that hold pictures, shown through the vlm's own processor.
        guesses: The grader draws an answer where it reads none; we say so and fix the draw by the question.
    """

    name: str
    modality: Modality
    home: Literal["lm_eval", "bench"]
    path: str
    strict: str
    flexible: str | None
    fields: Mapping[str, type] = field(default_factory=dict)
    group: bool = False
    subject: str | None = None
    cluster: str | None = None
    unparsable: Literal["filter", "empty", "guessed", "never"] = "filter"
    listed: str | None = None
    punkt: bool = False
    shuffled: bool = False
    members: str = ""
    pictures: tuple[str, ...] = ()
    guesses: bool = False


_GSM8K = {"question": str, "answer": str}
_MATCH, _EXTRACT = "exact_match,strict-match", "exact_match,flexible-extract"

TASKS: dict[str, TaskEntry] = {
    entry.name: entry
    for entry in (
        TaskEntry(
            "bench_format",
            "text",
            "bench",
            "bench_format.yaml",
            strict="strict,none",
            flexible="flexible,none",
            cluster="cluster",
            unparsable="empty",
            fields={"prompt": str, "target": str, "answer": str},
        ),
        TaskEntry(
            "bench_image",
            "vision",
            "bench",
            "bench_image.yaml",
            strict="strict,none",
            flexible="flexible,none",
            cluster="cluster",
            unparsable="empty",
            fields={"kind": str, "question": str, "answers": list, "sentences": list, "pixels": str},
            listed="questions",
        ),
        TaskEntry(
            "ifeval",
            "text",
            "lm_eval",
            "ifeval/ifeval.yaml",
            strict="prompt_level_strict_acc,none",
            flexible="prompt_level_loose_acc,none",
            fields={"key": int, "prompt": str, "instruction_id_list": list, "kwargs": list},
            unparsable="empty",
            punkt=True,
        ),
        TaskEntry("gsm8k", "text", "lm_eval", "gsm8k/gsm8k.yaml", fields=_GSM8K, strict=_MATCH, flexible=_EXTRACT),
        TaskEntry(
            "gsm8k_cot",
            "text",
            "lm_eval",
            "gsm8k/gsm8k-cot.yaml",
            fields=_GSM8K,
            strict=_MATCH,
            flexible=_EXTRACT,
        ),
        TaskEntry(
            "gsm8k_cot_zeroshot",
            "text",
            "lm_eval",
            "gsm8k/gsm8k-cot-zeroshot.yaml",
            fields=_GSM8K,
            strict=_MATCH,
            flexible=_EXTRACT,
        ),
        TaskEntry(
            "gpqa_diamond_cot_zeroshot",
            "text",
            "lm_eval",
            "gpqa/cot_zeroshot/gpqa_diamond_cot_zeroshot.yaml",
            fields={
                "Question": str,
                "Correct Answer": str,
                "Incorrect Answer 1": str,
                "Incorrect Answer 2": str,
                "Incorrect Answer 3": str,
            },
            shuffled=True,
            strict=_MATCH,
            flexible=_EXTRACT,
        ),
        TaskEntry(
            "mmlu_pro",
            "text",
            "lm_eval",
            "mmlu_pro",
            strict="exact_match,custom-extract",
            flexible=None,
            fields={"question": str, "options": list, "answer": str, "category": str},
            group=True,
            subject="category",
        ),
        TaskEntry(
            "boolq",
            "text",
            "lm_eval",
            "super_glue/boolq/default.yaml",
            strict="acc,none",
            flexible=None,
            fields={"passage": str, "question": str, "label": int},
            unparsable="never",
        ),
        TaskEntry(
            "mmlu",
            "text",
            "lm_eval",
            "mmlu/default",
            strict="acc,none",
            flexible=None,
            fields={"question": str, "choices": list, "answer": int, "subject": str},
            group=True,
            subject="subject",
            unparsable="never",
        ),
        # Pictures through the vlm's own processor.
        TaskEntry(
            "mmmu_val",
            "vision",
            "lm_eval",
            "mmmu",
            strict="read_acc,none",
            flexible="acc,none",
            fields={"subject": str, "question": str, "options": str, "question_type": str, "answer": str},
            group=True,
            members="mmmu_*.yaml",
            subject="subject",
            unparsable="guessed",
            pictures=tuple(f"image_{number}" for number in range(1, 8)),
            guesses=True,
        ),
        TaskEntry(
            "chartqa",
            "vision",
            "lm_eval",
            "chartqa/chartqa.yaml",
            strict="exact_match,none",
            flexible="relaxed_accuracy,none",
            fields={"query": str, "label": list, "image": str},
            cluster="image",
            unparsable="empty",
            pictures=("image",),
        ),
    )
}


def nearest(name: str, known: list[str]) -> str:
    """Return `` (did you mean X?)`` for the closest known name, or the list of all when none is close."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else f" (known: {', '.join(sorted(known))})"


def task_path(entry: TaskEntry) -> Path:
    """Return the YAML file (for a group: the folder) that defines a task.

    Raises:
        MachineError: lm-eval is not installed, or the file is not where this version of us expects it.
    """
    if entry.home == "bench":
        home = Path(str(files("mergelab"))) / "bench" / "data" / "tasks"
    else:
        spec = find_spec("lm_eval")
        if spec is None or not spec.submodule_search_locations:
            raise MachineError("lm-eval is not installed. Install mergelab with its dependencies.")
        home = Path(next(iter(spec.submodule_search_locations))) / "tasks"
    path = home / entry.path
    if not path.exists():
        raise MachineError(
            f"task {entry.name}: expected its definition at {path}, found nothing. "
            "Install the lm-eval version that mergelab asks for."
        )
    return path
