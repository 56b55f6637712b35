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
from mergelab.evals.engines import BATCH_SIZE, Engine
from mergelab.evals.entry import nearest
from mergelab.evals.loaded import SEEDS, LoadedTask, ready_task, sha256_text
from mergelab.evals.loading import Loading, load_subtasks
from mergelab.evals.prompts import PromptMemory
from mergelab.evals.protocols import Protocol
from mergelab.evals.quiet import Progress, quiet, quiet_harness
from mergelab.evals.request import EvalRequest, check_request
from mergelab.evals.resources import check_thread
from mergelab.evals.samples import Sample, build_samples, check_scores, harness_scores, scored
from mergelab.evals.sandbox import describe_isolation, isolation
from mergelab.evals.task_folder import known_tasks, own_data

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

    from mergelab.evals.engine_harness import EngineHarness
    from mergelab.evals.harness import TextHarness


@dataclass(frozen=True)
class TaskResult:
    """What grading one task of one model gave: ``metrics`` and one sample a document, both JSON-able."""

    metrics: dict[str, Any]
    samples: list[Sample]


@dataclass(frozen=True)
class _PreparedTokenizer:
    """A caller's tokenizer or processor, our copy with the template set, and the prompts it has seen so far."""

    source: Any
    tokenizer: Any
    memory: PromptMemory


class EvalSuite:
    """Tasks loaded under one protocol, to be asked of any number of models."""

    def __init__(self, tasks: tuple[LoadedTask, ...], protocol: Protocol, batch_size: int) -> None:
        self.tasks = tasks
        self.protocol = protocol
        self.batch_size = batch_size
        self._prepared: dict[int, _PreparedTokenizer] = {}

    def check_tokenizer(self, tokenizer: Any, chat_template: str | None = None) -> str | None:
        """Return the chat template that will be used, or None under a protocol without one.

        Raises:
            RecipeError: The protocol needs a template and there is none, or the tokenizer has no end token.
        """
        words = _words_of(tokenizer)
        if words.eos_token_id is None:
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
                f"{words.name_or_path or 'hand'} has none. Name a template (evals.template) or another "
                "protocol."
            )
        return str(template)

    def check_processor(self, processor: Any) -> str | None:
        """Return the chat template that pictures are asked through, or None under a protocol without one.

        Raises:
            RecipeError: As for ``check_tokenizer``, or the template leaves pictures out of the prompt.
        """
        template = self.check_tokenizer(processor)
        if template is None:
            return None
        content = [{"type": "image"}, {"type": "text", "text": "?"}]
        where = f"protocol {self.protocol.name}: the processor's chat template"
        try:
            rendered = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        except Exception as error:  # a template may do anything
            raise RecipeError(f"{where} cannot render a question about a picture: {error!r}.") from error
        token = getattr(processor, "image_token", None)
        if token is not None and token not in rendered:
            raise RecipeError(f"{where} shows no picture: expected {token} in a prompt about one, found {rendered!r}.")
        return template

    def evaluate(
        self,
        task_name: str,
        model: PreTrainedModel | Engine,
        tokenizer: Any,
        *,
        generation_config: GenerationConfig | None = None,
        chat_template: str | None = None,
        progress: Progress | None = None,
    ) -> TaskResult:
        """Grade one task of one live model, or of the weights that an engine holds.

        Args:
            task_name: One of ``self.tasks``.
            model: The text view for text tasks, the re-assembled VLM for vision tasks; on its device,
                unchanged afterwards (untied heads stay untied). Or an engine, for text tasks.
            tokenizer: Copied before use. For tasks that need one the vlm's processor.
            generation_config: Where the stop ids come from (besides the tokenizer's end token); None takes
                the model's (an engine has none). Nothing else of it is used.
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
            prepared = self._prepare(tokenizer, template)
        started = time.monotonic()
        with quiet_harness(progress):
            harness = self._harness(task, model, prepared, generation_config)
            _check_context(task, harness.max_length)
            for part in task.parts:
                part.loaded.failures.clear()
            results = self._call(task, harness)
        samples, first_prompt = _collect(task, results, harness.generations)
        metrics = {
            "task": task.name,
            "modality": task.modality,
            "protocol": task.protocol,
            "backend": task.backend,
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

    def _harness(
        self,
        task: LoadedTask,
        model: PreTrainedModel | Engine,
        prepared: _PreparedTokenizer,
        generation_config: GenerationConfig | None,
    ) -> TextHarness | EngineHarness:
        """Return lm-eval's model object over a live model or an engine."""
        from transformers import PreTrainedModel

        from mergelab.evals.engine_harness import EngineHarness
        from mergelab.evals.harness import PictureHarness, TextHarness, greedy_decoding
        from mergelab.evals.processed import ProcessorHarness

        knows_switch = "enable_thinking" in (prepared.tokenizer.chat_template or "")
        given = generation_config or getattr(model, "generation_config", None)
        settings: dict[str, Any] = {
            "decoding": greedy_decoding(_words_of(prepared.tokenizer), given),
            "memory": prepared.memory,
            "enable_thinking": self.protocol.enable_thinking if knows_switch else None,
        }
        if isinstance(model, PreTrainedModel):
            kind: type[TextHarness] = TextHarness
            if task.modality == "vision":
                kind = ProcessorHarness if task.needs_processor else PictureHarness
            return kind(model, prepared.tokenizer, batch_size=task.stage["batch_size"], **settings)
        if task.modality == "vision":
            raise MergelabError(f"task {task.name}: an engine was asked about pictures; they are for the live model.")
        return EngineHarness(model, prepared.tokenizer, **settings)

    def _task(self, name: str) -> LoadedTask:
        for task in self.tasks:
            if task.name == name:
                return task
        raise RecipeError(f"task {name!r} is not loaded{nearest(name, [task.name for task in self.tasks])}.")

    def _prepare(self, tokenizer: Any, template: str | None) -> _PreparedTokenizer:
        """Return a private copy of the tokenizer that carries the template, kept for the next call."""
        kept = self._prepared.get(id(tokenizer))
        if kept is None or kept.source is not tokenizer or kept.tokenizer.chat_template != template:
            copied = copy.deepcopy(tokenizer)
            copied.chat_template = template
            kept = self._prepared[id(tokenizer)] = _PreparedTokenizer(tokenizer, copied, PromptMemory())
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
            batch_size=task.stage["batch_size"],
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
        notify: Told before a data set is fetched over the network, and where programs cannot be cut off from it.

    Raises:
        RecipeError: The request or a task file is wrong; all problems in one message.
        MachineError: Documents or a grader's resource are not on this machine; all of them in one message.
    """
    protocol, names, batch_size = check_request(request)
    known = known_tasks(request.task_folder)
    if any(known[name].code for name in names) and not isolation():
        notify(describe_isolation())
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
        engine_decides = request.backend != "hf" and known[name].modality == "text" and request.batch_size is None
        size = BATCH_SIZE if engine_decides else batch_size
        tasks.append(ready_task(known[name], subtasks, request, protocol, size))
    if len(problems) == 1:
        raise problems[0]
    if problems:
        kind = next((RecipeError for problem in problems if isinstance(problem, RecipeError)), MachineError)
        raise kind(problem_list(f"{len(problems)} tasks cannot be loaded.", [str(problem) for problem in problems]))
    return EvalSuite(tuple(tasks), protocol, batch_size)


def _words_of(tokenizer: Any) -> Any:
    """Return the tokenizer of a processor, and a tokenizer as it is."""
    return tokenizer.tokenizer if hasattr(tokenizer, "image_processor") else tokenizer


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
