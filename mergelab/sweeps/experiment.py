"""Everything a run needs, opened and checked before any work is spent."""

from __future__ import annotations

import hashlib
import json
import platform
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig, PretrainedConfig

from mergelab import __version__
from mergelab.checkpoints.headers import Checkpoint
from mergelab.checkpoints.reader import torch_dtype
from mergelab.config import Pair, Recipe, announcements, resolved, zero_point_of
from mergelab.device import choose_device, limit_threads
from mergelab.engine.ancestry import ancestry_summary, check_related
from mergelab.engine.checks import check_equal_tensors, check_same_rows
from mergelab.engine.outlets import check_outlets
from mergelab.engine.plan import TensorJob, plan_jobs
from mergelab.engine.targets import LiveTarget
from mergelab.errors import DamagedFileError, PairingError, RecipeError
from mergelab.evals.loaded import LoadedTask
from mergelab.evals.suite import EvalSuite, load_suite
from mergelab.live.configs import naming_config_errors, tower_config
from mergelab.live.model import tower_outline, tower_shapes
from mergelab.sinks.prompts import Prompts, load_prompts
from mergelab.sweeps.engines import backend_versions
from mergelab.sweeps.grid import expand
from mergelab.sweeps.identity import hash_json
from mergelab.sweeps.models import Models
from mergelab.sweeps.points import Point, named
from mergelab.sweeps.processor import Processor, load_processor
from mergelab.sweeps.request import eval_request
from mergelab.sweeps.sight import check_sight

LIBRARIES = ("torch", "transformers", "tokenizers", "lm_eval", "safetensors", "numpy", "mergekit")


@dataclass(frozen=True)
class Tokenizers:
    """The tokenizer that text is scored with, base's, and the vlm's own for pictures."""

    text: Any
    vision: Any
    generation: GenerationConfig
    """Base's: where the stop tokens of every text point come from."""

    vision_generation: GenerationConfig

    sha256: str
    """Of what decides how prompts become tokens and answers stop: vocabularies, templates, stop tokens."""

    processor: Processor | None = None
    """The vlm's own, where a task shows pictures through it."""

    def of(self, task: LoadedTask) -> dict[str, str]:
        """Return the hashes of what turns the prompts of a task into what a model is given."""
        hashes = {"tokenizers": self.sha256}
        if task.needs_processor and self.processor is not None:
            hashes["processor"] = self.processor.sha256
        return hashes


@dataclass(frozen=True)
class Prepared:
    """An experiment that has passed every check."""

    recipe: Recipe
    pair: Pair
    models: Models
    points: tuple[Point, ...]
    jobs: tuple[TensorJob, ...]
    fingerprints: dict[str, str]
    suite: EvalSuite
    prompts: Prompts
    tokenizers: Tokenizers
    ancestry: dict[str, Any]
    """Whether the models come from one another, and whether that was overruled."""

    config_hashes: dict[str, str]
    """Of every model's ``config.json``: rotary base, epsilons and windows are no weights, yet decide answers."""

    device: str
    dtype: torch.dtype
    """Of the tower's weights and forward passes."""

    backend_versions: dict[str, str]
    """What answers text besides transformers, empty for ``hf``."""

    def answered_by(self, task: LoadedTask) -> dict[str, Any]:
        """Return what goes into the key of a task's answers for the program that writes them."""
        return {} if task.backend == "hf" else {"engine": self.backend_versions}

    @property
    def has_vision(self) -> bool:
        """True if any task asks about pictures."""
        return any(task.modality == "vision" for task in self.suite.tasks)


