"""Load every task of a request once, then grade model after model: one ``simple_evaluate`` call a task.

No lm-eval cache of answers is ever used: its key does not know the weights, and in a sweep it would make all
points equal. Everything that can be wrong with the request is found by ``load_suite``, before a model is
touched.
"""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mergelab.errors import MachineError, MergelabError, RecipeError, problem_list
from mergelab.evals.entry import nearest
from mergelab.evals.loaded import SEEDS, LoadedTask, ready_task, sha256_text
from mergelab.evals.loading import Loading, load_subtasks
from mergelab.evals.protocols import PROTOCOLS, Protocol
from mergelab.evals.quiet import Progress, quiet, quiet_harness
from mergelab.evals.request import EvalRequest
from mergelab.evals.resources import check_thread
from mergelab.evals.samples import Sample, build_samples, check_scores, harness_scores, scored
from mergelab.evals.task_folder import known_tasks, own_data, runs_code

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel


@dataclass(frozen=True)
class TaskResult:
    """What grading one task of one model gave: ``metrics`` and one sample a document, both JSON-able."""

    metrics: dict[str, Any]
    samples: list[Sample]


@dataclass(frozen=True)
class _PreparedTokenizer:
    """A caller's tokenizer, our copy of it with the template set, and the prompts rendered with it so far."""

    source: Any
    tokenizer: Any
    rendered: dict[str, str]


