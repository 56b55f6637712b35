"""Build the real lm-eval task objects: installed YAML, documents from disk, explicit budget.

Only ``max_gen_toks``, the number of shots, the source of the documents and (GPQA) the option order are ours;
stop strings, prompts, filters and graders stay as upstream wrote them. Drawing subsets is in ``loaded``.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mergelab.errors import MachineError, RecipeError
from mergelab.evals.code_eval import own_code_eval
from mergelab.evals.documents import Document, read_splits
from mergelab.evals.entry import TaskEntry, nearest, task_path
from mergelab.evals.keys import check_keys
from mergelab.evals.making import made_with
from mergelab.evals.options import gpqa_documents
from mergelab.evals.quiet import quiet_harness, replaced
from mergelab.evals.resources import prepare

_HUB_ERRORS = (OSError, ValueError, RuntimeError)
_FORM_ERRORS = (KeyError, TypeError, ValueError, AttributeError, IndexError, AssertionError, SyntaxError)
_GREEDY_KEYS = {"until", "do_sample", "temperature", "max_gen_toks"}
# Where the documents lie and where lm-eval was installed say nothing about what is asked.
_NOT_THE_QUESTION = ("dataset_path", "dataset_name", "dataset_kwargs", "custom_dataset", "metadata", "tag")


@dataclass
class LoadedSubtask:
    """One lm-eval task object, its documents decoded once.

    Args:
        task: The ``ConfigurableTask``.
        name: Its lm-eval name.
        num_documents: Documents in the graded split.
        definition_sha256: Hash over what is asked and how it is graded: the resolved definition and the code
            beside it.
        data_sha256: Hash over the documents.
        failures: Error text -> how often a grader could not run, filled while grading.
    """

    task: Any
    name: str
    num_documents: int
    definition_sha256: str
    data_sha256: str
    failures: Counter[str] = field(default_factory=Counter)

    @property
    def is_generative(self) -> bool:
        """Whether the model writes text, rather than being asked for log-likelihoods."""
        return bool(self.task.OUTPUT_TYPE == "generate_until")


@dataclass(frozen=True)
class Loading:
    """How a task is to be built.

    Args:
        data: A JSONL file or a folder of splits; None takes the task's own source.
        shots: Examples to show; None takes the task's own number.
        max_gen_toks: New tokens; None takes the task's own number, which must then be explicit.
        tokenizer: Folder of the tokenizer that documents of a given length are made with.
        notify: Told before anything is fetched over the network.
    """

    data: Path | None
    shots: int | None
    max_gen_toks: int | None
    tokenizer: Path | None
    notify: Callable[[str], None]


def load_subtasks(entry: TaskEntry, how: Loading) -> list[LoadedSubtask]:
    """Build the task objects of one known task (several for a family).

    Raises:
        RecipeError: Documents, settings or result keys do not fit the task.
        MachineError: Documents or graders' resources are not on this machine.
    """
    for need in entry.needs:
        try:
            prepare(need)
        except MachineError as error:
            raise MachineError(f"task {entry.name}: {error}") from error
    definitions = _definitions(entry)
    if entry.subject and how.data is not None:
        _check_subjects(entry, [config for _, config in definitions], how.data)
    built = [_load(entry, path, config, how) for path, config in definitions]
    return [subtask for subtask in built if subtask is not None]


def _check_subjects(entry: TaskEntry, definitions: list[dict[str, Any]], data: Path) -> None:
    """Refuse local documents of a family that none of its members would take."""
    assert entry.subject is not None
    split = _graded_split(definitions[0])
    known = {_words(subtask_name(definition)): subtask_name(definition) for definition in definitions}
    found = Counter(
        str(document[entry.subject]) for document in read_splits(entry.name, data, entry.fields, split)[split]
    )
    unknown = [name for name in found if _words(name) not in known]
    if unknown:
        raise RecipeError(
            f"task {entry.name}: {data}: {sum(found[name] for name in unknown)} documents have a {entry.subject} that "
            f"the task does not know: {unknown[0]!r}{nearest(unknown[0], list(known.values()))}."
        )


def _definitions(entry: TaskEntry) -> list[tuple[Path, dict[str, Any]]]:
    """Return the YAML files of the task, or of each member of a family, with their resolved content."""
    path = task_path(entry)
    files = sorted(path.glob(entry.members or f"{entry.name}_*.yaml")) if entry.group else [path]
    with quiet_harness(), own_code_eval() if entry.code else contextlib.nullcontext():
        from lm_eval.tasks._yaml_loader import load_yaml

        try:
            return [(file, load_yaml(file)) for file in files]
        except (ImportError, *_FORM_ERRORS) as error:
            raise RecipeError(f"task {entry.name}: {path} cannot be loaded: {error!r}.") from error


def _load(entry: TaskEntry, path: Path, definition: Mapping[str, Any], how: Loading) -> LoadedSubtask | None:
    """Build one member, or return None for a member of a family that local documents leave without any."""
    config = copy.deepcopy({k: v for k, v in definition.items() if k not in ("tag", "group", "task_list")})
    if entry.shuffled:
        config["process_docs"] = gpqa_documents
    if entry.home == "folder":
        config["task"] = entry.name  # without one lm-eval invents another name every time it is asked
    config["num_fewshot"] = how.shots if how.shots is not None else config.get("num_fewshot") or 0
    _set_budget(entry, config, how.max_gen_toks)
    if how.data is not None:
        splits = _local_splits(entry, config, how.data)
        if not splits[_graded_split(config)]:
            return None
        task = _build_local(entry, config, splits, how.data)
    elif config.get("custom_dataset") is not None and not entry.tokenized:
        task = _build_own(entry, config, path)
    else:
        if entry.tokenized:
            how.notify(f"task {config['task']}: making its documents with the tokenizer at {how.tokenizer}")
        with made_with(entry, config, how.tokenizer):
            task = _build_from_hub(entry, config, how.notify)
    return _finish(entry, task, path)


def _set_budget(entry: TaskEntry, config: dict[str, Any], max_gen_toks: int | None) -> None:
    """Write the budget into the resolved generation block and touch nothing else there."""
    if config.get("output_type", "generate_until") != "generate_until":
        if max_gen_toks is not None:
            raise RecipeError(
                f"task {entry.name}: it compares log-likelihoods and writes no text, so evals.max_gen_toks "
                f"{max_gen_toks} has no meaning. Remove it."
            )
        return
    generation = config.get("generation_kwargs")
    if isinstance(generation, dict) and entry.home == "lm_eval":
        # What lm-eval does with a definition that has none (EQ-Bench).
        generation.setdefault("until", [config.get("fewshot_delimiter", "\n\n")])
    if not isinstance(generation, dict) or "until" not in generation:
        raise RecipeError(f"task {entry.name}: its definition names no generation_kwargs with stop strings (until).")
    if max_gen_toks is not None:
        generation["max_gen_toks"] = max_gen_toks
    unknown = sorted(set(generation) - _GREEDY_KEYS)
    if unknown or generation.get("do_sample") or float(generation.get("temperature") or 0.0) != 0.0:
        raise RecipeError(f"task {entry.name}: expected plain greedy decoding, found {generation}. No sampling here.")
    budget = generation.get("max_gen_toks")
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
        raise RecipeError(
            f"task {entry.name}: no explicit number of new tokens (found {budget!r}); lm-eval would cut at "
            f"256. Set evals.max_gen_toks: {{{entry.name}: N}}."
        )


def _local_splits(entry: TaskEntry, config: Mapping[str, Any], data: Path) -> dict[str, list[Document]]:
    """Return split -> documents of ``evals.data``; members of a family take those of their subject."""
    graded = _graded_split(config)
    splits = read_splits(entry.name, data, entry.fields, graded)
    for name, value in entry.only.items():
        splits[graded] = [document for document in splits[graded] if document[name] == value]
        if not splits[graded]:
            raise RecipeError(f"task {entry.name}: no document at {data} has {name} {value}, which is what is graded.")
    if not entry.subject:
        return splits
    member = _words(subtask_name(config))
    return {
        split: [document for document in documents if _words(document[entry.subject]) == member]
        for split, documents in splits.items()
    }


def subtask_name(config: Any) -> str:
    """Return what documents call the subtask of a family that a definition is of."""
    return str(config.get("dataset_name") or config.get("task_alias") or config["task"])


def _graded_split(config: Mapping[str, Any]) -> str:
    return str(config.get("test_split") or config["validation_split"])


def _words(name: str) -> str:
    """Return a subject's name as both spellings share it: ``computer_science`` and ``computer science``."""
    return name.replace("_", " ").lower()


