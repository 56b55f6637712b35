"""Do the result keys of a task exist? Asked when the task is loaded, not after hours of generation."""

from __future__ import annotations

from typing import Any

from mergelab.errors import MachineError, RecipeError
from mergelab.evals.entry import TaskEntry, nearest


def known_keys(task: Any) -> list[str]:
    """Return the keys ``metric,filter`` that a lm-eval task object will report."""
    metrics: list[str] = []
    for name, settings in task._metric_fn_kwargs.items():
        # A metric that takes k reports one number for each: HumanEval's pass_at_k becomes pass@1.
        metrics += [f"pass@{k}" for k in settings["k"]] if "k" in settings else [str(name)]
    return [f"{metric},{one.name}" for metric in metrics for one in task._filters]


def check_keys(entry: TaskEntry, task: Any) -> None:
    """Refuse a task whose strict or flexible key is none of those that its definition gives.

    Raises:
        RecipeError: A task of the user's names such a key.
        MachineError: One of ours does: lm-eval's definition is another one than ours was written for.
    """
    known = known_keys(task)
    for grader, key in (("strict", entry.strict), ("flexible", entry.flexible)):
        if key is None:
            continue
        if key in known:
            if entry.home == "folder":
                _check_mean(entry, task, grader, key)
            continue
        message = f"task {entry.name}: its {grader} key is {key!r}, which {task.task_name} does not report"
        if entry.home == "folder":
            raise RecipeError(f"{message}{nearest(key, known)}. Correct registry.yaml.")
        raise MachineError(f"{message}{nearest(key, known)}. Install the lm-eval version that mergelab asks for.")


def _check_mean(entry: TaskEntry, task: Any, grader: str, key: str) -> None:
    """Refuse a key whose number is no mean over documents: intervals and paired tests would speak of another one."""
    from lm_eval.api.registry import get_aggregation

    metric = key.rpartition(",")[0]
    if task.aggregation().get(metric) is not get_aggregation("mean"):
        raise RecipeError(
            f"task {entry.name}: its {grader} key is {key!r}, which is no mean over the documents. Name a metric with "
            "`aggregation: mean`."
        )
