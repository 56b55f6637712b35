"""Tasks beyond the paper's first ones: near misses through the real graders, and numbers equal to plain lm-eval."""

import importlib.util
import threading

import pytest
import yaml
from lm_eval import simple_evaluate
from lm_eval.config.task import TaskConfig
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from mergelab.errors import MachineError, RecipeError
from mergelab.evals import keys, resources
from mergelab.evals.entry import task_path
from mergelab.evals.protocols import PROTOCOLS
from mergelab.evals.quiet import quiet_harness
from mergelab.evals.regrading import regrade
from mergelab.evals.request import EvalRequest
from mergelab.evals.suite import load_suite
from mergelab.evals.tasks import EQ_BENCH_LOWEST, TASKS
from tests.evals.scripted import ScriptedModel, byte_tokenizer, tiny_model, write_jsonl

HAS_MATH = all(importlib.util.find_spec(name) for name in ("math_verify", "antlr4"))
HAS_RULER = importlib.util.find_spec("wonderwords") is not None
needs_math = pytest.mark.skipif(not HAS_MATH, reason="needs the extra: pip install 'mergelab[math]'")
needs_ruler = pytest.mark.skipif(not HAS_RULER, reason="needs the extra: pip install 'mergelab[ruler]'")

HALF = {"solution": r"So we get $\boxed{\frac{1}{2}}$.", "answer": r"\frac{1}{2}"}
REFERENCE = str(
    {f"emotion{n}": word for n, word in enumerate(("Anger", "Joy", "Fear", "Hope"), start=1)}
    | {f"emotion{n}_score": score for n, score in enumerate((10, 0, 3, 5), start=1)}
)
ADD = {"text": "add", "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(-1, 1) == 0"]}
CHECK = {"test": "def check(candidate):\n    assert candidate(1, 2) == 3\n", "entry_point": "add"}
DEF = "def add(a, b):\n    return a + b"

# task -> what every document has, name of the prompt's field, answers: name -> (answer, strict, flexible)
CASES = {
    "bbh_cot_fewshot": (
        {"target": "(B)", "subtask": "date_understanding"},
        "input",
        {
            "asked form": ("We count. So the answer is (B).", 1, None),
            "no full stop": ("So the answer is (B)", 0, None),
            "capital": ("The Answer is (B).", 0, None),
            "bold": ("the answer is **(B)**.", 0, None),
            "letter": ("(B)", 0, None),
            "first sentence only": ("the answer is (B). I am sure.", 0, None),
            "cut at a blank line": ("the answer is (B).\n\nthe answer is (A).", 1, None),
            "cut at a Q": ("Quite hard: the answer is (B).", 0, None),
        },
    ),
    "hendrycks_math500": (
        HALF,
        "problem",
        {
            "bare": (r"\frac{1}{2}", 1, None),
            "in dollars": (r"The answer is $\frac{1}{2}$.", 1, None),
            "decimal": ("0.5", 1, None),
            "slash": ("1/2", 1, None),
            "short fraction": (r"$\frac12$", 1, None),
            "prose": ("It is 1/2.", 0, None),
            "boxed": (r"\boxed{\frac{1}{2}}", 0, None),
            "two formulas": (r"From $x = 1$ we get $\frac{1}{2}$", 0, None),
            "wrong": ("$2$", 0, None),
        },
    ),
    "eq_bench": (
        {"reference_answer_fullscale": REFERENCE},
        "prompt",
        {
            "exact": ("Anger: 10\nJoy: 0\nFear: 3\nHope: 5", 100, 1),
            "one off by four": ("Anger: 6\nJoy: 0\nFear: 3\nHope: 5", 75.69975, 1),
            "with a preamble": ("First pass scores:\nAnger: 10\nJoy: 0\nFear: 3\nHope: 5", 100, 1),
            "three emotions": ("Anger: 10\nJoy: 0\nFear: 3", 0, 0),
            "another emotion": ("Anger: 10\nJoy: 0\nFear: 3\nPride: 5", 0, 0),
            "lower case": ("anger: 10\njoy: 0\nfear: 3\nhope: 5", 0, 0),
            "no space": ("Anger:10\nJoy:0\nFear:3\nHope:5", 0, 0),
            "bold": ("**Anger**: 10\n**Joy**: 0\n**Fear**: 3\n**Hope**: 5", 0, 0),
            "worse than nothing": ("Anger: 0\nJoy: 10\nFear: 10\nHope: 0",
                                   100 - 7.477 * (10 + 10 + 7 + 6.5 / (1 + 2.718281828459045**-1.2)), 1),
            "beyond the scale": ("Anger: 100\nJoy: 99\nFear: 99\nHope: 99", EQ_BENCH_LOWEST, 1),
            "empty": ("", 0, 0),
        },
    ),
    "mbpp": (
        ADD,
        "text",
        {
            "program": (DEF, 1, None),
            "up to the stop": (f"{DEF}\n[DONE]\nprint(", 1, None),
            "fenced": (f"```python\n{DEF}\n```", 0, None),
            "prose first": (f"Here it is:\n{DEF}", 0, None),
            "wrong": (DEF.replace("+", "-"), 0, None),
            "right for the first test": ("def add(a, b):\n    return 3", 0, None),
            "leaves": (f"{DEF}\nimport os\nos._exit(0)", 0, None),
            "empty": ("", 0, None),
        },
    ),
    "humaneval": (
        CHECK,
        "prompt",
        {
            "body": ("    return a + b", 1, None),
            "body and more": ("    return a + b\n\nprint(add(1, 2))", 1, None),
            "not indented": ("return a + b", 0, None),
            "whole function": (f"    pass\n\n{DEF}", 0, None),
            "fenced": ("```python\n    return a + b\n```", 0, None),
            "wrong": ("    return a - b", 0, None),
        },
    ),
    "humaneval_instruct": (
        CHECK,
        "prompt",
        {
            "body": ("    return a + b", 1, None),
            "closing fence": ("    return a + b\n```\nThis adds.", 1, None),
            "not indented": ("return a + b", 0, None),
        },
    ),
    "minerva_math500": (
        HALF,
        "problem",
        {
            "asked form": (r"Final Answer: The final answer is $\frac{1}{2}$. I hope it is correct.", 1, 1),
            "without hope": (r"Final Answer: The final answer is $\frac{1}{2}$.", 0, 1),
            "decimal": ("Final Answer: The final answer is $0.5$. I hope it is correct.", 1, 1),
            "boxed": (r"so it is $\boxed{\frac{1}{2}}$", 0, 1),
            "bare": ("1/2", 0, 1),
            "wrong": ("Final Answer: The final answer is $2$. I hope it is correct.", 0, 0),
        },
    ),
    "niah_single_1": (
        {"outputs": ["1234567", "7654321"], "max_length": 4096, "gen_prefix": "The numbers are"},
        "input",
        {
            "both": ("1234567 and 7654321", 1, None),
            "one": ("1234567", 0.5, None),
            "none": ("123456", 0, None),
            "glued": ("12345677654321", 1, None),
        },
    ),
}  # fmt: skip
MARKS = {"minerva_math500": needs_math, "niah_single_1": needs_ruler}
TABLE = [
    pytest.param(task, case, id=f"{task}-{case}", marks=MARKS.get(task, ()))
    for task, (_, _, answers) in CASES.items()
    for case in answers
]