class EvalSuite:
    """Tasks loaded under one protocol, to be asked of any number of models."""

    def __init__(self, tasks: tuple[LoadedTask, ...], protocol: Protocol, batch_size: int) -> None:
        self.tasks = tasks
        self.protocol = protocol
        self.batch_size = batch_size
        self._prepared: _PreparedTokenizer | None = None

    def check_tokenizer(self, tokenizer: Any, chat_template: str | None = None) -> str | None:
        """Return the chat template that will be used, or None under a protocol without one.

        Raises:
            RecipeError: The protocol needs a template and there is none, or the tokenizer has no end token.
        """
        if tokenizer.eos_token_id is None:
            raise RecipeError(
                f"protocol {self.protocol.name}: the tokenizer has no end token; answers would never stop."
            )
        if not self.protocol.apply_chat_template:
            return None
        stored = tokenizer.chat_template
        if isinstance(stored, dict):
            stored = stored.get("default")
        template = chat_template or stored
        if not template:
            raise RecipeError(
                f"protocol {self.protocol.name}: it asks through a chat template, and the tokenizer at "
                f"{tokenizer.name_or_path or 'hand'} has none. Name a template (evals.template) or another "
                "protocol."
            )
        return str(template)

    def evaluate(
        self,
        task_name: str,
        model: PreTrainedModel,
        tokenizer: Any,
        *,
        generation_config: GenerationConfig | None = None,
        chat_template: str | None = None,
        progress: Progress | None = None,
    ) -> TaskResult:
        """Grade one task of one live model.

        Args:
            task_name: One of ``self.tasks``.
            model: The text view for text tasks, the re-assembled VLM for vision tasks; on its device,
                unchanged afterwards (untied heads stay untied).
            tokenizer: Copied before use.
            generation_config: Where the stop ids come from (besides the tokenizer's end token); None takes
                the model's. Nothing else of it is used.
            chat_template: One template forced on all models; None takes the tokenizer's.
            progress: Called with (rows done, rows in all).

        Raises:
            RecipeError: No such task, no template, or the budget does not fit the model's context.
            MergelabError: lm-eval's scores differ from ours over the same answers.
        """
        task = self._task(task_name)
        check_thread(task.name, task.entry.needs)
        template = self.check_tokenizer(tokenizer, chat_template)
        with quiet():
            from mergelab.evals.harness import PictureHarness, TextHarness, greedy_decoding

            prepared = self._prepare(tokenizer, template)
        kind = PictureHarness if task.modality == "vision" else TextHarness
        started = time.monotonic()
        with quiet_harness(progress):
            harness = kind(
                model,
                prepared.tokenizer,
                batch_size=self.batch_size,
                decoding=greedy_decoding(prepared.tokenizer, generation_config or model.generation_config),
                rendered=prepared.rendered,
                enable_thinking=self.protocol.enable_thinking if "enable_thinking" in (template or "") else None,
            )
            _check_context(task, harness.max_length)
            for part in task.parts:
                part.loaded.failures.clear()
            results = self._call(task, harness)
        samples, first_prompt = _collect(task, results, harness.generations)
        metrics = {
            "task": task.name,
            "modality": task.modality,
            "protocol": task.protocol,
            "n": task.n,
            **scored(task.entry, samples),
            "ungradable_reasons": dict(sum((part.loaded.failures for part in task.parts), Counter())),
            "cut_prompts": harness.num_cut_prompts,
            "num_tokens": sum(sample["num_tokens"] for sample in samples),
            "seconds": round(time.monotonic() - started, 3),
            "chat_template_sha256": None if template is None else sha256_text(template),
            "first_prompt": first_prompt,
            "generation_config": _described(harness.decoding, task.max_gen_toks),
            "strict_key": task.strict_key,
            "flexible_key": task.flexible_key,
            "lm_eval": harness_scores(task, results, samples),
        }
        check_scores(task.entry, samples, metrics["lm_eval"])
        return TaskResult(metrics, samples)

    def _task(self, name: str) -> LoadedTask:
        for task in self.tasks:
            if task.name == name:
                return task
        raise RecipeError(f"task {name!r} is not loaded{nearest(name, [task.name for task in self.tasks])}.")

    def _prepare(self, tokenizer: Any, template: str | None) -> _PreparedTokenizer:
        """Return a private copy of the tokenizer that carries the template, kept for the next call."""
        kept = self._prepared
        if kept is None or kept.source is not tokenizer or kept.tokenizer.chat_template != template:
            copied = copy.deepcopy(tokenizer)
            copied.chat_template = template
            kept = self._prepared = _PreparedTokenizer(tokenizer, copied, {})
        return kept

    def _call(self, task: LoadedTask, harness: Any) -> Any:
        """Run lm-eval once over the parts of one task."""
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager

        chosen = {part.loaded.name: list(part.doc_ids) for part in task.parts if part.doc_ids is not None}
        results = simple_evaluate(
            model=harness,
            tasks=[part.loaded.task for part in task.parts],
            task_manager=TaskManager(include_defaults=False),
            samples=chosen or None,
            batch_size=self.batch_size,
            use_cache=None,
            cache_requests=False,
            bootstrap_iters=0,
            log_samples=True,
            confirm_run_unsafe_code=task.entry.code,
            apply_chat_template=self.protocol.apply_chat_template,
            fewshot_as_multiturn=self.protocol.apply_chat_template and self.protocol.fewshot_as_multiturn,
            **SEEDS,
        )
        if results is None:
            raise MachineError(
                "LOCAL_RANK is not 0: lm-eval then returns no results. Start mergelab without a distributed launcher."
            )
        return results


def load_suite(request: EvalRequest, notify: Callable[[str], None] = lambda message: None) -> EvalSuite:
    """Load and check everything a request needs besides models.

    Args:
        request: What to grade.
        notify: Told before a data set is fetched over the network.

    Raises:
        RecipeError: The request or a task file is wrong; all problems in one message.
        MachineError: Documents or a grader's resource are not on this machine; all of them in one message.
    """
    protocol, names, batch_size = check_request(request)
    known = known_tasks(request.task_folder)
    tasks: list[LoadedTask] = []
    problems: list[MergelabError] = []
    for name in names:
        budget = request.max_gen_toks.get(name, protocol.max_gen_toks.get(name, known[name].max_gen_toks))
        try:
            data = request.source(name) or own_data(known[name])
            how = Loading(data, protocol.shots(name), budget, request.tokenizer, notify)
            subtasks = load_subtasks(known[name], how)
        except (RecipeError, MachineError) as error:
            problems.append(error)
            continue
        tasks.append(ready_task(known[name], subtasks, request, protocol, batch_size))
    if len(problems) == 1:
        raise problems[0]
    if problems:
        kind = next((RecipeError for problem in problems if isinstance(problem, RecipeError)), MachineError)
        raise kind(problem_list(f"{len(problems)} tasks cannot be loaded.", [str(problem) for problem in problems]))
    return EvalSuite(tuple(tasks), protocol, batch_size)


