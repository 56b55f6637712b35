"""An engine in a process of its own, on a checkpoint folder: asked by files, gone with all its memory when closed.

For weights that cannot be put into a running engine: a parent under its own config, or an engine that does not
let its weights be overwritten or looked at. The folder is read by the engine itself.

One request is one JSON file in the exchange folder, its number a line on the child's stdin; the answer is a JSON
file that appears whole, its number a line on a pipe. What the engine's libraries print goes to a log beside them.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from mergelab import atomic
from mergelab.errors import MachineError
from mergelab.evals.engines import Completion, Engine, EngineSetup, Stops

CLOSE_SECONDS = 30
_LOG_LINES = 12


class EngineProcess:
    """The parent's side of an engine in another process.

    Args:
        opener: ``module:function`` that builds the engine from an ``EngineSetup`` in the other process.
        setup: Handed to it.

    Raises:
        MachineError: The engine could not be built there; its last words are quoted.
    """

    def __init__(self, opener: str, setup: EngineSetup) -> None:
        self.max_length = setup.max_length
        self._exchange = tempfile.TemporaryDirectory(prefix="mergelab-engine-")
        self._folder = Path(self._exchange.name)
        self._number = 0
        _write(self._folder / "setup.json", {"opener": opener, **_as_json(setup)})
        log = (self._folder / "log").open("wb")
        with log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mergelab.evals.engine_process", str(self._folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stops: Stops) -> list[Completion]:
        """Continue each prompt."""
        asked = {"prompts": [list(ids) for ids in prompts], "max_new_tokens": max_new_tokens, "stops": asdict(stops)}
        return [Completion(tuple(ids), reason) for ids, reason in self._ask("generate", asked)]

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
        """Return log-likelihoods of continuations."""
        asked = {"pairs": [[list(context), list(continuation)] for context, continuation in pairs]}
        return [(float(score), bool(greedy)) for score, greedy in self._ask("score", asked)]

    def close(self) -> None:
        """End the process, and by force if it does not."""
        process = self._process
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        try:
            process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()
        self._exchange.cleanup()

    def _ask(self, verb: str, arguments: dict[str, Any]) -> list[Any]:
        self._number += 1
        _write(self._folder / f"request-{self._number}.json", {"verb": verb, **arguments})
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{self._number}\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._died() from error
        return list(self._wait())

    def _wait(self) -> Any:
        """Return what the other process answers to the newest request; to number 0, that it is there."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line != f"{self._number}\n":
            raise self._died()
        path = self._folder / f"answer-{self._number}.json"
        answer = json.loads(path.read_text(encoding="utf-8"))
        path.unlink()
        if "error" in answer:
            raise MachineError(answer["error"])
        return answer["value"]

    def _died(self) -> MachineError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        lines = (self._folder / "log").read_text(encoding="utf-8", errors="replace").splitlines()
        last = "\n".join(lines[-_LOG_LINES:]) or "nothing"
        return MachineError(
            f"the process of the inference engine ended (exit code {self._process.poll()}); its points must be graded "
            f"again. Its last words were:\n{last}"
        )


def _write(path: Path, value: dict[str, Any]) -> None:
    """Write a message on one line: it holds long lists of tokens, and scores that may be infinite."""
    atomic.write_text(path, json.dumps(value))


def _as_json(setup: EngineSetup) -> dict[str, Any]:
    return {key: str(value) if isinstance(value, Path) else value for key, value in asdict(setup).items()}


def serve(folder: Path) -> None:
    """The child's side: build the engine, then answer request after request until stdin ends."""
    # Libraries print; the pipe is for numbers alone.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(number: int, value: dict[str, Any]) -> None:
        _write(folder / f"answer-{number}.json", value)
        answers.write(f"{number}\n")
        answers.flush()

    written = json.loads((folder / "setup.json").read_text(encoding="utf-8"))
    module, _, function = written.pop("opener").partition(":")
    setup = EngineSetup(**{**written, "folder": Path(written["folder"]), "tokenizer": Path(written["tokenizer"])})
    try:
        engine: Engine = getattr(import_module(module), function)(setup)
    except MachineError as error:
        answer(0, {"error": str(error)})
        return
    answer(0, {"value": []})
    try:
        for line in sys.stdin:
            number = int(line)
            path = folder / f"request-{number}.json"
            asked = json.loads(path.read_text(encoding="utf-8"))
            path.unlink()
            try:
                answer(number, {"value": _answer(engine, asked)})
            except MachineError as error:
                answer(number, {"error": str(error)})
    finally:
        engine.close()


def _answer(engine: Engine, asked: dict[str, Any]) -> list[Any]:
    if asked["verb"] == "score":
        return [
            list(one) for one in engine.score([(context, continuation) for context, continuation in asked["pairs"]])
        ]
    stops = Stops(tuple(asked["stops"]["ids"]), tuple(asked["stops"]["strings"]))
    return [
        [list(one.token_ids), one.reason] for one in engine.generate(asked["prompts"], asked["max_new_tokens"], stops)
    ]


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
