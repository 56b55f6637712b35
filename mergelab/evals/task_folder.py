"""Tasks of the user's own: a folder of lm-eval YAMLs with a registry of their result keys."""

from __future__ import annotations

from pathlib import Path

from mergelab.config.task_registry import REGISTRY, TaskRow, read_task_registry
from mergelab.errors import RecipeError, problem_list
from mergelab.evals.definitions import definition_files, read_definition, references
from mergelab.evals.documents import named_data
from mergelab.evals.entry import TaskEntry, lm_eval_tasks, task_path
from mergelab.evals.tasks import TASKS

_PICTURES = (
    "grade pictures with lmms-eval or VLMEvalKit and bring the answers in with `mergelab import-samples`, or name a "
    "built-in picture task"
)
_CODE = ("mbpp", "humaneval")
"""Folders of lm-eval whose graders run programs in our own process; built-in tasks go through the sandbox."""

_KINDS: dict[str, type] = {"str": str, "int": int, "float": float, "list": list, "dict": dict}


def known_tasks(folder: Path | None) -> dict[str, TaskEntry]:
    """Return the built-in tasks and those of a folder.

    Raises:
        RecipeError: As for ``read_task_folder``.
    """
    return TASKS if folder is None else {**TASKS, **read_task_folder(folder)}


def read_task_folder(folder: Path) -> dict[str, TaskEntry]:
    """Return the tasks of a folder by name. Nothing in it is run.

    Raises:
        RecipeError: The registry or a YAML is missing or invalid, or a name is taken; all problems in one message.
    """
    rows = read_task_registry(folder)
    problems: list[str] = []
    entries: dict[str, TaskEntry] = {}
    for row in rows:
        if row.name in TASKS:
            problems.append(f"{row.name}: is the name of a built-in task; choose another")
        if row.name in entries:
            problems.append(f"{row.name}: stands twice; keep one")
        if row.lowest and row.unit == 100:
            problems.append(f"{row.name}: lowest {row.lowest:g} needs unit: 1, for a metric that comes in points")
        if row.modality == "vision":
            problems.append(f"{row.name}: modality vision is for built-in tasks; {_PICTURES}")
        found = _definition_problems(folder / row.yaml)
        problems += [f"{row.name}: {problem}" for problem in found]
        entries[row.name] = _entry(row, folder, () if found else _inherited_needs(folder / row.yaml))
    if problems:
        raise RecipeError(problem_list(f"{folder / REGISTRY}: these tasks cannot be used:", problems))
    return entries


def runs_code(entry: TaskEntry) -> str | None:
    """Return what grading a task would run besides lm-eval and mergelab, as a sentence; None for nothing."""
    allow = "allow it with evals.allow_code: true (--set evals.allow_code=true; in mergelab eval --allow-code)"
    if entry.code:
        return f"{entry.name} runs programs that the model writes; {allow}"
    if entry.home != "folder":
        return None
    installed = lm_eval_tasks().resolve()
    own = [one for one in references(read_definition(task_path(entry))) if not one.path.is_relative_to(installed)]
    if not own:
        return None
    return f"{entry.name}: {own[0].path} runs Python of its own (!function {own[0].name}); {allow}"


def own_data(entry: TaskEntry) -> Path | None:
    """Return the documents that lie in the task's folder under its name, as in a folder of data; None if none do."""
    return None if entry.folder is None else named_data(entry.folder, entry.name)


def _entry(row: TaskRow, folder: Path, needs: tuple[str, ...]) -> TaskEntry:
    return TaskEntry(
        row.name,
        row.modality,
        "folder",
        row.yaml,
        strict=row.strict,
        flexible=row.flexible,
        fields={name: _KINDS[kind] for name, kind in row.fields.items()},
        cluster=row.cluster,
        unparsable=row.unparsable,
        unit=float(row.unit),
        lowest=row.lowest,
        needs=needs,
        max_gen_toks=row.max_gen_toks,
        folder=folder,
    )


def _definition_problems(path: Path) -> list[str]:
    try:
        definition = read_definition(path)
    except RecipeError as error:
        return [str(error)]
    if "group" in definition or "task_list" in definition or isinstance(definition.get("task"), list):
        return [f"{path} defines a group; give its tasks one by one"]
    problems = []
    unsafe = any(read_definition(file).get("unsafe_code") for file in definition_files(path))
    if unsafe or any(name in _CODE for name in _lm_eval_folders(path)):
        problems.append(f"{path} grades by running programs of models, which built-in tasks alone may do")
    if definition.get("doc_to_image") is not None:
        problems.append(f"{path} shows pictures (doc_to_image); {_PICTURES}")
    return problems


def _lm_eval_folders(path: Path) -> set[str]:
    """Return the folders of lm-eval's own tasks that a definition includes YAML of, or calls Python of."""
    installed = lm_eval_tasks().resolve()
    included = (file for file in definition_files(path) if file.is_relative_to(installed))
    called = (one.name.split(".") for one in references(read_definition(path)))
    return {file.relative_to(installed).parts[0] for file in included} | {
        parts[2] for parts in called if parts[:2] == ["lm_eval", "tasks"] and len(parts) > 2
    }


def _inherited_needs(path: Path) -> tuple[str, ...]:
    """Return what the built-in tasks need whose definitions in lm-eval this one includes."""
    folders = _lm_eval_folders(path)
    users = (entry for entry in TASKS.values() if entry.home == "lm_eval" and Path(entry.path).parts[0] in folders)
    return tuple(dict.fromkeys(need for entry in users for need in entry.needs))
