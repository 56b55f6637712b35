"""Answers per second of our evaluation loop beside lm-eval's own, on one model, tasks and batch size, in one run.

Both grade the same live model, by turns: lm-eval through ``simple_evaluate`` over ``HFLM``, as ``lm_eval run`` does
after loading, ours through ``EvalSuite.evaluate``. The answers must be equal byte for byte. The first round is not
counted. Then what a sweep pays between two points, and with --processes the two command lines from start to end.

Run by hand on a quiet machine:
    OMP_NUM_THREADS=1 python benchmarks/eval_throughput.py --processes
    OMP_NUM_THREADS=1 python benchmarks/eval_throughput.py --model DIR --task ifeval --data FILE.jsonl --limit 16 \
        --budget 64 --batch-size 8
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import datasets
import torch
import yaml
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

import mergelab
from mergelab.device import limit_threads
from mergelab.evals import suite as suites
from mergelab.evals.entry import task_path
from mergelab.evals.harness import TextHarness
from mergelab.evals.quiet import quiet_harness
from mergelab.evals.request import EvalRequest
from mergelab.evals.suite import EvalSuite, load_suite
from mergelab.evals.tasks import TASKS

BENCH = Path(mergelab.__file__).parent / "bench" / "data"


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=BENCH / "pair" / "base")
    parser.add_argument("--task", default="bench_format")
    parser.add_argument("--data", type=Path, help="JSONL documents of a task of lm-eval")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--budget", type=int, default=24)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--processes", action="store_true", help="time both command lines from start to end as well")
    return parser.parse_args()


def lm_eval_task(options: argparse.Namespace, folder: Path) -> tuple[Path, str]:
    """Return the folder and name under which lm-eval finds the task: local documents need a definition of their own."""
    entry = TASKS[options.task]
    if options.data is None:
        return task_path(entry).parent, options.task

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("!", lambda *_: None)
    upstream = yaml.load(task_path(entry).read_text(encoding="utf-8"), Loader)
    split = upstream.get("test_split") or upstream["validation_split"]
    local = {
        "include": str(task_path(entry)),
        "task": f"{options.task}_local",
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {split: str(options.data.absolute())}},
        "training_split": None,
        "num_fewshot": 0,
        "generation_kwargs": {**upstream["generation_kwargs"], "max_gen_toks": options.budget},
    }
    (folder / "local.yaml").write_text(yaml.safe_dump(local), encoding="utf-8")
    return folder, local["task"]


class Side:
    """One of the two loops: seconds, and what it answered."""

    def __init__(self, name: str, work: Callable[[], dict[int, str]]) -> None:
        self.name, self.work = name, work
        self.wall: list[float] = []
        self.processor: list[float] = []
        self.answers: dict[int, str] = {}

    def go(self) -> None:
        wall, processor = time.perf_counter(), time.process_time()
        self.answers = self.work()
        self.wall.append(time.perf_counter() - wall)
        self.processor.append(time.process_time() - processor)

    def median(self, seconds: list[float]) -> float:
        """The first round warms caches up."""
        return statistics.median(seconds[1:])


def compare(options: argparse.Namespace, suite: EvalSuite, model: Any, tokenizer: Any, folder: Path) -> None:
    home, name = lm_eval_task(options, folder)
    manager = TaskManager(include_path=str(home), include_defaults=False)
    (task,) = suite.tasks
    ids = [list(part.doc_ids) for part in task.parts if part.doc_ids is not None]

    def theirs() -> dict[int, str]:
        with quiet_harness():
            found = simple_evaluate(
                model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=options.batch_size),
                tasks=[name],
                task_manager=manager,
                samples={name: ids[0]} if ids else None,
                apply_chat_template=True,
                fewshot_as_multiturn=True,
                gen_kwargs=f"max_gen_toks={options.budget}",
                bootstrap_iters=0,
                log_samples=True,
            )
        return {row["doc_id"]: row["resps"][0][0] for row in found["samples"][name]}

    def ours() -> dict[int, str]:
        return {one["doc_id"]: one["response"] for one in suite.evaluate(task.name, model, tokenizer).samples}

    sides = Side("lm-eval", theirs), Side("ours", ours)
    for number in range(options.rounds + 1):
        for side in sides if number % 2 else reversed(sides):
            side.go()
    plain, own = sides
    if plain.answers != own.answers:
        different = sum(plain.answers[key] != own.answers.get(key) for key in plain.answers)
        sys.exit(f"{different} of {len(plain.answers)} answers differ; a ratio would compare two different works.")
    n = len(own.answers)
    for side in sides:
        wall, processor = side.median(side.wall), side.median(side.processor)
        print(f"  {side.name:<8} {wall:.2f} s ({n / wall:.1f} answers/s), processor {processor:.2f} s")
    ratios = [a / b for a, b in zip(plain.wall[1:], own.wall[1:], strict=True)]
    print(
        f"  ratio of medians {plain.median(plain.wall) / own.median(own.wall):.2f} "
        f"(rounds {min(ratios):.2f} to {max(ratios):.2f}), "
        f"processor {plain.median(plain.processor) / own.median(own.processor):.2f}; all {n} answers equal"
    )


@contextlib.contextmanager
def counted(owner: Any, name: str, calls: dict[str, int]) -> Iterator[None]:
    real = getattr(owner, name)

    def count(*given: Any, **settings: Any) -> Any:
        calls[name] = calls.get(name, 0) + 1
        return real(*given, **settings)

    with mock.patch.object(owner, name, count):
        yield


def between_points(suite: EvalSuite, model: Any, tokenizer: Any) -> None:
    """Time what a second point pays besides its answers, and see that it loads nothing again."""
    (task,) = suite.tasks
    suite.evaluate(task.name, model, tokenizer)
    decode = TextHarness.decode
    marks: list[float] = []

    def timed(*given: Any, **settings: Any) -> Any:
        marks.append(time.perf_counter())
        result = decode(*given, **settings)
        marks.append(time.perf_counter())
        return result

    calls: dict[str, int] = {}
    with (
        mock.patch.object(TextHarness, "decode", timed),
        counted(datasets.Dataset, "from_list", calls),
        counted(datasets, "load_dataset", calls),
        counted(suites, "load_subtasks", calls),
    ):
        begin = time.perf_counter()
        suite.evaluate(task.name, model, tokenizer)
        end = time.perf_counter()
    within = sum(stop - start for start, stop in zip(marks[::2], marks[1::2], strict=True))
    print(
        f"  a further point: {marks[0] - begin:.2f} s to its first batch, {end - begin - within:.2f} s outside "
        f"generation in all; data sets and tasks loaded again: {sum(calls.values())}"
    )


def processes(options: argparse.Namespace, suite: EvalSuite, folder: Path) -> None:
    """Time both command lines on the same documents, by turns."""
    home, name = lm_eval_task(options, folder)
    (task,) = suite.tasks
    batch, budget = str(options.batch_size), f"max_gen_toks={options.budget}"
    ids = [list(part.doc_ids) for part in task.parts if part.doc_ids is not None]
    theirs = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--model_args", f"pretrained={options.model}"]
    theirs += ["--tasks", name, "--include_path", str(home), "--apply_chat_template", "--batch_size", batch]
    theirs += ["--device", "cpu", "--gen_kwargs", budget]
    theirs += ["--samples", json.dumps({name: ids[0]})] if ids else []
    ours = [sys.executable, "-c", "from mergelab.cli import main; main()", "eval", str(options.model)]
    ours += ["--protocol", suite.protocol.name, "--tasks", task.name, "--batch-size", batch, "--device", "cpu"]
    ours += ["--max-gen-toks", f"{task.name}={options.budget}"]
    ours += ["--limit", str(options.limit)] if options.limit else []
    ours += ["--data", f"{task.name}={options.data}"] if options.data else []
    seconds: dict[str, list[float]] = {"lm_eval run": [], "mergelab eval": []}
    for _ in range(3):
        for label, command in zip(seconds, (theirs, ours), strict=True):
            begin = time.perf_counter()
            done = subprocess.run(command, capture_output=True, text=True)
            seconds[label].append(time.perf_counter() - begin)
            if done.returncode:
                sys.exit(f"{label} failed:\n{done.stderr[-2000:]}")
    medians = {label: statistics.median(found) for label, found in seconds.items()}
    listed = ", ".join(f"{label} {value:.1f} s" for label, value in medians.items())
    print(f"  whole processes, medians of 3: {listed}, ratio {medians['lm_eval run'] / medians['mergelab eval']:.2f}")


def main() -> None:
    options = asked()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto").eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    limit_threads(sum(parameter.numel() for parameter in model.parameters()), "cpu")
    request = EvalRequest(
        protocol="bench-v1" if options.data is None else "paper-instruct-v1",
        tasks=(options.task,),
        data={} if options.data is None else {options.task: options.data},
        limit=options.limit,
        batch_size=options.batch_size,
        max_gen_toks={options.task: options.budget},
    )
    with contextlib.redirect_stderr(io.StringIO()):
        suite = load_suite(request)
    print(
        f"{options.model.name}, {options.task}, n = {suite.tasks[0].n}, up to {options.budget} new tokens, batch size "
        f"{options.batch_size}, {model.dtype}, {torch.get_num_threads()} thread(s), medians of {options.rounds} rounds"
    )
    with tempfile.TemporaryDirectory() as folder:
        compare(options, suite, model, tokenizer, Path(folder))
        between_points(suite, model, tokenizer)
        if options.processes:
            processes(options, suite, Path(folder))


if __name__ == "__main__":
    main()