def documents(task):
    shared, field, answers = CASES[task]
    text = "def add(a, b):\n    # [{}]\n" if task.startswith("humaneval") else "[{}]"
    return [{field: text.format(name), **{key: value for key, value in shared.items() if key != field}}
            for name in answers]  # fmt: skip


def load(folder, task, lines=None, protocol="paper-instruct-v1", **settings):
    data = {task: write_jsonl(folder / f"{task}.jsonl", lines or documents(task))}
    return load_suite(EvalRequest(protocol, tasks=(task,), data=data, allow_code=True, **settings))


def script(task):
    return ScriptedModel({f"[{name}]": answer for name, (answer, _, _) in CASES[task][2].items()})


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """Task -> its results over all crafted answers, made once."""
    made = {}

    def of(task):
        if task not in made:
            suite, model = load(tmp_path_factory.mktemp(task), task, max_gen_toks={task: 120}), script(task)
            made[task] = suite.tasks[0], suite.evaluate(task, model, model.tokenizer)
        return made[task]

    return of


@pytest.mark.parametrize(("task", "case"), TABLE)
def test_near_misses(graded, task, case):
    place = list(CASES[task][2]).index(case)
    sample = graded(task)[1].samples[place]
    _, strict, flexible = CASES[task][2][case]
    if TASKS[task].lowest:
        strict = (strict - EQ_BENCH_LOWEST) / (100 - EQ_BENCH_LOWEST)
    assert sample["strict"] == pytest.approx(strict, abs=1e-12)
    assert sample["flexible"] == flexible
    assert not sample["ungradable"]


def test_eq_bench_says_its_points_and_what_lies_beyond_its_scale(graded):
    _, result = graded("eq_bench")
    expected = [score for _, score, _ in CASES["eq_bench"][2].values()]
    assert result.metrics["strict"] == pytest.approx(sum(expected) / len(expected))
    assert result.metrics["flexible"] == pytest.approx(100 * 5 / 11)
    assert (result.metrics["lowest"], result.metrics["beyond_scale"], result.metrics["unparsable"]) == (-199.08, 1, 6)
    given = [sample["points"] for sample in result.samples]
    assert given[-2] == pytest.approx(10 * (10 - 0.7477 * (90 + 99 + 96 + 94)))
    assert result.metrics["lm_eval"]["strict"] == pytest.approx(sum(given) / len(given))


