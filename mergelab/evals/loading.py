"""Build the real lm-eval task objects: installed YAML, documents from disk, explicit budget.

Only ``max_gen_toks``, the number of shots, the source of the documents and (GPQA) the option order are ours;
stop strings, prompts, filters and graders stay as upstream wrote them. Where documents come from is in ``building``,
drawing subsets in ``loaded``.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mergelab.errors import MachineError, RecipeError
from mergelab.evals.building import FORM_ERRORS, build_from_hub, build_local, build_own
from mergelab.evals.code_eval import own_code_eval
from mergelab.evals.entry import TaskEntry, task_path
from mergelab.evals.families import Local, graded_split, local_splits, read_local
from mergelab.evals.guessing import METRICS, tell_guesses
from mergelab.evals.keys import check_keys
from mergelab.evals.making import made_with
from mergelab.evals.options import gpqa_documents
from mergelab.evals.own_tasks import check_metrics, check_rendered, own_code
from mergelab.evals.pictures import Picture, attach, check_shown, read_pictures
from mergelab.evals.quiet import quiet_harness
from mergelab.evals.resources import prepare

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
    local = None if how.data is None else read_local(entry, how.data, [config for _, config in definitions])
    built = [_load(entry, path, config, local, how) for path, config in definitions]
    return [subtask for subtask in built if subtask is not None]


def _definitions(entry: TaskEntry) -> list[tuple[Path, dict[str, Any]]]:
    """Return the YAML files of the task, or of each member of a family, with their resolved content."""
    path = task_path(entry)
    files = sorted(path.glob(entry.members or f"{entry.name}_*.yaml")) if entry.group else [path]
    with quiet_harness(), own_code_eval() if entry.code else contextlib.nullcontext():
        from lm_eval.tasks._yaml_loader import load_yaml

        try:
            return [(file, load_yaml(file)) for file in files]
        except Exception as error:
            # Python of the user's is run here, and may raise anything.
            if entry.home != "folder" and not isinstance(error, (ImportError, *FORM_ERRORS)):
                raise
            raise RecipeError(f"task {entry.name}: {path} cannot be loaded: {error!r}.") from error


def _load(
    entry: TaskEntry, path: Path, definition: Mapping[str, Any], local: Local | None, how: Loading
) -> LoadedSubtask | None:
    """Build one member, or return None for a member of a family that local documents leave without any."""
    config = copy.deepcopy({k: v for k, v in definition.items() if k not in ("tag", "group", "task_list")})
    if entry.shuffled:
        config["process_docs"] = gpqa_documents
    if entry.guesses:
        config["process_results"] = tell_guesses(config["process_results"])
        config["metric_list"] = [*config["metric_list"], *METRICS]
    if entry.home == "folder":
        config["task"] = entry.name  # without one lm-eval invents another name every time it is asked
    config["num_fewshot"] = how.shots if how.shots is not None else config.get("num_fewshot") or 0
    check_metrics(entry, config)
    _set_budget(entry, config, how.max_gen_toks)
    pictures: dict[str, Picture] = {}
    if local is not None:
        splits = local_splits(entry, config, local)
        if not splits[graded_split(config)]:
            return None
        if entry.pictures:
            pictures = read_pictures(entry.name, local.path, entry.pictures, splits)
        task = build_local(entry, config, splits, local.path)
    elif config.get("custom_dataset") is not None and not entry.tokenized:
        task = build_own(entry, config, path)
    else:
        if entry.tokenized:
            how.notify(f"task {config['task']}: making its documents with the tokenizer at {how.tokenizer}")
        with made_with(entry, config, how.tokenizer):
            task = build_from_hub(entry, config, how.notify)
    return _finish(entry, task, path, pictures)


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


def _finish(entry: TaskEntry, task: Any, path: Path, pictures: Mapping[str, Picture]) -> LoadedSubtask:
    """Decode the documents once, describe the task, and let a grader that cannot run say so."""
    check_keys(entry, task)
    definition = _definition_sha256(entry, task, path)
    split = task.config.test_split or task.config.validation_split
    with quiet_harness():
        documents = [dict(document) for document in _undecoded(task.eval_docs, entry.pictures)]
    if not documents:
        raise RecipeError(f"task {entry.name}: {task.task_name} has no documents to grade.")
    if entry.pictures:
        documents = attach(documents, entry.pictures, pictures)
        check_shown(task, entry.name, documents)
    with quiet_harness():
        check_rendered(entry, task, documents)
        examples = _examples(task, entry.pictures)
    data = _sha256([documents, examples] if examples else documents)
    # Every later pass sees these very documents: a process_docs that draws (GPQA) would grade one order of
    # the options and have asked another.
    task.dataset = {**task.dataset, split: documents}
    task.config.process_docs = None
    loaded = LoadedSubtask(task, task.task_name, len(documents), definition, data)
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


def _examples(task: Any, fields: Sequence[str]) -> list[Any]:
    """Return the documents that examples are drawn from, decoded like the graded ones; none where none are shown."""
    if not task.config.num_fewshot:
        return []
    shown = task.fewshot_docs()
    shown = _undecoded(shown, fields) if hasattr(shown, "features") else shown or ()
    return [dict(one) if isinstance(one, Mapping) else one for one in shown]


def _undecoded(documents: Any, fields: Sequence[str]) -> Any:
    """Return a data set that hands out the picture files of its picture columns instead of decoding them."""
    from datasets import Image

    for name in fields:
        if isinstance(documents.features.get(name), Image):
            documents = documents.cast_column(name, Image(decode=False))
    return documents


def _definition_sha256(entry: TaskEntry, task: Any, path: Path) -> str:
    """Hash the resolved definition without paths and memory addresses, and the Python files that it may call."""
    dumped = {key: value for key, value in task.dump_config().items() if key not in _NOT_THE_QUESTION}
    text = re.sub(r" at 0x[0-9a-f]+", "", json.dumps(dumped, default=repr, sort_keys=True))
    code: Any = (
        own_code(entry)
        if entry.home == "folder"
        else {file.name: file.read_text(encoding="utf-8") for file in sorted(path.parent.glob("*.py"))}
    )
    return _sha256([text, code, str(task.VERSION)])


def _sha256(value: Any) -> str:
    text = json.dumps(value, default=repr, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
