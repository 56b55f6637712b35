"""Does one point after the other: put its weights into the live model, measure the sink, grade the tasks."""

from __future__ import annotations

import copy
import gc
import json
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from mergelab import records
from mergelab.engine.deltas import UnscaledDeltas
from mergelab.engine.export import Export, export_vlm
from mergelab.engine.inputs import Inputs
from mergelab.engine.plan import plan_jobs
from mergelab.engine.stream import stream
from mergelab.engine.targets import LiveTarget, hash_live
from mergelab.errors import DamagedFileError, MergelabError
from mergelab.evals.loaded import LoadedTask
from mergelab.evals.suite import TaskResult
from mergelab.live.model import LiveModel
from mergelab.sinks.measure import measure_sink
from mergelab.sweeps.cache import Cached, CacheKey, ResultCache, describe_machine, hash_tokenizers
from mergelab.sweeps.experiment import Prepared
from mergelab.sweeps.identity import stage_key
from mergelab.sweeps.loading import load_text_parent, load_tower, stored_dtype
from mergelab.sweeps.points import Point

Report = Callable[[Point, str, float], None]
"""Told the point, what is being done, and how much of that is done (0..1)."""


class Worker:
    """Works on the points of one experiment in one process, on one device.

    The tower's live model is built once and overwritten point by point. Parents are models of their own: base and
    ancestor under their own configs, the vlm as transformers loads it, before the stream has written to it.
    """

    def __init__(self, prepared: Prepared, folder: Path, report: Report, cache: ResultCache | None = None) -> None:
        """Prepare to work into the run folder; nothing is loaded yet. Without a cache every parent is graded."""
        self.prepared = prepared
        self.folder = folder
        self.report = report
        self.inputs = Inputs(prepared.models.checkpoints, device=prepared.device, keep=True)
        self.deltas = UnscaledDeltas()
        self.cache = cache
        self.num_cached = 0
        """Sinks and tasks of parents that came out of the cache."""
        self._tower: LiveModel | None = None
        self._tokenizer_hash = ""

    def due(self, point: Point) -> list[str]:
        """Return the stages of a point that are not done: ``merge``, ``weights``, ``sink``, and names of tasks."""
        stages = []
        keeps = self.prepared.recipe.keep_weights == "always" and point.spec.role == "merge"
        if keeps and not self._weights_folder(point).is_dir():
            stages.append("weights")
        for stage in records.STAGES:
            if stage == "merge" and point.operation is None:
                continue
            if records.read_stage_key(self.folder, point.point_id, stage) != self._key(point, stage):
                stages.append(stage)
        for task in self._tasks(point):
            if records.read_task_key(self.folder, point.point_id, task.name) != self._key(point, task.name):
                stages.append(task.name)
        if self.prepared.recipe.evals.replicate and point.spec.role == "vlm":
            known = records.read_stage_key(self.folder, point.point_id, records.REPLICATE)
            if known != self._key(point, records.REPLICATE):
                stages.append(records.REPLICATE)
        return stages

    def work(self, point: Point) -> bool:
        """Do what is due of a point; return False if all was done before.

        Raises:
            MergelabError: The point failed; what is finished of it stays.
        """
        due = self.due(point)
        if not due:
            return False
        cached = self._look_up(point, due)
        hashes = {result.weights_hash for result in cached.values()}
        if cached.keys() == set(due) and len(hashes) == 1:
            self._write_point(point, hashes.pop())
            self._take(point, cached)
            return True
        live, weights = self._weights(point, record=("merge" in due))
        if "weights" in due:
            self._keep_weights(point)
        self._write_point(point, weights)
        cached = {stage: result for stage, result in cached.items() if result.weights_hash == weights}
        self._take(point, cached)
        fresh: dict[str, dict[str, Any]] = {}
        if "sink" in due and "sink" not in cached:
            self.report(point, "sink", 0.0)
            fresh["sink"] = self._measure(point, live)
        graded = [task for task in self._tasks(point) if task.name in due and task.name not in cached]
        for task in graded:
            fresh[task.name] = self._grade(point, live, task)
        if graded and self._hash(point, live) != weights:
            for task in graded:
                records.remove_task(self.folder, point.point_id, task.name)
            raise MergelabError(
                f"point {point.point_id}: its live weights changed while it was graded. "
                "This is a bug of mergelab; the answers were thrown away."
            )
        if records.REPLICATE in due:
            self._replicate(point, live)
        if self.cache is not None and point.spec.is_parent:
            for stage, value in fresh.items():
                self.cache.write(self._cache_key(point, stage), Cached(weights, value))
        return True

    def _look_up(self, point: Point, due: list[str]) -> dict[str, Cached]:
        """Return what the cache holds of the stages of a parent that are due."""
        if self.cache is None or not point.spec.is_parent:
            return {}
        # A second grading out of a cache would be no second grading.
        found = {stage: self.cache.read(self._cache_key(point, stage)) for stage in due if stage != records.REPLICATE}
        return {stage: result for stage, result in found.items() if result is not None}

    def _take(self, point: Point, cached: dict[str, Cached]) -> None:
        """Write results out of the cache into the run folder, marked as such."""
        for stage, result in cached.items():
            value, key = result.value, self._key(point, stage)
            if stage == "sink":
                records.write_stage(self.folder, point.point_id, "sink", {"key": key, **value, "from_cache": True})
            else:
                metrics = {"key": key, **value["metrics"], "from_cache": True}
                records.write_task(self.folder, point.point_id, stage, metrics, value["samples"])
        self.num_cached += len(cached)

    def _cache_key(self, point: Point, stage: str) -> CacheKey:
        prepared, role = self.prepared, str(point.spec.role)
        if not self._tokenizer_hash:
            folders = (prepared.models.checkpoints[role].folder for role in ("base", "vlm"))
            self._tokenizer_hash = hash_tokenizers(folders)
        return CacheKey(
            weights=prepared.fingerprints[role],
            config=prepared.config_hashes[role],
            tokenizer=self._tokenizer_hash,
            stage={"role": role, **self._stage_content(point, stage)},
            machine=describe_machine(prepared.device),
        )

    def _tasks(self, point: Point) -> list[LoadedTask]:
        """Return the tasks a point can answer: base and ancestor have no eyes."""
        blind = point.spec.role in ("base", "ancestor")
        return [task for task in self.prepared.suite.tasks if not (blind and task.modality == "vision")]

    def _key(self, point: Point, stage: str) -> str:
        return stage_key(point.point_id, self._stage_content(point, stage))

    def _stage_content(self, point: Point, stage: str) -> dict[str, Any]:
        prepared = self.prepared
        if stage == "merge":
            return {"stage": "merge"}
        if stage == records.REPLICATE:
            return {"stage": stage, "tasks": [self._key(point, task.name) for task in self._tasks(point)]}
        common = {
            "stage": stage,
            "dtype": str(self._dtype(point)),
            "tokenizers": prepared.tokenizers.sha256,
            "config": prepared.config_hashes[str(point.spec.role) if point.spec.is_parent else "vlm"],
        }
        if stage == "sink":
            sink = prepared.recipe.sink
            return {
                **common,
                "prompts": prepared.prompts.sha256,
                "last_layers": sink.last_layers,
                "sink": sink.dtype,
                "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers")},
            }
        task = next(task for task in prepared.suite.tasks if task.name == stage)
        return {**common, "task": task.stage, "backend": prepared.recipe.evals.backend}

    def _dtype(self, point: Point) -> torch.dtype:
        """Return the dtype of a point's weights: a parent's own, for all others the output's."""
        return stored_dtype(self.prepared, point.spec.role) if point.spec.is_parent else self.prepared.dtype

    def _weights(self, point: Point, record: bool) -> tuple[LiveModel, str]:
        """Return the live model that holds the point's weights, and their hash."""
        self.report(point, "weights", 0.0)
        if point.operation is None:
            live = self._parent(point)
            return live, self._hash(point, live)
        if self._tower is None:
            gc.collect()
            self._tower = load_tower(self.prepared, self.prepared.dtype)
        live = self._tower
        weights = self._merge(point, live, record)
        return live, weights

    def _hash(self, point: Point, live: LiveModel) -> str:
        """Return the hash of a point's live weights, in the dtypes that a checkpoint of it has."""
        if point.spec.role in ("base", "ancestor"):
            return hash_live(live.tensors())
        models, jobs = self.prepared.models, self.prepared.jobs
        if point.operation is None:
            jobs = tuple(plan_jobs(models.pairing, models.checkpoints))
        return LiveTarget(live.tensors()).hash(jobs)

    def _parent(self, point: Point) -> LiveModel:
        if point.spec.role != "vlm":
            return load_text_parent(self.prepared, str(point.spec.role))
        live = load_tower(self.prepared, self._dtype(point))
        # The next points overwrite it, unless they are of another dtype.
        self._tower = live if self._dtype(point) == self.prepared.dtype else None
        return live

    def _merge(self, point: Point, live: LiveModel, record: bool) -> str:
        """Stream the point's weights into the live model, write ``merge.json``, and return the weights' hash."""
        prepared = self.prepared
        assert point.operation is not None
        target = LiveTarget(live.tensors())
        target.check(list(prepared.jobs))
        reset_peak_memory(prepared.device)
        started = time.perf_counter()
        statistics = stream(
            prepared.jobs,
            point.operation,
            self.inputs,
            target,
            lambda done, total: self.report(point, "weights", done / max(1, total)),
            self.deltas,
        )
        seconds = time.perf_counter() - started
        weights = self._hash(point, live)
        if not record:
            self._check_same_weights(point, weights)
            return weights
        value = {
            "key": self._key(point, "merge"),
            **statistics.record(),
            "tensors_copied": len(prepared.models.pairing.copied),
            "tensors_explained": dict(prepared.models.pairing.explained),
            "weights_hash": weights,
            "seconds": seconds,
            "peak_memory_bytes": peak_memory_bytes(prepared.device),
        }
        records.write_stage(self.folder, point.point_id, "merge", value)
        return weights

    def _weights_folder(self, point: Point) -> Path:
        return self.folder / "points" / point.point_id / "weights"

    def _keep_weights(self, point: Point) -> None:
        """Write the point as a vlm checkpoint beside its records; the folder appears whole or not at all."""
        prepared = self.prepared
        assert point.operation is not None
        export = Export(prepared.jobs, point.operation, self.inputs, prepared.models.pairing, self.deltas)
        manifest = {"format": 1, "point_id": point.point_id, "fingerprints": prepared.fingerprints}
        self._weights_folder(point).parent.mkdir(parents=True, exist_ok=True)
        export_vlm(export, self._weights_folder(point), manifest, prepared.recipe.output_dtype)

    def _check_same_weights(self, point: Point, weights: str) -> None:
        """Refuse to add stages to a point whose weights come out differently than when it was begun."""
        path = self.folder / "points" / point.point_id / "merge.json"
        known = str(json.loads(path.read_text(encoding="utf-8")).get("weights_hash"))
        if known != weights:
            raise DamagedFileError(
                f"{path}: this point was begun with weights {known[:12]} and now comes out as {weights[:12]}. "
                "Its records and this machine's arithmetic differ; start a new --out."
            )

    def _write_point(self, point: Point, weights: str) -> None:
        spec = point.spec
        records.write_point(
            self.folder,
            {
                "point_id": point.point_id,
                "role": spec.role,
                "method": spec.method or "",
                "parameters": dict(spec.parameters),
                "seed": spec.seed,
                "zero_point": spec.zero_point,
                "conventions": spec.conventions,
                "weights_hash": weights,
            },
        )

    def _measure(self, point: Point, live: LiveModel) -> dict[str, Any]:
        """Measure the sink, write it, and return the record."""
        prepared = self.prepared
        sink = prepared.recipe.sink
        text = live.text
        if sink.dtype != "auto" and getattr(torch, sink.dtype) != text.dtype:
            text = copy.deepcopy(text)
            # Weights alone: Module.to would round the rotary buffers as well, which no loaded model does.
            for parameter in text.parameters():
                parameter.data = parameter.data.to(getattr(torch, sink.dtype))
        layers = None if sink.last_layers == "auto" else sink.last_layers
        record = measure_sink(text, prepared.tokenizers.text, prepared.prompts, last_layers=layers)
        records.write_stage(self.folder, point.point_id, "sink", {"key": self._key(point, "sink"), **record})
        return record

    def _grade(self, point: Point, live: LiveModel, task: LoadedTask) -> dict[str, Any]:
        """Grade a task, write it, and return its metrics and samples."""
        result = self._ask(point, live, task)
        metrics = {"key": self._key(point, task.name), **result.metrics}
        records.write_task(self.folder, point.point_id, task.name, metrics, result.samples)
        return {"metrics": result.metrics, "samples": result.samples}

    def _replicate(self, point: Point, live: LiveModel) -> None:
        """Grade every task of the point again and write what came out differently."""
        compared = {}
        for task in self._tasks(point):
            first = records.read_samples(self.folder, point.point_id, task.name)
            again = self._ask(point, live, task)
            compared[task.name] = {
                "key": self._key(point, task.name),
                **compare_gradings(first, again.samples),
                "seconds": again.metrics["seconds"],
            }
        value = {"key": self._key(point, records.REPLICATE), "tasks": compared}
        records.write_stage(self.folder, point.point_id, records.REPLICATE, value)

    def _ask(self, point: Point, live: LiveModel, task: LoadedTask) -> TaskResult:
        """Let the live model answer a task."""
        tokenizers = self.prepared.tokenizers
        is_vision = task.modality == "vision"
        model = live.vlm if is_vision else live.text
        if model is None:
            raise MergelabError(f"task {task.name}: the vlm is a plain text checkpoint and cannot see pictures.")
        return self.prepared.suite.evaluate(
            task.name,
            model,
            tokenizers.vision if is_vision else tokenizers.text,
            generation_config=tokenizers.vision_generation if is_vision else tokenizers.generation,
            progress=lambda done, total: self.report(point, task.name, done / max(1, total)),
        )


def compare_gradings(first: Sequence[Mapping[str, Any]], again: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how two gradings of one model on the same documents differ, with the documents that do."""
    earlier = {sample["doc_id"]: sample for sample in first}
    pairs = [(earlier[sample["doc_id"]], sample) for sample in again]
    shown = ("response", "strict", "flexible")
    differing = [
        {"doc_id": old["doc_id"], **{name: [old[name], new[name]] for name in shown}}
        for old, new in pairs
        if any(old[name] != new[name] for name in shown)
    ]
    return {
        "n": len(pairs),
        "different_answers": sum(old["response"] != new["response"] for old, new in pairs),
        **{f"{name}_discordant": sum(old[name] != new[name] for old, new in pairs) for name in ("strict", "flexible")},
        "differing": differing,
    }


def reset_peak_memory(device: str) -> None:
    """Begin to count the peak memory of a CUDA device anew; a process has no such switch."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(device: str) -> int:
    """Return the most memory held on a CUDA device since the reset, else by this process since it started."""
    if device.startswith("cuda"):
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
