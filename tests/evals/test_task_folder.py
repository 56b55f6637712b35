"""Tasks of the user's own: a folder of lm-eval YAMLs, a registry, documents beside them; and folders of data."""

from pathlib import Path

import pytest
import yaml

from mergelab.errors import RecipeError
from mergelab.evals.definitions import read_definition
from mergelab.evals.listing import list_tasks
from mergelab.evals.request import EvalRequest
from mergelab.evals.suite import load_suite
from mergelab.evals.task_folder import read_task_folder, runs_code
from tests.evals.scripted import ScriptedModel, gsm8k, write_jsonl

CAPITALS = {
    "dataset_path": "json",
    "output_type": "generate_until",
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"until": ["\n"], "do_sample": False},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    "filter_list": [
        {"name": "whole", "filter": [{"function": "regex", "regex_pattern": "^(.*)$"}, {"function": "take_first"}]},
        {"name": "word", "filter": [{"function": "regex", "regex_pattern": "([A-Z][a-z]+)"},
                                    {"function": "take_first"}]},
    ],
}  # fmt: skip
ROW = {
    "name": "capitals",
    "yaml": "capitals.yaml",
    "strict": "exact_match,whole",
    "flexible": "exact_match,word",
    "fields": {"question": "str", "answer": "str"},
    "cluster": "continent",
    "max_gen_toks": 30,
    "unparsable": "filter",
}
DOCUMENTS = [
    {"question": "France?", "answer": "Paris", "continent": "Europe"},
    {"question": "Italy?", "answer": "Rome", "continent": "Europe"},
    {"question": "Japan?", "answer": "Tokyo", "continent": "Asia"},
]
SCRIPT = {"France?": "Paris", "Italy?": "it is Rome", "Japan?": "42"}


def make(folder, rows=(ROW,), definition=CAPITALS, documents=DOCUMENTS):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "registry.yaml").write_text(yaml.safe_dump({"tasks": list(rows)}))
    (folder / "capitals.yaml").write_text(yaml.safe_dump(definition))
    if documents:
        write_jsonl(folder / "capitals.jsonl", list(documents))
    return folder


def load(folder, **settings):
    return load_suite(EvalRequest("paper-instruct-v1", tasks=("capitals",), task_folder=folder, **settings))


def test_own_task_is_graded_like_any_other(tmp_path):
    suite, model = load(make(tmp_path / "tasks")), ScriptedModel(SCRIPT)
    result = suite.evaluate("capitals", model, model.tokenizer)
    assert [(one["strict"], one["flexible"], one["cluster"]) for one in result.samples] == [
        (1, 1, "Europe"),
        (0, 1, "Europe"),
        (0, 0, "Asia"),
    ]
    assert (result.metrics["strict"], result.metrics["flexible"]) == (pytest.approx(100 / 3), pytest.approx(200 / 3))
    assert suite.tasks[0].max_gen_toks == 30
    assert load(tmp_path / "tasks", max_gen_toks={"capitals": 9}).tasks[0].max_gen_toks == 9


def test_stage_changes_with_the_definition_and_not_with_the_folder(tmp_path):
    stage = load(make(tmp_path / "a")).tasks[0].stage
    assert load(make(tmp_path / "b")).tasks[0].stage == stage
    other = load(make(tmp_path / "c", definition={**CAPITALS, "doc_to_text": "Capital of {{question}}"})).tasks[0].stage
    assert other["definition_sha256"] != stage["definition_sha256"]
    keys = load(make(tmp_path / "d", rows=[{**ROW, "flexible": None}])).tasks[0].stage
    assert keys["flexible_key"] is None and keys != stage


def test_documents_of_the_recipe_stand_before_those_of_the_folder(tmp_path):
    folder = make(tmp_path / "tasks")
    given = write_jsonl(tmp_path / "mine.jsonl", DOCUMENTS[:1])
    assert load(folder, data={"capitals": given}).tasks[0].n == 1
    with pytest.raises(RecipeError, match=r"line 1: field answer: expected str, found int"):
        load(folder, data={"capitals": write_jsonl(tmp_path / "bad.jsonl", [{"question": "q", "answer": 3}])})


