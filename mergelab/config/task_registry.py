"""What ``registry.yaml`` in a folder of lm-eval tasks may say: which result key is strict, which lenient."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from mergelab.config.document import Document, read_document
from mergelab.config.pair import Name
from mergelab.config.problems import did_you_mean, dotted, validate
from mergelab.errors import RecipeError, problem_list

REGISTRY = "registry.yaml"

Text = Annotated[str, Field(min_length=1)]
Key = Annotated[str, Field(pattern=r"^[^,\s][^,]*,[^,\s][^,]*$")]


class TaskRow(Document):
    """One task of the folder."""

    name: Name
    """What recipes and tables call it; none of the built-in names."""

    yaml: Text
    """Its lm-eval YAML, relative to the folder."""

    strict: Key
    """lm-eval's result key ``metric,filter`` of the demanding grader."""

    flexible: Key | None = None
    """The key of its lenient twin; null if there is none."""

    modality: Literal["text", "vision"] = "text"
    """Always text; vision is for built-in tasks, since a folder cannot say which fields hold pictures."""

    fields: dict[Text, Literal["str", "int", "float", "list", "dict"]] = Field(default_factory=dict)
    """Field -> type that every document of ``evals.data`` must have."""

    cluster: Text | None = None
    """Field of a document that ties documents together: they are not independent."""

    max_gen_toks: Annotated[int, Field(ge=1)] | None = None
    """Most new tokens an answer, where the recipe names no other number; null takes the YAML's own."""

    unparsable: Literal["filter", "empty", "never"] = "empty"
    """When an answer counts as unparsable: no filter found one, the text is empty, or never."""

    unit: Literal[1, 100] = 100
    """Points that 1 of the metric is worth: 100 for shares in [0, 1], 1 for metrics that come in points."""

    lowest: Annotated[float, Field(le=0, allow_inf_nan=False)] = 0.0
    """Points of the worst answer under the strict grader, at most 0; needs ``unit: 1``."""


class TaskRegistry(Document):
    """All tasks of a folder."""

    tasks: Annotated[tuple[TaskRow, ...], Field(strict=False, min_length=1)]
    """One entry a task."""


def read_task_registry(folder: Path) -> tuple[TaskRow, ...]:
    """Return the rows of ``registry.yaml`` in a folder.

    Raises:
        RecipeError: The folder or file is missing, or it says something invalid; all problems in one message.
    """
    if not folder.is_dir():
        raise RecipeError(f"{folder}: expected a folder of lm-eval tasks with {REGISTRY}, found none.")
    path = folder / REGISTRY
    registry, problems = validate(TaskRegistry, read_document(path), _unknown_key, {})
    if problems or registry is None:
        raise RecipeError(problem_list(f"{path}: this task registry is not valid:", problems))
    return registry.tasks


def _unknown_key(path: tuple[str | int, ...], value: object) -> str:
    known = TaskRegistry.model_fields if len(path) == 1 else TaskRow.model_fields
    return f"{dotted(path)}: unknown key{did_you_mean(str(path[-1]), known) or '; known are ' + ', '.join(known)}"
