"""Grading live models end to end through ``simple_evaluate``."""

import io
import json
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import datasets
import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM

from mergelab.errors import MergelabError, RecipeError
from mergelab.evals import loading, suite
from mergelab.evals.quiet import quiet_harness
from mergelab.evals.request import EvalRequest
from mergelab.evals.suite import load_suite
from tests.evals.scripted import (
    NO_END,
    TEMPLATE,
    ScriptedModel,
    byte_tokenizer,
    gsm8k,
    tiny_model,
    write_jsonl,
)

TASK = "gsm8k_cot_zeroshot"
SHARED = Path(__file__).parents[3] / "shared" / "data"
QUESTIONS = gsm8k(("one?", "1"), ("two?", "2"), ("three?", "3"), ("four?", "4"), ("five?", "5"))
SCRIPT = {
    "one?": "The answer is 1.",
    "two?": "It is 2",
    "three?": "",
    "four?": "I think" + NO_END,
    "five?": "The answer is 6. Q: and on" + NO_END,
}


def load(tmp_path, documents=QUESTIONS, task=TASK, protocol="paper-instruct-v1", **settings):
    data = {task: write_jsonl(tmp_path / f"{task}.jsonl", documents)}
    if task.startswith("gsm8k"):
        settings.setdefault("max_gen_toks", {task: 40})
    return load_suite(EvalRequest(protocol, tasks=(task,), data=data, **settings))


def test_crafted_answers_are_scored_and_counted(tmp_path):
    model = ScriptedModel(SCRIPT)
    result = load(tmp_path).evaluate(TASK, model, model.tokenizer)
    metrics = result.metrics
    assert (metrics["strict"], metrics["flexible"], metrics["n"]) == (20.0, 40.0, 5)
    assert (metrics["truncated"], metrics["empty"], metrics["unparsable"], metrics["ungradable"]) == (
        1,
        1,
        2,
        0,
    )
    assert metrics["lm_eval"]["strict"] == 20.0
    assert metrics["num_tokens"] == sum(sample["num_tokens"] for sample in result.samples) == 16 + 7 + 0 + 40 + 19
    assert metrics["generation_config"] == {
        "do_sample": False,
        "num_beams": 1,
        "repetition_penalty": 1.0,
        "eos_token_id": [2],
        "pad_token_id": 0,
        "max_new_tokens": 40,
    }
    assert metrics["first_prompt"] == "<s><|user|>Q: one?\nA: Let's think step by step.<|bot|>"
    assert [sample["response"].strip() for sample in result.samples] == [
        "The answer is 1.",
        "It is 2",
        "",
        "I think",
        "The answer is 6.",
    ]
    json.dumps([metrics, result.samples], allow_nan=False)


def test_answers_equal_a_plain_lm_eval_run(tmp_path):
    model, tokenizer = tiny_model(), byte_tokenizer()
    loaded = load(tmp_path)
    ours = loaded.evaluate(TASK, model, tokenizer)
    task = loaded.tasks[0].parts[0].loaded.task
    with quiet_harness():
        plain = simple_evaluate(
            model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=8),
            tasks=[task],
            apply_chat_template=True,
            bootstrap_iters=0,
            task_manager=suite_task_manager(),
        )
    rows = [row for row in plain["samples"][TASK] if row["filter"] == "strict-match"]
    assert [sample["response"] for sample in ours.samples] == [row["resps"][0][0] for row in rows]
    for name in ("doc_hash", "prompt_hash", "target_hash"):
        assert [sample[name] for sample in ours.samples] == [row[name] for row in rows]
    assert ours.metrics["strict"] == 100 * plain["results"][TASK]["exact_match,strict-match"]


def suite_task_manager():
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=False)