def test_everything_wrong_with_a_registry_comes_in_one_message(tmp_path):
    rows = [
        {**ROW, "name": "ifeval"},
        {**ROW, "yaml": "gone.yaml"},
        {**ROW, "lowest": -10.0},
        {**ROW, "name": "grouped", "yaml": "group.yaml"},
        {**ROW, "name": "torn", "yaml": "torn.yaml"},
    ]
    folder = make(tmp_path / "tasks", rows)
    (folder / "group.yaml").write_text("group: all\ntask: [a, b]\n")
    (folder / "torn.yaml").write_text("task: [a\n")
    with pytest.raises(RecipeError) as caught:
        read_task_folder(folder)
    for part in (
        "ifeval: is the name of a built-in task",
        "gone.yaml: cannot be read",
        "capitals: stands twice",
        "capitals: lowest -10 needs unit: 1",
        "grouped: ",
        "defines a group",
        "torn.yaml: not valid YAML",
    ):
        assert part in str(caught.value)


def test_keys_and_values_that_a_registry_does_not_know(tmp_path):
    rows = [{"name": "a b", "yaml": "x.yaml", "strict": "acc", "flexibel": "acc,none", "modality": "sound"}, {}]
    folder = make(tmp_path / "tasks", rows)
    with pytest.raises(RecipeError) as caught:
        read_task_folder(folder)
    for part in (
        "tasks.0.name",
        "tasks.0.strict",
        "did you mean `flexible`?",
        "tasks.0.modality",
        "tasks.1.name: missing",
    ):
        assert part in str(caught.value)
    with pytest.raises(RecipeError, match="expected a folder of lm-eval tasks"):
        read_task_folder(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecipeError, match=r"registry.yaml: no such file"):
        read_task_folder(tmp_path / "empty")


@pytest.mark.parametrize("key", ["exact_match,none", "acc,whole"])
def test_result_key_that_the_definition_does_not_report(tmp_path, key):
    folder = make(tmp_path / "tasks", rows=[{**ROW, "strict": key}])
    with pytest.raises(RecipeError, match=f"strict key is '{key}'.*exact_match,.*Correct registry.yaml"):
        load(folder)


def test_task_without_stop_strings_or_budget_is_refused(tmp_path):
    no_stop = {**CAPITALS, "generation_kwargs": {"do_sample": False}}
    with pytest.raises(RecipeError, match=r"names no generation_kwargs with stop strings"):
        load(make(tmp_path / "a", definition=no_stop))
    row = {key: value for key, value in ROW.items() if key != "max_gen_toks"}
    with pytest.raises(RecipeError, match=r"lm-eval would cut at 256"):
        load(make(tmp_path / "b", rows=[row]))


def test_python_beside_a_task_runs_only_when_it_is_allowed(tmp_path):
    folder = make(tmp_path / "tasks")
    text = (
        (folder / "capitals.yaml").read_text().replace("doc_to_text: '{{question}}'", "doc_to_text: !function mine.ask")
    )
    assert "!function" in text
    (folder / "capitals.yaml").write_text(text)
    (folder / "mine.py").write_text(
        "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n\n\ndef ask(doc):\n"
        "    return 'Capital of ' + doc['question']\n"
    )
    with pytest.raises(RecipeError, match=r"capitals.yaml runs Python of its own \(!function mine.ask\); allow it"):
        load(folder)
    list_tasks(folder)
    assert not (folder / "ran").exists()
    suite, model = load(folder, allow_code=True), ScriptedModel(SCRIPT)
    result = suite.evaluate("capitals", model, model.tokenizer)
    assert "Capital of France?" in result.metrics["first_prompt"]
    (folder / "mine.py").write_text((folder / "mine.py").read_text().replace("Capital", "The capital"))
    assert (
        load(folder, allow_code=True).tasks[0].stage["definition_sha256"] != suite.tasks[0].stage["definition_sha256"]
    )


def test_functions_of_lm_eval_itself_need_no_leave(tmp_path):
    from mergelab.evals.entry import lm_eval_tasks

    folder = make(tmp_path / "tasks")
    installed = lm_eval_tasks() / "ifeval" / "ifeval.yaml"
    (folder / "capitals.yaml").write_text(f"include: {installed}\ntask: mine\n")
    entry = read_task_folder(folder)["capitals"]
    assert runs_code(entry) is None and entry.needs == ("ifeval",)
    assert read_definition(folder / "capitals.yaml")["generation_kwargs"]["max_gen_toks"] == 1280


def test_include_that_leads_back_is_named(tmp_path):
    (tmp_path / "a.yaml").write_text("include: b.yaml\n")
    (tmp_path / "b.yaml").write_text("include: a.yaml\n")
    with pytest.raises(RecipeError, match=r"a\.yaml: includes itself"):
        read_definition(tmp_path / "a.yaml")


