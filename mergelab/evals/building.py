"""Build lm-eval task objects over local documents, the definition's own, or those of the hub.

The network is asked last, and only where it is allowed.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from mergelab.errors import MachineError, RecipeError
from mergelab.evals.documents import Document
from mergelab.evals.entry import TaskEntry
from mergelab.evals.quiet import quiet_harness, replaced

_NEVER_THE_HUB = (KeyError, TypeError, AttributeError, IndexError, AssertionError, SyntaxError, TemplateError)
FORM_ERRORS = (ValueError, *_NEVER_THE_HUB)
"""What a definition or documents of another form than lm-eval expects end in."""

_HUB_ERRORS = (OSError, ValueError, RuntimeError)


def build_local(entry: TaskEntry, config: dict[str, Any], splits: dict[str, list[Document]], data: Path) -> Any:
    """Build a task over documents in memory: no hub, no copy in a cache, no fingerprint of a path."""
    _drop_missing_splits(entry, config, splits, data)
    for key in ("dataset_path", "dataset_name", "dataset_kwargs"):
        config.pop(key, None)
    try:
        with quiet_harness():
            from datasets import Dataset

            loaded = {split: Dataset.from_list(documents) for split, documents in splits.items()}

            def documents_in_memory(**_: Any) -> dict[str, Any]:
                return loaded

            config["custom_dataset"] = documents_in_memory
            return _construct(config)
    except _form_errors(entry) as error:
        raise RecipeError(f"task {entry.name}: {data} does not fit the task: {error!r}. Check evals.data.") from error


def build_own(entry: TaskEntry, config: Mapping[str, Any], path: Path) -> Any:
    """Build a task whose definition brings its documents along."""
    caught: tuple[type[Exception], ...] = (OSError, *_form_errors(entry))
    try:
        with quiet_harness():
            return _construct(config)
    except caught as error:
        raise RecipeError(
            f"task {entry.name}: the documents that {path} brings cannot be used: {error!r}. "
            + ("Correct the task." if entry.home == "folder" else "Install mergelab again.")
        ) from error


def _form_errors(entry: TaskEntry) -> tuple[type[Exception], ...]:
    """Return what documents of another form end in; Python of the user's may raise anything."""
    return (Exception,) if entry.home == "folder" else FORM_ERRORS


def _drop_missing_splits(entry: TaskEntry, config: dict[str, Any], splits: Mapping[str, Any], data: Path) -> None:
    """Forget splits that are not on disk; refuse if few-shot examples were to come from one."""
    shots = config["num_fewshot"]
    inline = (config.get("fewshot_config") or {}).get("samples") is not None
    source = config.get("fewshot_split") or config.get("training_split") or config.get("validation_split")
    if shots and not inline and source not in splits:
        raise RecipeError(
            f"task {entry.name}: expected a split {source!r} for its {shots} examples, found "
            f"{', '.join(sorted(splits))} at {data}. Give evals.data a folder with {source}.jsonl beside the "
            "graded split, or use a protocol without examples."
        )
    for key in ("fewshot_split", "training_split", "validation_split"):
        if config.get(key) not in splits:
            config[key] = None


def build_from_hub(entry: TaskEntry, config: dict[str, Any], notify: Callable[[str], None]) -> Any:
    """Build a task over its own data set: from the local cache, else over the network if that is allowed."""
    import huggingface_hub.constants

    source = "/".join(str(part) for part in (config.get("dataset_path"), config.get("dataset_name")) if part)
    source = source or "of essays or questions"

    def missing(why: str) -> MachineError:
        return MachineError(
            f"task {entry.name}: its data set {source} is not on this machine and {why}. Give its documents "
            f"with evals.data: {{{entry.name}: FILE.jsonl}}, or run once with network and access to it."
        )

    def unfit(error: Exception) -> RecipeError:
        remedy = "Correct the task." if entry.home == "folder" else "Give other documents with evals.data."
        return RecipeError(
            f"task {entry.name}: its definition and its data set {source} do not fit together: {error!r}. {remedy}"
        )

    try:
        with quiet_harness(), offline():
            return _construct(config)
    except _NEVER_THE_HUB as error:
        raise unfit(error) from error
    except _HUB_ERRORS as error:
        if huggingface_hub.constants.HF_HUB_OFFLINE:
            raise missing("HF_HUB_OFFLINE forbids the network") from error
    notify(f"task {entry.name}: fetching its data set {source} from the Hugging Face hub")
    try:
        with quiet_harness():
            return _construct(config)
    except _NEVER_THE_HUB as error:
        raise unfit(error) from error
    except _HUB_ERRORS as error:
        first_line = str(error).strip().partition("\n")[0] or repr(error)
        raise missing(f"could not be fetched ({first_line})") from error


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Forbid the network to the hub client and to datasets for the duration."""
    import datasets
    import huggingface_hub.constants

    with (
        replaced(huggingface_hub.constants, "HF_HUB_OFFLINE", True),
        replaced(datasets.config, "HF_HUB_OFFLINE", True),
    ):
        yield


def _construct(config: Mapping[str, Any]) -> Any:
    from lm_eval.api.task import ConfigurableTask

    return ConfigurableTask(config=copy.deepcopy(dict(config)))
