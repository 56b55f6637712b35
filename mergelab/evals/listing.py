"""The known tasks as plain values, for people. No torch and no lm-eval at import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mergelab.evals.definitions import read_definition
from mergelab.evals.entry import TaskEntry, task_path
from mergelab.evals.protocols import PROTOCOLS, Protocol
from mergelab.evals.task_folder import known_tasks, runs_code
from mergelab.evals.tasks import RULER

BENCH = "bench"


def list_tasks(task_folder: Path | None = None) -> list[dict[str, Any]]:
    """Return name, modality, result keys, shots and budget per protocol, and needs of every task.

    ``max_gen_toks`` is None for tasks that write no text, and "required" where the recipe has to name a number; of a
    family it is the largest of its subtasks.

    Args:
        task_folder: A folder with tasks of the user's own, listed after the built-in ones.

    Raises:
        RecipeError: The folder cannot be used.
        MachineError: lm-eval is not installed.
    """
    return [_described(entry) for entry in known_tasks(task_folder).values()]


def _described(entry: TaskEntry) -> dict[str, Any]:
    path = task_path(entry)
    files = sorted(path.glob(entry.members or f"{entry.name}_*.yaml")) if entry.group else [path]
    definitions = [read_definition(file) for file in files]
    needs = list(entry.needs)
    if entry.tokenized:
        needs.append("tokenizer")
    if runs_code(entry):
        needs.append("allow_code")
    return {
        "task": entry.name,
        "modality": entry.modality,
        "home": entry.home,
        "family": "ruler" if entry.name in RULER else None,
        "subtasks": len(files) if entry.group else None,
        "strict": entry.strict,
        "flexible": entry.flexible,
        "needs": needs,
        "fields": {name: kind.__name__ for name, kind in entry.fields.items()},
        "protocols": {
            name: _asked(entry, protocol, definitions)
            for name, protocol in PROTOCOLS.items()
            if (entry.home == BENCH) == name.startswith(BENCH)
        },
    }


def _asked(entry: TaskEntry, protocol: Protocol, definitions: list[dict[str, Any]]) -> dict[str, Any]:
    shots = protocol.shots(entry.name)
    own = [(one.get("generation_kwargs") or {}).get("max_gen_toks") for one in definitions]
    budget: Any = protocol.max_gen_toks.get(entry.name, entry.max_gen_toks)
    if definitions[0].get("output_type", "generate_until") != "generate_until":
        budget = None
    elif budget is None:
        given = [number for number in own if number is not None]
        budget = max(given) if len(given) == len(own) else "required"
    return {
        "num_fewshot": definitions[0].get("num_fewshot") or 0 if shots is None else shots,
        "max_gen_toks": budget,
    }
