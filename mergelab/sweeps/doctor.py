"""Looks at everything a run will need, without the network and without stopping at the first thing missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mergelab.checkpoints.headers import Checkpoint, open_checkpoint
from mergelab.checkpoints.hub import resolve_source
from mergelab.config import Experiment, Source
from mergelab.device import choose_device
from mergelab.errors import MachineError, MergelabError
from mergelab.evals.building import offline
from mergelab.evals.entry import TaskEntry
from mergelab.evals.request import EvalRequest, check_request
from mergelab.evals.resources import NEEDS, prepare
from mergelab.evals.sandbox import describe_isolation
from mergelab.evals.suite import EvalSuite, load_suite
from mergelab.evals.task_folder import known_tasks
from mergelab.evals.vllm_engine import require_vllm
from mergelab.sinks.prompts import load_prompts
from mergelab.sweeps.announce import check_disk
from mergelab.sweeps.experiment import check_models, check_pair_sight, load_generation_config, load_tokenizer
from mergelab.sweeps.grid import expand
from mergelab.sweeps.models import Models, pair_models
from mergelab.sweeps.processor import load_processor
from mergelab.sweeps.request import eval_request

_FORBIDDEN = " and HF_HUB_OFFLINE"


@dataclass(frozen=True)
class Check:
    """One thing a run needs."""

    what: str
    ok: bool
    found: str
    """What is there, or what is wrong and what to do."""

    offline: str = ""
    """How to bring it to a machine without network; empty where ``found`` says all there is to do."""

    exit_code: int = 0
    """0 when ok, else that of the error."""


def examine(experiment: Experiment, folder: Path, device: str = "auto") -> list[Check]:
    """Check device, models, tokenizers, template, prompts, tasks, graders' resources and disk space of a run.

    Nothing is fetched. What depends on something that is missing is left out.

    Args:
        experiment: The recipe and its pair.
        folder: The run folder, for the disk it would lie on.
        device: As for a run.
    """
    doctor = _Doctor()
    recipe, pair = experiment.recipe, experiment.pair
    chosen = doctor.check("device", lambda: choose_device(device))
    if recipe.evals.backend == "vllm" and chosen is not None:
        doctor.check("vllm", lambda: require_vllm(chosen), "pip download 'mergelab[vllm]'; pip install --no-index")
    checkpoints: dict[str, Checkpoint] = {}
    models: Models | None = None
    with offline():
        for role, source in pair.sources.items():
            opened = doctor.check(f"model {role}", partial(_open, source), _how_model(role, source))
            if opened is not None:
                checkpoints[role] = opened
        if len(checkpoints) == len(pair.sources):
            models = doctor.check("pairing", lambda: pair_models(pair, checkpoints, accept_inferred=True))
            if models is not None:
                doctor.check("models fit the recipe", lambda: check_models(recipe, models))
                specs = expand(recipe, pair)
                doctor.check("disk", lambda: check_disk(recipe, models, specs, folder))
        tokenizers = {}
        for role in ("base", "vlm"):
            if role in checkpoints:
                loaded = doctor.check(f"tokenizer {role}", partial(_tokenizer, checkpoints[role]))
                tokenizers[role] = loaded
        doctor.check("prompts", lambda: load_prompts(recipe.sink.prompts))
        base = checkpoints.get("base")
        request = eval_request(recipe, pair, None if base is None else base.folder)
        checked = doctor.check("evals", lambda: check_request(request))
        if checked is None:
            return doctor.checks
        protocol, names, batch_size = checked
        asking = EvalSuite((), protocol, batch_size)
        if tokenizers.get("base") is not None:
            doctor.check("chat template", lambda: asking.check_tokenizer(tokenizers["base"]) or "none asked for")
        known = known_tasks(request.task_folder)
        needs = dict.fromkeys(need for name in names for need in known[name].needs)
        met = [need for need in needs if doctor.check(NEEDS[need].what, partial(_need, need), _how(need)) is not None]
        if "vision" in met and tokenizers.get("vlm") is not None:
            doctor.check("processor vlm", lambda: _processor(asking, checkpoints["vlm"]), _how("vision"))
        for name in names:
            if base is None and known[name].tokenized:
                continue
            shown_to = models if known[name].modality == "vision" else None
            doctor.check(f"task {name}", partial(_load_alone, request, name, shown_to), _how_task(known[name]))
    return doctor.checks


def exit_code(checks: list[Check]) -> int:
    """Return 0, the exit code that all failed checks share, or else that of a machine that lacks something."""
    codes = {check.exit_code for check in checks if not check.ok}
    if not codes:
        return 0
    return codes.pop() if len(codes) == 1 else MachineError.exit_code


class _Doctor:
    """Collects checks: a check is an action that raises when something is missing."""

    def __init__(self) -> None:
        self.checks: list[Check] = []

    def check(self, what: str, action: Callable[[], Any], how: str = "") -> Any:
        """Note how the action went and return what it returned, or None."""
        try:
            value = action()
        except MergelabError as error:
            is_missing = isinstance(error, MachineError)
            # It is us who forbade the network, so the advice to allow it is left out.
            found = str(error).partition(_FORBIDDEN)[0].rstrip(" ,") if is_missing and how else str(error)
            self.checks.append(Check(what, False, found, how if is_missing else "", error.exit_code))
            return None
        self.checks.append(Check(what, True, _describe(value)))
        return value


def _open(source: Source) -> Checkpoint:
    return open_checkpoint(resolve_source(source.location, source.revision))


def _tokenizer(checkpoint: Checkpoint) -> Any:
    load_generation_config(checkpoint.folder)
    return load_tokenizer(checkpoint)


def _processor(suite: EvalSuite, checkpoint: Checkpoint) -> str:
    loaded = load_processor(checkpoint)
    suite.check_processor(loaded.processor)
    return type(loaded.processor).__name__


def _how_model(role: str, source: Source) -> str:
    if source.is_folder:
        return ""
    revision = f" --revision {source.revision}" if source.revision else ""
    return f"with network: hf download {source.id}{revision} --local-dir DIR; copy DIR here, name it as the {role}"


def _load_alone(request: EvalRequest, name: str, shown_to: Models | None) -> EvalSuite:
    if shown_to is not None:
        check_pair_sight([name], shown_to)
    data = request.source(name)
    budgets = {task: budget for task, budget in request.max_gen_toks.items() if task == name}
    alone = replace(request, tasks=(name,), data={name: data} if data else {}, max_gen_toks=budgets, data_folder=None)
    return load_suite(alone)


def _need(name: str) -> str:
    prepare(name)
    if name == "code":
        return describe_isolation()
    return ", ".join(f"{package} {version(package)}" for package in NEEDS[name].packages)


def _how(need: str) -> str:
    return f"with network: pip download {NEEDS[need].install}"


def _how_task(entry: TaskEntry) -> str:
    if entry.home == "bench":
        return ""
    fields = ", ".join(entry.fields) or "what its YAML reads"
    made = ""
    if entry.tokenized:
        made = f"with network, mergelab eval BASE --tasks {entry.name} --write-data DIR makes "
    return f"{made}a JSONL file with {fields} a line, named by --set evals.data.{entry.name}=FILE.jsonl"


def _describe(value: Any) -> str:
    """Return a few words on what a check found."""
    if isinstance(value, Checkpoint):
        return str(value.folder)
    if isinstance(value, EvalSuite):
        return ", ".join(f"n = {task.n}" for task in value.tasks)
    if isinstance(value, str):
        return f"{len(value)} characters" if "{" in value or "\n" in value else value
    if isinstance(value, int):
        return f"{value / 1e9:.1f} GB of weights to keep" if value else "no weights are kept"
    if isinstance(value, Models):
        unsure = value.report is not None and value.report.verdict == "low"
        doubt = "; names inferred with low confidence: run, plan and merge need --accept-inferred" if unsure else ""
        return f"{len(value.pairing.tensors)} tensors{doubt}"
    return ""