def prepare(
    recipe: Recipe, pair: Pair, models: Models, device: str, say: Callable[[str], None] = lambda line: None
) -> Prepared:
    """Load tasks, prompts and tokenizers, fingerprint the models and name every point.

    Raises:
        MergelabError: Anything a run would stumble over later.
    """
    device = choose_device(device)
    versions = backend_versions(recipe.evals.backend, device)
    limit_threads(models.num_parameters("vlm"), device)
    jobs, ancestry = check_models(recipe, models)
    suite = load_suite(eval_request(recipe, pair, models.checkpoints["base"].folder), say)
    check_pair_sight([task.name for task in suite.tasks if task.modality == "vision"], models)
    prompts = load_prompts(recipe.sink.prompts)
    tokenizers = load_tokenizers(models)
    suite.check_tokenizer(tokenizers.text)
    if any(task.needs_processor for task in suite.tasks):
        processor = load_processor(models.checkpoints["vlm"])
        suite.check_processor(processor.processor)
        tokenizers = replace(tokenizers, processor=processor)
    total = sum(models.num_bytes(role) for role in models.checkpoints)
    if total > 2 * 10**9:
        say(f"Fingerprinting {total / 1e9:.0f} GB of weights (remembered for the next run)")
    fingerprints = models.fingerprints()
    return Prepared(
        recipe=recipe,
        pair=pair,
        models=models,
        points=tuple(named(spec, fingerprints, recipe.output_dtype) for spec in expand(recipe, pair)),
        jobs=jobs,
        fingerprints=fingerprints,
        suite=suite,
        prompts=prompts,
        tokenizers=tokenizers,
        ancestry=ancestry,
        config_hashes={
            role: hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True).encode()).hexdigest()
            for role, checkpoint in models.checkpoints.items()
        },
        device=device,
        dtype=live_dtype(jobs),
        backend_versions=versions,
    )


def check_pair_sight(tasks: Sequence[str], models: Models) -> None:
    """Refuse picture tasks that the pair's vlm cannot be asked.

    Raises:
        RecipeError: It cannot see their pictures.
    """
    check_sight(tasks, "vlm", models.checkpoints["vlm"].folder, models.pairing.towers["vlm"])


def check_models(recipe: Recipe, models: Models) -> tuple[tuple[TensorJob, ...], dict[str, Any]]:
    """Return the work per tensor and what is known of the models' ancestry.

    They are returned once the models are seen to fit each other and the recipe.

    Raises:
        MergelabError: They do not.
    """
    check_same_rows(models.pairing)
    check_equal_tensors(models.pairing, models.checkpoints)
    digest = check_related(models.pairing, models.checkpoints, models.accept_unrelated)
    jobs = tuple(plan_jobs(models.pairing, models.checkpoints, recipe.output_dtype))
    config = text_config(models, jobs)
    check_live_dtypes(jobs, config)
    if recipe.sink.last_layers != "auto" and recipe.sink.last_layers > config.num_hidden_layers:
        raise RecipeError(
            f"sink.last_layers: expected 1 to {config.num_hidden_layers}, the layers of the tower, "
            f"found {recipe.sink.last_layers}. Choose fewer, or auto."
        )
    return jobs, ancestry_summary(digest, models.accept_unrelated)


def text_config(models: Models, jobs: Sequence[TensorJob]) -> PretrainedConfig:
    """Return the config of the vlm's tower alone, checked against the tensors that ``jobs`` write.

    Raises:
        PairingError: It does not describe them.
        DamagedFileError: transformers cannot use it.
    """
    tower, folder = models.pairing.towers["vlm"], models.checkpoints["vlm"].folder
    config = tower_config(folder, tower.has_head, tower.family)
    # The class is built without storage to compare shapes, yet a billion layers would take forever.
    if isinstance(config.num_hidden_layers, int) and config.num_hidden_layers > len(jobs):
        raise PairingError(
            f"{folder / 'config.json'}: says {config.num_hidden_layers} layers, the tower has {len(jobs)} tensors. "
            "Fetch config.json and the weights from the same place again."
        )
    with naming_config_errors(folder):
        shapes = tower_shapes(config)
    check_outlets(jobs, shapes, " ".join(config.architectures or []))
    return config