@pytest.mark.parametrize("task", ["bbh_cot_fewshot", "eq_bench", "humaneval"])
def test_regrading_stored_answers_gives_the_same_lines(graded, task):
    loaded, result = graded(task)
    metrics, samples = regrade(loaded, result.metrics, result.samples)
    assert samples == result.samples
    assert metrics == result.metrics


PLAIN = ["hendrycks_math500", "eq_bench", "bbh_cot_fewshot", "truthfulqa_mc2"]
TRUTH = [
    {"question": f"[{n}]?", "mc1_targets": {"choices": ["yes", "no"], "labels": [1, 0]},
     "mc2_targets": {"choices": ["yes", "maybe", "no"], "labels": [1, 1, 0]}}
    for n in range(5)
]  # fmt: skip


@pytest.mark.parametrize("task", [*PLAIN, pytest.param("minerva_math500", marks=needs_math)])
def test_numbers_equal_those_of_plain_lm_eval(tmp_path, monkeypatch, task):
    """The same documents through a YAML of lm-eval's own kind, its own loader and its own model class."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    lines = TRUTH if task == "truthfulqa_mc2" else documents(task)
    suite = load(tmp_path, task, lines)
    upstream = task_path(TASKS[task])
    upstream = upstream / "date_understanding.yaml" if TASKS[task].group else upstream
    asked = {"include": str(upstream), "task": "plain", "dataset_path": "json", "dataset_name": None,
             "num_fewshot": 0}  # fmt: skip
    split = "validation" if task in ("eq_bench", "truthfulqa_mc2") else "test"
    asked["dataset_kwargs"] = {"data_files": {split: str(tmp_path / f"{task}.jsonl")}}
    if task != "truthfulqa_mc2":
        own = suite.tasks[0].parts[0].loaded.task.config.generation_kwargs
        asked["generation_kwargs"] = dict(own)
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "plain.yaml").write_text(yaml.safe_dump(asked))
    model = tiny_model() if task == "truthfulqa_mc2" else script(task)
    tokenizer = byte_tokenizer()
    ours = suite.evaluate(task, model, tokenizer)
    with quiet_harness():
        theirs = simple_evaluate(
            model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=8),
            tasks=["plain"],
            task_manager=TaskManager(include_defaults=False, include_path=str(tmp_path / "plain")),
            apply_chat_template=True,
            fewshot_as_multiturn=True,
            bootstrap_iters=0,
        )
    rows = theirs["samples"]["plain"]
    assert [sample["prompt_hash"] for sample in ours.samples] == [row["prompt_hash"] for row in rows]
    assert [sample["target_hash"] for sample in ours.samples] == [row["target_hash"] for row in rows]
    if task != "truthfulqa_mc2":
        assert [sample["response"] for sample in ours.samples] == [row["resps"][0][0] for row in rows]
    entry = TASKS[task]
    for grader, key in (("strict", entry.strict), ("flexible", entry.flexible)):
        if key is not None:
            value = entry.unit * theirs["results"]["plain"][key]
            assert ours.metrics["lm_eval"][grader] == pytest.approx(value, abs=1e-9)
    assert 0 < ours.metrics["strict"] < 100 or task == "eq_bench"


def test_truthfulqa_gives_fractions_and_leaves_out_what_underflows(tmp_path, monkeypatch):
    suite, model = load(tmp_path, "truthfulqa_mc2", TRUTH), tiny_model()
    scores = [sample["strict"] for sample in suite.evaluate("truthfulqa_mc2", model, byte_tokenizer()).samples]
    assert all(0 < score < 1 for score in scores)
    task = suite.tasks[0].parts[0].loaded
    with quiet_harness():
        assert task.task.process_results(TRUTH[0], [(-2000.0, False)] * 3) == {}
    assert task.failures == {"acc is no finite number": 1}
    whole = dict(TRUTH[0], mc2_targets={"choices": ["a", "b", "c"], "labels": [1, 1, 1]})
    assert task.task.process_results(whole, [(-0.1, False), (-0.2, False), (-0.3, False)])["acc"] == pytest.approx(1)


@pytest.mark.parametrize("protocol", ["paper-instruct-v1", "paper-default-v1"])
@pytest.mark.parametrize("task", [pytest.param(name, marks=MARKS.get(name, ())) for name in CASES])
def test_generation_equals_upstream_but_for_the_budget(tmp_path, task, protocol):
    loaded = load(tmp_path, task, protocol=protocol).tasks[0]
    path = task_path(TASKS[task])
    raw = load_yaml(path / "date_understanding.yaml" if TASKS[task].group else path, resolve_func=False)
    upstream = TaskConfig(task="any", generation_kwargs=raw["generation_kwargs"]).generation_kwargs
    resolved = dict(loaded.parts[0].loaded.task.config.generation_kwargs)
    own = upstream.pop("max_gen_toks", None)
    assert resolved.pop("max_gen_toks") == PROTOCOLS[protocol].max_gen_toks.get(task, own) == loaded.max_gen_toks
    assert resolved == upstream
    if protocol == "paper-default-v1":
        assert loaded.stage["num_fewshot"] == (raw.get("num_fewshot") or 0)


def test_family_of_27_is_one_score_weighted_by_size(tmp_path):
    lines = [
        {"input": f"[{n}]", "target": "True", "subtask": subtask}
        for n, subtask in enumerate(["boolean_expressions"] * 3 + ["Web of Lies"])
    ]
    suite = load(tmp_path, "bbh_cot_fewshot", lines)
    right, wrong = "So the answer is True.", "So the answer is False."
    model = ScriptedModel({"[0]": right, "[1]": wrong, "[2]": right, "[3]": right})
    result = suite.evaluate("bbh_cot_fewshot", model, model.tokenizer)
    assert [part.loaded.name for part in suite.tasks[0].parts] == [
        "bbh_cot_fewshot_boolean_expressions",
        "bbh_cot_fewshot_web_of_lies",
    ]
    assert (result.metrics["strict"], result.metrics["n"]) == (75.0, 4)
    assert len(list(task_path(TASKS["bbh_cot_fewshot"]).glob(TASKS["bbh_cot_fewshot"].members))) == 27
    assert list(suite.tasks[0].documents()) == lines


@pytest.mark.parametrize("task", ["mbpp", "humaneval"])
def test_programs_run_only_when_the_recipe_says_so(tmp_path, task):
    request = EvalRequest("paper-instruct-v1", tasks=(task,))
    with pytest.raises(RecipeError, match=f"{task} runs programs that the model writes; .* evals.allow_code: true"):
        load_suite(request)
    assert all(not TASKS[name].code for protocol in PROTOCOLS.values() for name in protocol.tasks)


def test_stage_of_a_code_task_names_the_python_that_runs_it(graded):
    loaded, _ = graded("mbpp")
    version, python = loaded.stage["code"]
    assert version == 1 and python.count(".") == 2
    assert "code" not in graded("hendrycks_math500")[0].stage


@needs_ruler
def test_documents_of_other_lengths_are_not_graded(tmp_path):
    lines = documents("niah_single_1")
    suite = load(tmp_path, "niah_single_1", [*lines[:2], {**lines[2], "max_length": 8192}])
    assert suite.tasks[0].n == 2
    with pytest.raises(RecipeError, match=r"no document at .* has max_length 4096"):
        load(tmp_path, "niah_single_1", [{**line, "max_length": 8192} for line in lines])


def test_unknown_result_keys_are_found_when_the_task_is_loaded(graded):
    task = graded("minerva_math500" if HAS_MATH else "eq_bench")[0].parts[0].loaded.task
    entry = TASKS["eq_bench"]
    assert keys.known_keys(graded("eq_bench")[0].parts[0].loaded.task) == ["eqbench,none", "percent_parseable,none"]
    assert keys.known_keys(graded("humaneval")[0].parts[0].loaded.task) == ["pass@1,create_test"]
    assert keys.known_keys(graded("mbpp")[0].parts[0].loaded.task) == ["pass_at_1,none"]
    wrong = type(entry)(**{**vars(entry), "strict": "eqbench,strict-match"})
    with pytest.raises(MachineError, match="strict key is 'eqbench,strict-match'"):
        keys.check_keys(wrong, task)


@pytest.mark.skipif(HAS_MATH, reason="the extra is installed")
def test_missing_extra_is_named_before_any_work(tmp_path):
    with pytest.raises(
        MachineError, match=r"minerva_math500: .* math_verify, antlr4 not .* pip install 'mergelab\[math\]'"
    ):
        load(tmp_path, "minerva_math500")


def test_other_antlr_is_refused(monkeypatch):
    monkeypatch.setattr(resources, "version", lambda name: "4.9.3")
    with pytest.raises(MachineError, match=r"expected antlr4-python3-runtime 4\.11, found 4\.9\.3"):
        resources.check_antlr()


def test_mathematics_is_not_compared_off_the_main_thread():
    found = []

    def attempt():
        try:
            resources.check_thread("minerva_math500", ("math",))
        except MachineError as error:
            found.append(str(error))

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    assert len(found) == 1 and "main thread" in found[0]
    resources.check_thread("minerva_math500", ("math",))
    resources.check_thread("gsm8k", ())