def test_other_weights_give_other_answers_and_the_first_ones_come_back(tmp_path):
    loaded, tokenizer, model = load(tmp_path), byte_tokenizer(), tiny_model(0)

    def responses():
        return [sample["response"] for sample in loaded.evaluate(TASK, model, tokenizer).samples]

    first = responses()
    stored = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(tiny_model(1).state_dict())
    assert all(other != one for other, one in zip(responses(), first, strict=True))
    model.load_state_dict(stored)
    assert responses() == first


def test_nothing_is_printed_and_the_callers_objects_stay_as_they_were(tmp_path):
    loaded, tokenizer, model = load(tmp_path), byte_tokenizer(), tiny_model()
    tokenizer.pad_token = None
    out, err, seen = io.StringIO(), io.StringIO(), []
    with redirect_stdout(out), redirect_stderr(err):
        loaded.evaluate(TASK, model, tokenizer, progress=lambda done, total: seen.append((done, total)))
    assert (out.getvalue(), err.getvalue()) == ("", "")
    assert seen[-1] == (5, 5)
    assert (tokenizer.pad_token, tokenizer.padding_side, tokenizer.chat_template) == (None, "right", TEMPLATE)


def test_no_answer_cache_and_no_files_of_lm_eval(tmp_path, monkeypatch):
    loaded, model = load(tmp_path), ScriptedModel(SCRIPT)
    given = {}
    import lm_eval

    real = lm_eval.simple_evaluate
    monkeypatch.setattr(lm_eval, "simple_evaluate", lambda **settings: given.update(settings) or real(**settings))
    for _ in range(2):
        before = model.num_forwards
        loaded.evaluate(TASK, model, model.tokenizer)
        assert model.num_forwards > before
    assert (given["use_cache"], given["cache_requests"], given["bootstrap_iters"]) == (None, False, 0)
    assert given["fewshot_as_multiturn"] is True
    assert len(given["tasks"]) == 1


def test_limit_grades_the_same_drawn_documents_for_every_model(tmp_path):
    loaded, tokenizer = load(tmp_path, limit=2), byte_tokenizer()
    (task,) = loaded.tasks
    assert task.n == 2
    first, second = (loaded.evaluate(TASK, tiny_model(seed), tokenizer).samples for seed in (0, 1))
    ids = [sample["doc_id"] for sample in first]
    assert ids == [sample["doc_id"] for sample in second] == task.stage["documents"]["ids"]
    everything = load(tmp_path).evaluate(TASK, tiny_model(), tokenizer).samples
    assert [everything[doc_id]["prompt_hash"] for doc_id in ids] == [sample["prompt_hash"] for sample in first]


def test_one_template_can_be_forced_and_none_is_refused(tmp_path):
    loaded, model = load(tmp_path), ScriptedModel(SCRIPT)
    bare = byte_tokenizer(template=None)
    with pytest.raises(RecipeError, match="asks through a chat template"):
        loaded.evaluate(TASK, model, bare)
    assert model.num_forwards == 0
    forced = "{{ messages[0]['content'] }}!{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
    result = loaded.evaluate(TASK, model, bare, chat_template=forced)
    assert result.metrics["first_prompt"].endswith("step by step.!False")
    assert result.metrics["chat_template_sha256"] is not None
    assert bare.chat_template is None
    other = loaded.evaluate(TASK, model, byte_tokenizer())
    assert other.metrics["chat_template_sha256"] != result.metrics["chat_template_sha256"]


def test_protocol_without_template_shows_the_tasks_own_examples(tmp_path):
    loaded, model = load(tmp_path, task="gsm8k_cot", protocol="paper-default-v1"), ScriptedModel(SCRIPT)
    metrics = loaded.evaluate("gsm8k_cot", model, byte_tokenizer(template=None)).metrics
    assert metrics["chat_template_sha256"] is None
    assert metrics["first_prompt"].startswith("Q: There are 15 trees")
    assert metrics["first_prompt"].count("\n\nQ:") == 8