def test_metric_in_points_needs_its_unit(tmp_path):
    definition = {key: value for key, value in CAPITALS.items() if key != "filter_list"}
    definition["process_results"] = "unused"
    folder = make(tmp_path / "tasks", rows=[{**ROW, "strict": "score,none", "flexible": None, "cluster": None}])
    text = yaml.safe_dump({**definition, "metric_list": [{"metric": "score", "aggregation": "mean",
                                                          "higher_is_better": True}]})  # fmt: skip
    (folder / "capitals.yaml").write_text(
        text.replace("process_results: unused", "process_results: !function mine.grade")
    )
    (folder / "mine.py").write_text(
        "def grade(doc, results):\n    return {'score': 40 - 80 * (doc['answer'] == 'Rome')}\n"
    )
    suite, model = load(folder, allow_code=True), ScriptedModel(SCRIPT)
    with pytest.raises(Exception, match=r"expected score,none in \[0, 1\], found 40.0.*unit: 1"):
        suite.evaluate("capitals", model, model.tokenizer)
    row = {**ROW, "strict": "score,none", "flexible": None, "unit": 1, "lowest": -60.0}
    (folder / "registry.yaml").write_text(yaml.safe_dump({"tasks": [row]}))
    result = load(folder, allow_code=True).evaluate("capitals", model, model.tokenizer)
    assert result.metrics["strict"] == pytest.approx((40 - 40 + 40) / 3)
    assert [sample["strict"] for sample in result.samples] == [0.625, 0.125, 0.625]
    assert result.metrics["lowest"] == -60


def own(tmp_path, row=None, python="", **definition):
    """A folder of one task with a changed row or definition; TAG stands for the tag of a function."""
    folder = make(tmp_path, rows=[{**ROW, **(row or {})}], definition={**CAPITALS, **definition})
    if python:
        (folder / "mine.py").write_text(python)
        path = folder / "capitals.yaml"
        path.write_text(path.read_text().replace("TAG", "!function"))
    return folder


def test_stage_changes_with_the_row_and_with_every_python_file(tmp_path):
    stage = load(own(tmp_path / "a")).tasks[0].stage
    for place, row in enumerate(({"cluster": None}, {"unparsable": "empty"})):
        assert load(own(tmp_path / f"row{place}", row)).tasks[0].stage != stage
    folder = own(tmp_path / "b")
    (folder / "deep").mkdir()
    (folder / "deep" / "helper.py").write_text("A = 1\n")
    one = load(folder).tasks[0].stage["definition_sha256"]
    (folder / "deep" / "helper.py").write_text("A = 2\n")
    assert one != load(folder).tasks[0].stage["definition_sha256"]


def test_stage_changes_with_python_beside_an_included_yaml(tmp_path):
    folder, shared = own(tmp_path / "a"), tmp_path / "shared"
    shared.mkdir()
    (folder / "capitals.yaml").rename(shared / "base.yaml")
    (folder / "capitals.yaml").write_text("include: ../shared/base.yaml\n")
    one = load(folder).tasks[0].stage["definition_sha256"]
    (shared / "graders.py").write_text("A = 1\n")
    assert one != load(folder).tasks[0].stage["definition_sha256"]


@pytest.mark.parametrize("metric", [{"metric": "accuracy"}, {"metric": "exact_match", "hf_evaluate": True}])
def test_metric_that_would_be_fetched_is_refused(tmp_path, monkeypatch, metric):
    import evaluate

    monkeypatch.setattr(evaluate, "load", lambda name: pytest.fail("evaluate was asked"))
    metric = {**metric, "aggregation": "mean", "higher_is_better": True}
    with pytest.raises(RecipeError, match=r"none of lm-eval's own"):
        load(own(tmp_path / "a", metric_list=[metric]))


def test_programs_of_models_are_for_built_in_tasks(tmp_path):
    from mergelab.evals.entry import lm_eval_tasks

    with pytest.raises(RecipeError, match="running programs of models"):
        read_task_folder(own(tmp_path / "a", unsafe_code=True))
    folder = own(tmp_path / "b")
    installed = lm_eval_tasks() / "mbpp" / "mbpp.yaml"
    (folder / "capitals.yaml").write_text(f"include: {installed}\nunsafe_code: false\n")
    with pytest.raises(RecipeError, match="running programs of models"):
        read_task_folder(folder)