def _build_local(entry: TaskEntry, config: dict[str, Any], splits: dict[str, list[Document]], data: Path) -> Any:
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
    except _FORM_ERRORS as error:
        raise RecipeError(f"task {entry.name}: {data} does not fit the task: {error!r}. Check evals.data.") from error


def _build_own(entry: TaskEntry, config: Mapping[str, Any], path: Path) -> Any:
    """Build a task whose definition brings its documents along."""
    try:
        with quiet_harness():
            return _construct(config)
    except (OSError, *_FORM_ERRORS) as error:
        raise RecipeError(
            f"task {entry.name}: the documents that {path} brings cannot be used: {error!r}. "
            + ("Correct the task." if entry.home == "folder" else "Install mergelab again.")
        ) from error


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


def _build_from_hub(entry: TaskEntry, config: dict[str, Any], notify: Callable[[str], None]) -> Any:
    """Build a task over its own data set: from the local cache, else over the network if that is allowed."""
    import huggingface_hub.constants

    source = "/".join(str(part) for part in (config.get("dataset_path"), config.get("dataset_name")) if part)
    source = source or "of essays or questions"

    def missing(why: str) -> MachineError:
        return MachineError(
            f"task {entry.name}: its data set {source} is not on this machine and {why}. Give its documents "
            f"with evals.data: {{{entry.name}: FILE.jsonl}}, or run once with network and access to it."
        )

    try:
        with quiet_harness(), offline():
            return _construct(config)
    except _HUB_ERRORS as error:
        if huggingface_hub.constants.HF_HUB_OFFLINE:
            raise missing("HF_HUB_OFFLINE forbids the network") from error
    notify(f"task {entry.name}: fetching its data set {source} from the Hugging Face hub")
    try:
        with quiet_harness():
            return _construct(config)
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