def test_budget_that_does_not_fit_the_context_is_refused(tmp_path):
    with pytest.raises(RecipeError, match="40 new tokens do not fit the model's context of 32"):
        load(tmp_path).evaluate(TASK, tiny_model(max_position_embeddings=32), byte_tokenizer())


def test_unknown_task_is_refused_with_the_nearest_name(tmp_path):
    with pytest.raises(RecipeError, match=f"did you mean {TASK}"):
        load(tmp_path).evaluate("gsm8k_cot_zeroshoot", tiny_model(), byte_tokenizer())


def test_checker_that_cannot_run_leaves_the_document_ungraded(tmp_path):
    documents = [
        {"key": 1, "prompt": "one?", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
        {"key": 2, "prompt": "two?", "instruction_id_list": ["punctuation:no_dash"], "kwargs": [{}]},
        {"key": 3, "prompt": "three?", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
    ]
    loaded = load(tmp_path, documents, "ifeval", max_gen_toks={"ifeval": 40})
    model = ScriptedModel(SCRIPT)
    result = loaded.evaluate("ifeval", model, model.tokenizer)
    assert [sample["strict"] for sample in result.samples] == [1, None, 0]
    assert [sample["ungradable"] for sample in result.samples] == [False, True, False]
    assert (result.metrics["strict"], result.metrics["ungradable"]) == (50.0, 1)
    assert result.metrics["ungradable_reasons"] == {"KeyError: 'punctuation:no_dash'": 1}
    assert (result.metrics["empty"], result.metrics["unparsable"]) == (1, 1)


def test_all_documents_ungradable_gives_no_score_rather_than_zero(tmp_path):
    document = {"key": 2, "prompt": "two?", "instruction_id_list": ["no:such"], "kwargs": [{}]}
    model = ScriptedModel(SCRIPT)
    loaded = load(tmp_path, [document], "ifeval", max_gen_toks={"ifeval": 40})
    metrics = loaded.evaluate("ifeval", model, model.tokenizer).metrics
    assert (metrics["strict"], metrics["flexible"], metrics["ungradable"]) == (None, None, 1)


def test_score_that_lm_eval_computes_otherwise_is_refused(tmp_path, monkeypatch):
    loaded, model = load(tmp_path), ScriptedModel(SCRIPT)
    loaded.tasks[0].parts[0].loaded.task._aggregation_list["exact_match"] = max
    with pytest.raises(MergelabError, match=r"strict is 20\.0 by our samples and 100\.0 by lm-eval"):
        loaded.evaluate(TASK, model, model.tokenizer)


def test_log_likelihood_task_is_scored_without_text(tmp_path):
    documents = [{"passage": f"p{n}", "question": "q", "label": n % 2} for n in range(6)]
    result = load(tmp_path, documents, "boolq").evaluate("boolq", tiny_model(), byte_tokenizer())
    assert result.metrics["strict"] == result.metrics["lm_eval"]["strict"]
    assert result.metrics["flexible"] is None
    assert (result.metrics["truncated"], result.metrics["num_tokens"]) == (0, 0)
    assert {sample["response"] for sample in result.samples} <= {"yes", "no"}


@pytest.mark.parametrize("limit", [None, 2])
def test_family_is_scored_as_one_task_weighted_by_size(tmp_path, limit):
    right = {"question": "R?", "options": ["a", "b"], "answer": "B", "cot_content": "c"}
    documents = [{**right, "category": "law"}, {**right, "category": "math"}, {**right, "category": "law"}]
    documents.append({**right, "category": "law", "question": "W?"})
    script = {"R?": "the answer is (B)", "W?": "the answer is (A)"}
    loaded = load(tmp_path, documents, "mmlu_pro", limit=limit, max_gen_toks={"mmlu_pro": 30})
    model = ScriptedModel(script)
    result = loaded.evaluate("mmlu_pro", model, model.tokenizer)
    if limit is None:
        assert (result.metrics["strict"], result.metrics["n"]) == (75.0, 4)
        assert [sample["strict"] for sample in result.samples] == [1, 1, 0, 1]
    ids = [sample["doc_id"] for sample in result.samples]
    assert ids == (loaded.tasks[0].stage["documents"]["ids"] or list(range(4)))
    assert len(result.samples) == loaded.tasks[0].n


def test_samples_of_picture_tasks_hold_no_pixels(tmp_path):
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    from tests.evals.scripted import tiny_config

    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=36,
        patch_size=12,
        projection_dim=16,
    )
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            text_config=tiny_config(),
            vision_config=vision,
            image_token_index=3,
            image_seq_length=9,
            vision_feature_layer=-1,
        )
    ).eval()
    loaded = load_suite(EvalRequest("bench-v1", tasks=("bench_image",), limit=6))
    result = loaded.evaluate("bench_image", model, byte_tokenizer())
    assert len(result.samples) == 6
    assert max(len(json.dumps(sample)) for sample in result.samples) < 1500
    assert all(sample["cluster"] for sample in result.samples)
    assert result.metrics["modality"] == "vision"