def test_pictures_are_for_built_in_tasks(tmp_path):
    with pytest.raises(RecipeError, match=r"modality vision.*import-samples"):
        read_task_folder(own(tmp_path / "a", {"modality": "vision"}))
    with pytest.raises(RecipeError, match=r"doc_to_image.*import-samples"):
        read_task_folder(own(tmp_path / "b", doc_to_image="image"))


def test_document_that_a_template_cannot_render_is_named(tmp_path):
    folder = own(tmp_path / "a", doc_to_text="{{answer}} {{1 // answer | length}}")
    write_jsonl(folder / "capitals.jsonl", [*DOCUMENTS, {**DOCUMENTS[0], "answer": ""}])
    with pytest.raises(RecipeError, match=r"document 3 does not fit doc_to_text: ZeroDivisionError"):
        load(folder)


def test_whatever_own_python_raises_names_the_task(tmp_path):
    folder = own(tmp_path / "a", python="1 / 0\n", doc_to_text="TAG mine.ask")
    with pytest.raises(RecipeError, match=r"capitals.yaml cannot be loaded: ZeroDivisionError"):
        load(folder, allow_code=True)


def test_key_that_is_no_mean_is_refused(tmp_path):
    metric = {"metric": "exact_match", "aggregation": "median", "higher_is_better": True}
    with pytest.raises(RecipeError, match="strict key is 'exact_match,whole', which is no mean"):
        load(own(tmp_path / "a", metric_list=[metric]))


def test_points_outside_of_the_registered_scale_are_refused(tmp_path):
    definition = {"process_results": "TAG mine.grade", "filter_list": None}
    definition["metric_list"] = [{"metric": "score", "aggregation": "mean", "higher_is_better": True}]
    row = {"strict": "score,none", "flexible": None, "unit": 1, "lowest": -10.0}
    folder = own(tmp_path / "a", row, "def grade(doc, results):\n    return {'score': -40}\n", **definition)
    suite, model = load(folder, allow_code=True), ScriptedModel(SCRIPT)
    with pytest.raises(RecipeError, match=r"from -10 to 100 points, found -40.*Correct unit or lowest"):
        suite.evaluate("capitals", model, model.tokenizer)


def test_folder_of_data_is_looked_into_by_task(tmp_path):
    data = tmp_path / "data"
    write_jsonl(data / "gsm8k_cot_zeroshot.jsonl", gsm8k(("a?", "1")))
    for split in ("test", "train"):
        write_jsonl(data / "gsm8k" / f"{split}.jsonl", gsm8k(*((f"{split}{n}?", "1") for n in range(6))))
    request = EvalRequest("paper-default-v1", tasks=("gsm8k", "gsm8k_cot_zeroshot"), data_folder=data)
    assert [(task.name, task.n) for task in load_suite(request).tasks] == [("gsm8k", 6), ("gsm8k_cot_zeroshot", 1)]
    write_jsonl(data / "gsm8k.jsonl", gsm8k(("a?", "1")))
    with pytest.raises(RecipeError, match=r"expected one of .*gsm8k\.jsonl and .*gsm8k, found both"):
        load_suite(request)
    other = EvalRequest("paper-default-v1", tasks=("ifeval",), data_folder=data)
    with pytest.raises(
        RecipeError, match=r"expected ifeval\.jsonl or the like in .*data, found no file named after a task"
    ):
        load_suite(other)


def test_listing_holds_every_task_and_protocol(tmp_path):
    listed = {task["task"]: task for task in list_tasks(make(tmp_path / "tasks"))}
    assert listed["gsm8k"]["protocols"] == {
        "paper-instruct-v1": {"num_fewshot": 0, "max_gen_toks": 1024},
        "paper-default-v1": {"num_fewshot": 5, "max_gen_toks": 1024},
    }
    assert set(listed["bench_format"]["protocols"]) == {"bench-v1"}
    assert listed["mmlu"]["protocols"]["paper-default-v1"] == {"num_fewshot": 5, "max_gen_toks": None}
    assert listed["bbh_cot_fewshot"]["subtasks"] == 27 and listed["ruler"]["subtasks"] == 13
    assert listed["ruler"]["protocols"]["paper-default-v1"]["max_gen_toks"] == 128
    assert listed["ruler"]["needs"] == ["ruler", "tokenizer"] and listed["mbpp"]["needs"] == ["code", "allow_code"]
    assert listed["capitals"]["protocols"]["paper-default-v1"] == {"num_fewshot": 0, "max_gen_toks": 30}
    assert Path(listed["capitals"]["home"]) == Path("folder")
