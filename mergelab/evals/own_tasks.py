"""What a task of the user's own may not do, asked once its lm-eval definition is loaded, before anything is graded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mergelab.errors import RecipeError
from mergelab.evals.definitions import definition_files
from mergelab.evals.entry import TaskEntry, task_path


def check_metrics(entry: TaskEntry, config: Mapping[str, Any]) -> None:
    """Refuse a metric that lm-eval does not have itself: it would fetch one from the hub and run its code.

    Raises:
        RecipeError: The definition names such a metric, and no ``process_results`` that stands in for it.
    """
    if entry.home != "folder" or config.get("process_results") is not None:
        return
    import lm_eval.api.metrics  # noqa: F401  (fills the registry)
    from lm_eval.api.registry import metric_registry

    for one in config.get("metric_list") or ():
        name = one.get("metric") if isinstance(one, Mapping) else one
        if callable(name):
            continue
        if (isinstance(one, Mapping) and one.get("hf_evaluate")) or name not in metric_registry:
            raise RecipeError(
                f"task {entry.name}: metric {name!r} is none of lm-eval's own; evaluate would fetch its code and run "
                "it. Name a metric of lm-eval, or grade with process_results: !function FILE.NAME."
            )


def check_rendered(entry: TaskEntry, task: Any, documents: Sequence[Mapping[str, Any]]) -> None:
    """Ask and answer every document of a task of the user's own, so that none fails after hours.

    Raises:
        RecipeError: The definition cannot render one; the first is named.
    """
    if entry.home != "folder":
        return
    asked = ["doc_to_text", "doc_to_target"] + (["doc_to_choice"] if task.config.doc_to_choice is not None else [])
    for place, document in enumerate(documents):
        for what in asked:
            try:
                getattr(task, what)(document)
            except Exception as error:  # a template or Python of the user's may raise anything
                raise RecipeError(
                    f"task {entry.name}: document {place} does not fit {what}: {error!r}. Correct the document or "
                    f"{task_path(entry)}."
                ) from error


def own_code(entry: TaskEntry) -> list[list[str]]:
    """Return name and text of every Python file in the folder of a task and beside the YAML files that it includes."""
    assert entry.folder is not None
    folder = entry.folder.resolve()
    found = {file: file.relative_to(folder).as_posix() for file in folder.rglob("*.py")}
    for yaml in definition_files(task_path(entry)):
        for file in yaml.parent.glob("*.py"):
            found.setdefault(file, f"{file.parent.name}/{file.name}")
    named = [[name, file.read_text(encoding="utf-8", errors="replace")] for file, name in found.items()]
    return sorted(named)