def test_bench_format_scores_its_own_targets_perfectly():
    loaded = load_suite(EvalRequest("bench-v1", tasks=("bench_format",), limit=20))
    task = loaded.tasks[0].parts[0].loaded.task
    documents = [task.eval_docs[doc_id] for doc_id in loaded.tasks[0].parts[0].doc_ids]
    model = ScriptedModel({document["prompt"] + "<|bot|>": document["target"] for document in documents[:15]})
    model.script |= {document["prompt"] + "<|bot|>": document["answer"] + "!" for document in documents[15:]}
    result = loaded.evaluate("bench_format", model, model.tokenizer)
    assert (result.metrics["strict"], result.metrics["flexible"]) == (75.0, 100.0)


def test_grader_that_raises_is_noted_with_its_reason(tmp_path):
    loaded = load(tmp_path).tasks[0].parts[0].loaded
    assert isinstance(loaded, loading.LoadedSubtask)
    assert loaded.failures == {}
    assert loaded.task.process_results({"question": "q"}, ["x"]) == {}
    assert list(loaded.failures.values()) == [1]


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/data")
def test_shipped_copies_of_ifeval_and_gsm8k_load_whole():
    data = {"ifeval": SHARED / "ifeval.jsonl", TASK: SHARED / "gsm8k_test.jsonl"}
    tasks = load_suite(EvalRequest("paper-instruct-v1", data=data)).tasks
    assert [(task.name, task.n, task.max_gen_toks) for task in tasks] == [
        ("ifeval", 541, 1280),
        (TASK, 1319, 1024),
    ]


def test_seeds_are_those_of_plain_lm_eval():
    from inspect import signature

    defaults = {name: parameter.default for name, parameter in signature(simple_evaluate).parameters.items()}
    assert suite.SEEDS.items() <= defaults.items()


def test_prompts_are_rendered_and_encoded_once_and_nothing_is_loaded_again(tmp_path, monkeypatch):
    loaded, tokenizer = load(tmp_path), byte_tokenizer()
    first = loaded.evaluate(TASK, tiny_model(0), tokenizer)
    prepared = next(iter(loaded._prepared.values())).tokenizer
    done = Counter()

    def counted(owner, name):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, **named: done.update([name]) or real(*given, **named))

    counted(prepared, "encode")
    counted(prepared, "apply_chat_template")
    counted(suite, "load_subtasks")
    counted(datasets.Dataset, "from_list")
    second = loaded.evaluate(TASK, tiny_model(1), tokenizer)
    assert first.samples != second.samples
    assert done["load_subtasks"] == done["from_list"] == done["apply_chat_template"] == 0
    # One stop string is measured to know how many tokens to look back.
    assert done["encode"] <= len(second.samples) - 1
    again = loaded.evaluate(TASK, tiny_model(0), tokenizer)
    assert again.samples == first.samples
