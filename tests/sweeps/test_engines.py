"""Runs whose text is answered by an engine: the same table as transformers gives, whatever the engine does wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from mergelab.cli import main
from mergelab.errors import MachineError
from mergelab.evals import vllm_engine
from mergelab.evals.engines import EngineSetup
from mergelab.records import PointFolder, read_run
from mergelab.sweeps import engines, single, worker
from mergelab.sweeps.engines import EngineKind
from tests.builders import tiny_llama, tiny_llava
from tests.evals.engine_stub import ModelEngine, open_stub

PROMPTS = ["what is the colour of a cat ?", "red blue green ?", "one two three", "a dog : answer .", "two cat"]
CHECK = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
POINTS = 6


class Backend:
    """Stands in for vLLM: counts its engines, and makes those named by ``spoil`` wrong."""

    def __init__(self) -> None:
        self.residents: list[ModelEngine] = []
        self.processes: list[tuple[EngineSetup, ModelEngine]] = []
        self.spoil: Callable[[ModelEngine], None] = lambda engine: None
        self.open: Callable[[EngineSetup], ModelEngine] = open_stub

    def resident(self, setup: EngineSetup) -> ModelEngine:
        assert not any(setup.folder.glob("*.safetensors")), "a resident engine starts without weights"
        torch.manual_seed(99)
        config = AutoConfig.from_pretrained(setup.folder)
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, setup.dtype)).eval()
        engine = ModelEngine(model, AutoTokenizer.from_pretrained(setup.tokenizer), setup.max_length)
        self.spoil(engine)
        self.residents.append(engine)
        return engine

    def process(self, opener: str, setup: EngineSetup) -> ModelEngine:
        engine = self.open(setup)
        self.processes.append((setup, engine))
        return engine


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Backend:
    """Engines of stubs, all in this process."""
    made = Backend()
    kind = EngineKind(made.resident, "never:opened")
    monkeypatch.setattr(engines, "require_vllm", lambda device: "9.9")
    for room in (worker, single):
        monkeypatch.setattr(room, "vllm_kind", lambda device: kind)
    monkeypatch.setattr(engines, "EngineProcess", made.process)
    return made


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pair")
    base = tiny_llama(root / "base", seed=1, initializer_range=0.3)
    tiny_llava(root / "vlm", seed=2, start=base, noise=0.2)
    rows = [{"key": number, "prompt": prompt, **CHECK} for number, prompt in enumerate(PROMPTS)]
    (root / "ifeval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "recipe.yaml").write_text(
        "name: tiny\npair: bench\ncontrols: [endpoints]\nmethod: task_arithmetic\nsweep: {lambda: [0.3, 0.7]}\n"
        "evals: {tasks: [ifeval], data: {ifeval: ifeval.jsonl}, max_gen_toks: {ifeval: 6}, backend: vllm}\n"
    )
    return root


def run(root: Path, out: Path, *settings: str, code: int = 0) -> Result:
    options = [part for setting in settings for part in ("--set", setting)]
    parents = ["--base", str(root / "base"), "--vlm", str(root / "vlm"), "--out", str(out), "--device", "cpu"]
    result = CliRunner().invoke(main, ["run", str(root / "recipe.yaml"), *parents, "--no-cache", *options])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def by_label(out: Path) -> dict[str, PointFolder]:
    return {f"{p.role} {p.point['method']} {json.dumps(p.point['parameters'])}": p for p in read_run(out).points}


def answers(out: Path) -> dict[str, Any]:
    return {label: point.tasks["ifeval"].samples for label, point in by_label(out).items()}


@pytest.fixture(scope="module")
def plain(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the live models answer."""
    out = tmp_path_factory.mktemp("plain") / "run"
    run(root, out, "evals.backend=hf")
    found = answers(out)
    assert len({json.dumps([line["response"] for line in samples]) for samples in found.values()}) > 2
    return found


def how(out: Path) -> dict[str, str]:
    return {label: point.tasks["ifeval"].metrics["engine"] for label, point in by_label(out).items()}


def test_one_resident_engine_answers_for_all_merges(
    root: Path, tmp_path: Path, backend: Backend, plain: dict[str, Any]
) -> None:
    out = tmp_path / "run"
    result = run(root, out)
    assert answers(out) == plain
    (resident,) = backend.residents
    assert resident.num_loads == POINTS - 1
    assert resident.closed
    ((setup, process),) = backend.processes
    assert setup.folder == root / "base", "base has a config of its own and is read where it lies"
    assert process.closed
    assert sorted(how(out).values()) == ["from disk", *["in place"] * (POINTS - 1)]
    assert not (out / "scratch").exists()
    assert "answered by vllm" in (out / "report" / "table.md").read_text()
    experiment = read_run(out).experiment
    assert experiment["versions"]["vllm"] == "9.9"
    assert result.exit_code == 0
    assert "finished before" in run(root, out).stderr


@pytest.mark.parametrize("wrong", ["ignores_updates", "hides_weights", "skips"])
def test_engine_whose_weights_do_not_follow_is_replaced_by_processes(
    root: Path, tmp_path: Path, backend: Backend, plain: dict[str, Any], wrong: str
) -> None:
    value: Any = ("layers.1.mlp.up_proj.weight",) if wrong == "skips" else True
    backend.spoil = lambda engine: setattr(engine, wrong, value)
    out = tmp_path / "run"
    run(root, out)
    assert answers(out) == plain
    assert set(how(out).values()) == {"from disk"}
    assert [engine.closed for engine in backend.residents] == [True], "tried once"
    assert len(backend.processes) == POINTS
    assert all(engine.closed for _, engine in backend.processes)
    assert not (out / "scratch").exists()


