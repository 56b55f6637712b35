"""Stored answers graded again: nothing changes untouched, a wrong verdict is mended, other documents are refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mergelab import records
from mergelab.cli import main
from mergelab.errors import RecipeError
from mergelab.evals.regrading import regrade
from mergelab.evals.request import EvalRequest
from mergelab.evals.suite import EvalSuite, load_suite
from mergelab.sweeps import regrade as sweeps_regrade
from mergelab.sweeps.regrade import _request
from tests.builders import tiny_llama, tiny_llava
from tests.evals.scripted import NO_END, ScriptedModel, gsm8k, write_jsonl

CHECKS = [{"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}] * 3
CHECKS += [{"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": ["zebra"]}]}]
CHECKS += [{"instruction_id_list": ["no:such"], "kwargs": [{}]}]
PROMPTS = ["what is the colour of a cat ?", "red blue green ?", "one two three", "a dog : answer .", "two cat"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("regrade")
    base = tiny_llama(root / "base", seed=1)
    tiny_llava(root / "vlm", seed=2, start=base, noise=1.0)
    rows = [{"key": n, "prompt": prompt, **CHECKS[n]} for n, prompt in enumerate(PROMPTS)]
    write_jsonl(root / "ifeval.jsonl", rows)
    (root / "recipe.yaml").write_text(
        "name: tiny\npair: bench\ncontrols: []\nmethod: task_arithmetic\n"
        "evals: {tasks: [ifeval, boolq], data: {ifeval: ifeval.jsonl, boolq: boolq.jsonl}, "
        "max_gen_toks: {ifeval: 6}, limit: 4}\n"
    )
    write_jsonl(root / "boolq.jsonl", [{"passage": "a cat", "question": "red", "label": 1}])
    arguments = ["run", root / "recipe.yaml", "--base", base, "--vlm", root / "vlm", "--out", root / "run"]
    result = CliRunner().invoke(main, [*map(str, arguments), "--device", "cpu"])
    assert result.exit_code == 0, (result.output, result.exception)
    return root / "run"


def call(folder: Path, *more: str) -> Result:
    return CliRunner().invoke(main, ["regrade", str(folder), "--json", *more])


def content(folder: Path) -> dict[str, bytes]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_untouched_run_comes_out_byte_for_byte(finished: Path) -> None:
    before = content(finished)
    result = call(finished)
    assert result.exit_code == 0, (result.output, result.exception)
    found = json.loads(result.stdout)
    assert {one["task"] for one in found} == {"ifeval"} and len(found) == 3
    assert not any(one["rewritten"] for one in found)
    assert "boolq is left as it is" in result.stderr
    assert content(finished) == before


def plant(folder: Path) -> tuple[str, int]:
    """Turn the verdict of one graded answer around, as a broken grader would have written it."""
    point = records.read_run(folder).points[0]
    record = point.tasks["ifeval"]
    place = next(n for n, sample in enumerate(record.samples) if sample["strict"] == 1)
    samples = [dict(sample) for sample in record.samples]
    samples[place] |= {"strict": 0, "unparsable": True}
    metrics: dict[str, Any] = {**record.metrics, "strict": 0.0, "unparsable": 1}
    records.write_task(folder, point.point_id, "ifeval", metrics, samples)
    return point.point_id, samples[place]["doc_id"]


def test_planted_wrong_verdict_is_repaired_and_recorded(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    before = content(finished)
    point_id, doc_id = plant(folder)
    result = call(folder)
    assert result.exit_code == 0, (result.output, result.exception)
    (one,) = [one for one in json.loads(result.stdout) if one["rewritten"]]
    assert (one["point_id"], one["changed"], one["before"][0]) == (point_id, [doc_id], 0.0)
    after = content(folder)
    assert [name for name in before if after[name] != before[name]] == [f"points/{point_id}/tasks/ifeval/metrics.json"]
    metrics = json.loads(after[f"points/{point_id}/tasks/ifeval/metrics.json"])
    assert metrics.pop("regraded")["changed_documents"] == [doc_id]
    assert metrics == json.loads(before[f"points/{point_id}/tasks/ifeval/metrics.json"])
    run = CliRunner().invoke(main, ["report", str(folder)])
    assert run.exit_code == 0


def test_other_documents_are_refused_and_nothing_is_written(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    plant(folder)
    before = content(folder)
    graded = [sample["doc_id"] for sample in records.read_run(folder).points[0].tasks["ifeval"].samples]
    rows = [{"key": n, "prompt": prompt, **CHECKS[n]} for n, prompt in enumerate(PROMPTS)]
    for number in graded[1:]:
        rows[number]["prompt"] += " !"
    result = call(folder, "--data", f"ifeval={write_jsonl(tmp_path / 'other.jsonl', rows)}")
    assert result.exit_code == 3
    assert f"document {graded[1]} is not the one" in result.stderr
    assert content(folder) == before


def test_document_that_is_gone_is_named(tmp_path: Path) -> None:
    def suite(*questions: tuple[str, str]) -> EvalSuite:
        data = {"gsm8k": write_jsonl(tmp_path / f"{len(questions)}.jsonl", gsm8k(*questions))}
        return load_suite(EvalRequest("paper-instruct-v1", ("gsm8k",), data, max_gen_toks={"gsm8k": 30}))

    model = ScriptedModel({"one?": "#### 1", "two?": "#### 2"})
    result = suite(("one?", "1"), ("two?", "2")).evaluate("gsm8k", model, model.tokenizer)
    with pytest.raises(RecipeError, match="document 1 is not the one that was asked about: the task has no such"):
        regrade(suite(("one?", "1")).tasks[0], result.metrics, result.samples)


@pytest.mark.parametrize("limit", [None, 2])
def test_answers_with_two_filters_and_of_families_come_out_the_same(tmp_path: Path, limit: int | None) -> None:
    texts = {"one?": "The answer is 1.", "two?": "It is 2", "three?": "", "four?": "I" + NO_END}
    questions = gsm8k(("one?", "1"), ("two?", "2"), ("three?", "3"), ("four?", "4"))
    right = {"question": "R?", "options": ["a", "b"], "answer": "B", "cot_content": "c"}
    pro = [{**right, "category": name} for name in ("law", "math", "law")] + [
        {**right, "question": "W?", "category": "law"}
    ]
    texts |= {"R?": "the answer is (B)", "W?": "the answer is (A)"}
    model = ScriptedModel(texts)
    for name, documents in (("gsm8k_cot_zeroshot", questions), ("mmlu_pro", pro)):
        data = {name: write_jsonl(tmp_path / f"{name}.jsonl", documents)}
        request = EvalRequest("paper-instruct-v1", (name,), data, limit, None, {name: 30})
        suite = load_suite(request)
        result = suite.evaluate(name, model, model.tokenizer)
        assert regrade(suite.tasks[0], result.metrics, result.samples) == (result.metrics, result.samples)


def test_base_is_found_as_the_run_names_it(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tokenizer(base: Any) -> Path | None:
        run = records.read_run(finished)
        run.experiment["pair"]["base"] = base
        return _request(run, {}).tokenizer

    assert tokenizer("package:bench/data/pair/base") is not None
    assert tokenizer(str(tmp_path)) == tmp_path
    assert tokenizer(str(tmp_path / "gone")) is None
    assert tokenizer("no-one/no-model") is None
    asked = []
    monkeypatch.setattr(sweeps_regrade, "resolve_source", lambda *source: asked.append(source) or tmp_path)
    assert tokenizer({"id": "some/one", "revision": "abc"}) == tmp_path and asked == [("some/one", "abc")]


def test_folder_that_is_no_run_is_refused_and_left_empty(tmp_path: Path) -> None:
    result = call(tmp_path)
    assert result.exit_code == 5
    assert list(tmp_path.iterdir()) == []