def live_dtype(jobs: Sequence[TensorJob]) -> torch.dtype:
    """Return the dtype of most of the tower's entries, which is that of the live model."""
    entries: Counter[str] = Counter()
    for job in jobs:
        entries[job.dtype] += job.num_entries
    return torch_dtype(entries.most_common(1)[0][0])


def check_live_dtypes(jobs: Sequence[TensorJob], config: PretrainedConfig) -> None:
    """Refuse a tower with a tensor of another dtype than most, unless its class keeps that one in this dtype.

    Raises:
        PairingError: The live model would not hold the values that a file holds.
    """
    if len({job.dtype for job in jobs}) > 1:
        try:
            LiveTarget(tower_outline(config, live_dtype(jobs))).check(list(jobs))
        except PairingError as error:
            raise PairingError(f"vlm: its tower has tensors of several dtypes. {error}") from error


def load_generation_config(folder: Path) -> GenerationConfig | None:
    """Return the generation settings of a model folder; None if it has none.

    Raises:
        DamagedFileError: The file is there but cannot be loaded.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # not JSON, not an object, or settings that transformers refuses
        raise DamagedFileError(f"{path}: cannot be loaded ({error}). Fetch the file again.") from error


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """Load the tokenizer of a checkpoint.

    Raises:
        DamagedFileError: It is missing or cannot be loaded.
    """
    try:
        return AutoTokenizer.from_pretrained(checkpoint.folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for a missing or damaged tokenizer
        raise DamagedFileError(
            f"{checkpoint.folder}: the tokenizer cannot be loaded ({error}). Fetch its tokenizer files."
        ) from error


def load_tokenizers(models: Models) -> Tokenizers:
    """Load the tokenizers and generation settings of base and vlm.

    Raises:
        DamagedFileError: A tokenizer is missing, or it or the generation settings cannot be loaded.
    """

    def generation(role: str) -> GenerationConfig:
        folder = models.checkpoints[role].folder
        return load_generation_config(folder) or GenerationConfig()

    text, vision = (load_tokenizer(models.checkpoints[role]) for role in ("base", "vlm"))
    generations = generation("base"), generation("vlm")
    content = [
        [loaded.chat_template, loaded.eos_token, sorted(loaded.get_vocab().items()), settings.eos_token_id]
        for loaded, settings in zip((text, vision), generations, strict=True)
    ]
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return Tokenizers(text, vision, *generations, digest)


def experiment_record(prepared: Prepared) -> dict[str, Any]:
    """Return the body of ``experiment.json``."""
    recipe, suite = prepared.recipe, prepared.suite
    tasks = [
        {
            "task": task.name,
            "modality": task.modality,
            "protocol": task.protocol,
            "n": task.n,
            "asked": hash_json(
                [task.stage, *prepared.tokenizers.of(task).values(), *prepared.answered_by(task).values()]
            ),
        }
        for task in suite.tasks
    ]
    claims = recipe.claims.model_dump(mode="json")
    primary = [task["task"] for task in tasks] if recipe.claims.primary == "auto" else list(recipe.claims.primary)
    return {
        "name": recipe.name,
        "recipe": resolved(recipe),
        "pair": prepared.pair.model_dump(mode="json"),
        "claims": {**claims, "primary": primary},
        "tasks": tasks,
        "zero_point": zero_point_of(recipe, prepared.pair),
        "conventions": recipe.conventions,
        "versions": {
            "mergelab": __version__,
            **{name: version(name) for name in LIBRARIES},
            **{name: text for name, text in prepared.backend_versions.items() if name == "vllm"},
        },
        "fingerprints": prepared.fingerprints,
        "ancestry": prepared.ancestry,
        "inferred": None if prepared.models.report is None else prepared.models.report.record(),
        "points": [point.point_id for point in prepared.points],
        "host": {
            "name": socket.gethostname(),
            "python": platform.python_version(),
            "system": platform.platform(),
            "device": prepared.device,
            "threads": torch.get_num_threads(),
        },
        "notes": [*prepared.models.pairing.notes],
        "announced": announcements(recipe, prepared.pair),
    }