def test_stale_keys_and_values_fail_the_point(root: Path, tmp_path: Path, backend: Backend) -> None:
    backend.spoil = lambda engine: setattr(engine, "keeps_old_answers", True)
    out = tmp_path / "run"
    result = run(root, out, code=7)
    assert "the engine does not answer with these weights" in result.stderr
    graded = [point for point in read_run(out).points if "ifeval" in point.tasks]
    assert len(backend.residents) > 1, "after a failure the next point gets a fresh engine"
    assert all(engine.closed for engine in backend.residents)
    # What did get through was asked of a fresh engine.
    assert len(graded) < POINTS


def test_engine_with_other_weights_from_disk_fails_the_point(root: Path, tmp_path: Path, backend: Backend) -> None:
    backend.spoil = lambda engine: setattr(engine, "hides_weights", True)
    backend.open = lambda setup: open_stub(
        EngineSetup(root / "base", *(getattr(setup, name) for name in list(vars(setup))[1:]))
    )
    out = tmp_path / "run"
    result = run(root, out, code=7)
    done = [label for label, point in by_label(out).items() if "ifeval" in point.tasks]
    assert done == ["base  {}"], "not even the copy of base, which keeps one row of the vlm's embedding"
    assert result.stderr.count("does not answer with these weights") >= POINTS - 1


def test_engine_that_dies_costs_one_point_and_the_same_command_goes_on(
    root: Path, tmp_path: Path, backend: Backend, plain: dict[str, Any]
) -> None:
    def spoil(engine: ModelEngine) -> None:
        # The canary asks six times; it dies on the second document of the first point.
        engine.dies_after = 7 if not backend.residents else None

    backend.spoil = spoil
    out = tmp_path / "run"
    result = run(root, out, code=7)
    assert "1 of 6 points failed" in result.stderr
    assert "out of memory" in result.stderr
    assert len(backend.residents) == 2
    run(root, out)
    assert answers(out) == plain


def test_checkpoint_of_a_killed_run_is_removed(root: Path, tmp_path: Path, backend: Backend) -> None:
    out = tmp_path / "run"
    run(root, out)
    (out / "scratch" / "weights").mkdir(parents=True)
    (out / "scratch" / "weights" / "model.safetensors").write_bytes(b"half")
    run(root, out)
    assert not (out / "scratch").exists()


def test_checkpoint_that_is_not_the_live_weights_is_not_used(
    root: Path, tmp_path: Path, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.spoil = lambda engine: setattr(engine, "hides_weights", True)
    monkeypatch.setattr(engines, "fingerprint_checkpoint", lambda checkpoint: "0" * 64)
    out = tmp_path / "run"
    result = run(root, out, code=7)
    assert "5 of 6 points failed" in result.stderr
    assert "the checkpoint for the engine has weights 000000000000" in " ".join(result.stderr.split())
    assert [setup.folder.name for setup, _ in backend.processes] == ["base"]


def test_point_is_written_and_answered_by_a_process_of_its_own(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = EngineKind(None, "tests.evals.engine_stub:open_stub")
    monkeypatch.setattr(single, "vllm_kind", lambda device: kind)
    found = {name: evaluate(root, "vlm", name) for name in ("hf", "vllm")}
    for metrics in found.values():
        del metrics["seconds"], metrics["backend"], metrics["generation_config"]["pad_token_id"]
    assert found["vllm"] == found["hf"]


def evaluate(root: Path, model: str, backend: str) -> dict[str, Any]:
    arguments = ["--tasks", "ifeval", "--data", f"ifeval={root / 'ifeval.jsonl'}", "--max-gen-toks", "ifeval=6"]
    result = CliRunner().invoke(
        main, ["eval", str(root / model), *arguments, "--device", "cpu", "--json", "--backend", backend]
    )
    assert result.exit_code == 0, (result.output, result.exception)
    (metrics,) = json.loads(result.stdout)
    assert metrics["backend"] == backend
    return dict(metrics)


def test_another_backend_grades_anew_and_a_half_changed_folder_is_refused(
    root: Path, tmp_path: Path, backend: Backend, plain: dict[str, Any]
) -> None:
    out = tmp_path / "run"
    run(root, out, "evals.backend=hf")
    assert not backend.processes
    backend.spoil = lambda engine: setattr(engine, "dies_after", 0)
    result = run(root, out, code=5)
    assert "its answers are of" in result.stderr
    backend.spoil = lambda engine: None
    run(root, out)
    assert {point.tasks["ifeval"].metrics["backend"] for point in read_run(out).points} == {"vllm"}
    assert answers(out) == plain


def test_missing_vllm_is_said_before_anything_is_made(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_engine, "find_spec", lambda name: None)
    out = tmp_path / "run"
    result = run(root, out, code=MachineError.exit_code)
    assert "pip install 'mergelab[vllm]'" in result.stderr
    assert not out.exists()
    result = CliRunner().invoke(main, ["eval", str(root / "base"), "--backend", "vllm", "--device", "cpu"])
    assert result.exit_code == MachineError.exit_code
    options = ("--json", "--device", "cpu")
    result = CliRunner().invoke(
        main,
        ["doctor", str(root / "recipe.yaml"), "--base", str(root / "base"), "--vlm", str(root / "vlm"), *options],
    )
    assert result.exit_code == MachineError.exit_code
    checks = {check["what"]: check for check in json.loads(result.stdout)}
    assert not checks["vllm"]["ok"]
    assert "not installed" in checks["vllm"]["found"]
    assert all(check["ok"] for what, check in checks.items() if what != "vllm")