def _finish(entry: TaskEntry, task: Any, path: Path) -> LoadedSubtask:
    """Decode the documents once, describe the task, and let a grader that cannot run say so."""
    check_keys(entry, task)
    definition = _definition_sha256(task, path)
    split = task.config.test_split or task.config.validation_split
    with quiet_harness():
        documents = [dict(document) for document in task.eval_docs]
    if not documents:
        raise RecipeError(f"task {entry.name}: {task.task_name} has no documents to grade.")
    # Every later pass sees these very documents: a process_docs that draws (GPQA) would grade one order of
    # the options and have asked another.
    task.dataset = {**task.dataset, split: documents}
    task.config.process_docs = None
    loaded = LoadedSubtask(task, task.task_name, len(documents), definition, _sha256(documents))
    grade = task.process_results

    def grade_or_leave_ungraded(document: Any, results: Any) -> Any:
        try:
            verdicts = grade(document, results)
        except Exception as error:
            loaded.failures[f"{type(error).__name__}: {str(error).strip()[:200]}"] += 1
            return {}
        # TruthfulQA divides by the sum of the likelihoods: where all of them underflow, it says NaN.
        broken = [name for name, value in verdicts.items() if isinstance(value, float) and not math.isfinite(value)]
        if broken:
            loaded.failures[f"{', '.join(broken)} is no finite number"] += 1
            return {}
        return verdicts

    task.process_results = grade_or_leave_ungraded
    return loaded


def _definition_sha256(task: Any, path: Path) -> str:
    """Hash the resolved definition without paths and memory addresses, and the Python files beside it."""
    dumped = {key: value for key, value in task.dump_config().items() if key not in _NOT_THE_QUESTION}
    text = re.sub(r" at 0x[0-9a-f]+", "", json.dumps(dumped, default=repr, sort_keys=True))
    code = {file.name: file.read_text(encoding="utf-8") for file in sorted(path.parent.glob("*.py"))}
    return _sha256([text, code, str(task.VERSION)])


def _sha256(value: Any) -> str:
    text = json.dumps(value, default=repr, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