def check_request(request: EvalRequest) -> tuple[Protocol, tuple[str, ...], int]:
    """Return protocol, task names and batch size, or raise every problem of the request at once."""
    if request.protocol not in PROTOCOLS:
        raise RecipeError(f"evals.protocol {request.protocol!r}: unknown{nearest(request.protocol, list(PROTOCOLS))}.")
    protocol = PROTOCOLS[request.protocol]
    names = protocol.tasks if request.tasks is None else request.tasks
    known = known_tasks(request.task_folder)
    problems = [
        f"evals.tasks: unknown task {name!r}{nearest(name, list(known))}" for name in names if name not in known
    ]
    if not request.allow_code:
        problems += [f"evals.tasks: {why}" for name in names if name in known and (why := runs_code(known[name]))]
    problems += [f"evals.tasks: {name!r} stands twice" for name, times in Counter(names).items() if times > 1]
    if not names:
        problems.append("evals.tasks: names no task")
    for key in ("data", "max_gen_toks"):
        for name in getattr(request, key):
            if name not in names:
                problems.append(f"evals.{key}: {name!r} is not among the tasks{nearest(name, list(names))}")
    folder = request.data_folder
    if folder is not None and not any(
        (folder / f"{name}.jsonl").is_file() or (folder / name).is_dir() for name in names
    ):
        problems.append(
            f"evals.data: expected {names[0]}.jsonl or the like in {folder}, found no file named after a task"
        )
    if request.limit is not None and request.limit < 1:
        problems.append(f"evals.limit: expected at least 1 document, found {request.limit}")
    batch_size = protocol.batch_size if request.batch_size is None else request.batch_size
    if batch_size < 1:
        problems.append(f"evals.batch_size: expected at least 1 row, found {batch_size}")
    problems += [
        f"evals.max_gen_toks: {name}: expected at least 1 token, found {tokens}"
        for name, tokens in request.max_gen_toks.items()
        if tokens < 1
    ]
    if problems:
        raise RecipeError(problem_list("The evals block cannot be used.", problems))
    return protocol, tuple(names), batch_size


def _check_context(task: LoadedTask, context: int) -> None:
    if task.max_gen_toks is not None and task.max_gen_toks >= context:
        raise RecipeError(
            f"task {task.name}: {task.max_gen_toks} new tokens do not fit the model's context of {context}. "
            f"Set evals.max_gen_toks: {{{task.name}: N}} below it."
        )


def _collect(task: LoadedTask, results: Any, generations: list[Any]) -> tuple[list[Sample], str]:
    """Return the samples of all parts in document order, and the first rendered prompt."""
    samples: list[Sample] = []
    used = 0
    for part in task.parts:
        endings = None
        if part.loaded.is_generative:
            size = part.loaded.num_documents if part.doc_ids is None else len(part.doc_ids)
            endings = [(one.num_tokens, one.ended) for one in generations[used : used + size]]
            used += size
        rows = results["samples"][part.loaded.name]
        samples += build_samples(task.entry, rows, endings, part.first_doc_id)
    first = results["samples"][task.parts[0].loaded.name][0]
    return samples, str(first["arguments"][0][0])


def _described(decoding: GenerationConfig, max_gen_toks: int | None) -> dict[str, Any]:
    """Return the fields of the decoding that matter, for the record."""
    named = ("do_sample", "num_beams", "repetition_penalty", "eos_token_id", "pad_token_id")
    return {name: getattr(decoding, name) for name in named} | {"max_new_tokens": max_gen_toks}
