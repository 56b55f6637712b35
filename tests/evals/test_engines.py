"""Text answered by an engine: equal to the live model's answers, and refused when the weights are others."""

from types import SimpleNamespace

import pytest
import torch

from mergelab.errors import MachineError, MergelabError
from mergelab.evals import vllm_engine
from mergelab.evals.canary import check_engine, compare
from mergelab.evals.engine_process import EngineProcess
from mergelab.evals.engines import BATCH_SIZE, Completion, EngineSetup, Stops, weights_content
from mergelab.evals.request import EvalRequest
from mergelab.evals.suite import load_suite
from tests.evals.engine_stub import ModelEngine
from tests.evals.scripted import NO_END, ScriptedModel, byte_tokenizer, gsm8k, tiny_model, write_jsonl

TASK = "gsm8k_cot_zeroshot"
QUESTIONS = gsm8k(("one?", "1"), ("two, which is longer?", "2"), ("three?", "3"), ("four?", "4"), ("five?", "5"))
SCRIPT = {
    "one?": "The answer is 1.",
    "two, which is longer?": "It is 2",
    "three?": "",
    "four?": "I think" + NO_END,
    "five?": "The answer is 6. Q: and on" + NO_END,
}


def load(tmp_path, documents=QUESTIONS, task=TASK, protocol="paper-instruct-v1", backend="hf", budget=40, **settings):
    data = {task: write_jsonl(tmp_path / f"{task}.jsonl", documents)}
    if budget:
        settings["max_gen_toks"] = {task: budget}
    return load_suite(EvalRequest(protocol, tasks=(task,), data=data, backend=backend, **settings))


def both(tmp_path, model, tokenizer, task=TASK, **settings):
    """Return what the live model and the engine over it answer."""
    live = load(tmp_path, task=task, **settings).evaluate(task, model, tokenizer)
    engine = ModelEngine(model, tokenizer)
    suite = load(tmp_path, task=task, backend="vllm", **settings)
    return live, suite.evaluate(task, engine, tokenizer, generation_config=model.generation_config), engine


def varied_model(seed=0, **settings):
    """A model whose answers depend on the question."""
    return tiny_model(seed, initializer_range=0.5, **settings)


def assert_equal(live, asked):
    assert asked.samples == live.samples
    for metrics in (live.metrics, asked.metrics):
        metrics.pop("seconds")
        # Padding is the live model's business.
        metrics["generation_config"].pop("pad_token_id")
    assert (live.metrics.pop("backend"), asked.metrics.pop("backend")) == ("hf", "vllm")
    assert asked.metrics == live.metrics


def test_scripted_answers_end_and_count_as_those_of_the_live_model(tmp_path):
    model = ScriptedModel(SCRIPT)
    engine = ModelEngine(model, model.tokenizer)

    def write(prompts, max_new_tokens, stops):
        found = []
        for ids in prompts:
            line, new = model._line(list(ids)), []
            while len(new) < max_new_tokens:
                new.append(line[len(new)])
                if new[-1] in stops.ids:
                    break
                if any(stop in model.tokenizer.decode(new) for stop in stops.strings):
                    break
            reason = "end" if new[-1] in stops.ids else "length" if len(new) == max_new_tokens else "stop"
            found.append(Completion(tuple(new), reason))
        return found

    engine.generate = write
    live = load(tmp_path).evaluate(TASK, model, model.tokenizer)
    asked = load(tmp_path, backend="vllm").evaluate(
        TASK, engine, model.tokenizer, generation_config=model.generation_config
    )
    assert (live.metrics["truncated"], live.metrics["empty"], live.metrics["strict"]) == (1, 1, 20.0)
    assert_equal(live, asked)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_real_model_behind_an_engine_gives_the_same_samples_and_numbers(tmp_path, seed):
    live, asked, engine = both(tmp_path, varied_model(seed), byte_tokenizer())
    assert len({sample["response"] for sample in live.samples}) > 1
    assert engine.prompts[0][:2] == [1, 4], "one begin token, the template's"
    assert_equal(live, asked)


def test_examples_without_a_template_are_asked_alike(tmp_path):
    settings = {"task": "gsm8k_cot", "protocol": "paper-default-v1", "budget": 8}
    assert_equal(*both(tmp_path, tiny_model(), byte_tokenizer(template=None), **settings)[:2])


def test_prompts_that_do_not_fit_lose_the_same_tokens(tmp_path):
    model = varied_model(max_position_embeddings=62)
    live, asked, engine = both(tmp_path, model, byte_tokenizer(), budget=12)
    assert live.metrics["cut_prompts"] >= 1
    assert max(len(ids) for ids in engine.prompts) == 50
    assert_equal(live, asked)


def test_further_stop_ids_and_an_end_within_the_budget(tmp_path):
    model, tokenizer = varied_model(), byte_tokenizer()
    engine = ModelEngine(model, tokenizer)
    load(tmp_path, backend="vllm").evaluate(TASK, engine, tokenizer, generation_config=model.generation_config)
    # A token that this model writes early in one answer.
    (written,) = engine.generate(engine.prompts[:1], 5, Stops(ids=()))
    model.generation_config.eos_token_id = [2, written.token_ids[3]]
    live, asked, _ = both(tmp_path, model, byte_tokenizer())
    assert live.metrics["truncated"] < live.metrics["n"]
    assert_equal(live, asked)


def test_log_likelihood_task_chooses_alike(tmp_path):
    documents = [{"passage": f"p{n}" * n, "question": "q", "label": n % 2} for n in range(1, 7)]
    live, asked, _ = both(tmp_path, tiny_model(), byte_tokenizer(), task="boolq", documents=documents, budget=None)
    assert_equal(live, asked)


def test_requests_go_out_at_once_and_the_batch_size_is_the_engines(tmp_path):
    suite = load(tmp_path, backend="vllm")
    assert suite.tasks[0].stage["batch_size"] == BATCH_SIZE
    assert load(tmp_path, backend="vllm", batch_size=3).tasks[0].stage["batch_size"] == 3
    assert load(tmp_path).tasks[0].stage["batch_size"] == 8
    pictures = load_suite(EvalRequest("bench-v1", backend="vllm")).tasks
    assert [(task.name, task.backend, task.stage["batch_size"]) for task in pictures] == [
        ("bench_format", "vllm", BATCH_SIZE),
        ("bench_image", "hf", 128),
    ]


def test_an_engine_is_never_shown_pictures():
    suite = load_suite(EvalRequest("bench-v1", backend="vllm", limit=2))
    with pytest.raises(MergelabError, match="asked about pictures"):
        suite.evaluate("bench_image", ModelEngine(tiny_model(), byte_tokenizer()), byte_tokenizer())


# Are they the right weights?


def test_content_does_not_depend_on_layout():
    torch.manual_seed(0)
    q, k = torch.randn(8, 4, dtype=torch.bfloat16), torch.randn(4, 4, dtype=torch.bfloat16)
    padded = torch.cat([torch.cat([q, k]).t(), torch.zeros(4, 3, dtype=torch.bfloat16)], dim=1)
    assert weights_content([padded]) == weights_content([q, k]) == weights_content([k, q, k[:2]])
    swapped = q.clone()
    swapped[0, 0], swapped[1, 1] = q[0, 0] * 2, q[1, 1] / 2
    assert weights_content([swapped, k]) != weights_content([q, k])
    assert weights_content([q, k, k.clone()]) != weights_content([q, k])
    for dtype in (torch.float32, torch.float16):
        assert weights_content([q.to(dtype)]) != weights_content([q])


def test_engine_with_the_same_weights_agrees_and_others_are_refused():
    tokenizer, model = byte_tokenizer(), tiny_model(0)
    agreement = check_engine(ModelEngine(model, tokenizer), model, tokenizer, "point a")
    assert agreement.reading < 1e-5
    assert agreement.writing == 0.0
    with pytest.raises(MergelabError, match="point b: the engine does not answer with these weights"):
        check_engine(ModelEngine(tiny_model(1), tokenizer), model, tokenizer, "point b")


def test_answers_out_of_a_stale_prefix_cache_are_refused():
    tokenizer, old, new = byte_tokenizer(), tiny_model(0), tiny_model(1)
    engine = ModelEngine(old, tokenizer)
    engine.keeps_old_answers = True
    check_engine(engine, old, tokenizer, "old")
    engine.load(new.named_parameters())
    assert engine.content() == weights_content(p.data for p in new.parameters())
    found = compare(engine, new, tokenizer)
    assert found.reading < 1e-5
    with pytest.raises(MergelabError, match="found one"):
        check_engine(engine, new, tokenizer, "new")


def test_not_a_number_is_no_agreement():
    tokenizer, model = byte_tokenizer(), tiny_model()
    engine = ModelEngine(model, tokenizer)
    engine.score = lambda pairs: [(float("nan"), False) for _ in pairs]
    with pytest.raises(MergelabError, match="nan away"):
        check_engine(engine, model, tokenizer, "point")


# A process of its own


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "model"
    tiny_model().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return EngineSetup(folder, folder, "float32", "cpu", 4, 4096)


def test_engine_in_another_process_answers_as_here(checkpoint, tmp_path):
    tokenizer, model = byte_tokenizer(), tiny_model()
    engine = EngineProcess("tests.evals.engine_stub:open_stub", checkpoint)
    exchange = engine._folder
    try:
        live = load(tmp_path).evaluate(TASK, model, tokenizer)
        asked = load(tmp_path, backend="vllm").evaluate(
            TASK, engine, tokenizer, generation_config=model.generation_config
        )
        assert_equal(live, asked)
        pairs = [([1, 70, 71], [72, 73]), ([1], [80])]
        assert engine.score(pairs) == ModelEngine(model, tokenizer).score(pairs)
        assert {path.name for path in exchange.iterdir()} == {"setup.json", "log"}, "answers are taken away"
    finally:
        engine.close()
    assert not exchange.exists()
    assert engine._process.poll() == 0


def test_engine_that_cannot_be_built_says_why(checkpoint):
    with pytest.raises(MachineError, match="no such architecture"):
        EngineProcess("tests.evals.engine_openers:open_refused", checkpoint)
    with pytest.raises(MachineError, match=r"(?s)exit code 1.*ZeroDivisionError: a bug"):
        EngineProcess("tests.evals.engine_openers:open_faulty", checkpoint)


def test_engine_that_dies_is_reported_with_its_last_words(checkpoint):
    engine = EngineProcess("tests.evals.engine_openers:open_dying", checkpoint)
    try:
        with pytest.raises(MachineError, match=r"(?s)exit code 139.*Segmentation fault"):
            engine.generate([[1, 2, 3]], 4, Stops(ids=(2,)))
    finally:
        engine.close()
    assert not engine._folder.exists()


# vLLM itself is not needed to say that it is missing


def test_missing_vllm_says_what_to_install(monkeypatch):
    monkeypatch.setattr(vllm_engine, "find_spec", lambda name: None)
    with pytest.raises(MachineError, match=r"pip install 'mergelab\[vllm\]'"):
        vllm_engine.require_vllm("cuda")


@pytest.mark.parametrize(
    ("built_for", "device", "message"),
    [
        ("", "cpu", "finds no device that it can use. The ordinary build needs an NVIDIA GPU"),
        ("cuda", "cpu", "the models are on cpu, and this vLLM 9.9 finds cuda"),
        ("cuda", "cuda:1", "Set CUDA_VISIBLE_DEVICES=1"),
    ],
)
def test_vllm_for_another_device_is_refused(monkeypatch, tmp_path, built_for, device, message):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("__version__ = '9.9'\n")
    platforms = f"class current_platform:\n    device_type = {built_for!r}\n"
    (tmp_path / "vllm" / "platforms.py").write_text(platforms)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("vllm", "vllm.platforms"):
        monkeypatch.delitem(__import__("sys").modules, name, raising=False)
    with pytest.raises(MachineError, match=message):
        vllm_engine.require_vllm(device)


@pytest.mark.parametrize(
    ("ids", "finish", "stop", "expected"),
    [
        ((5, 2), "stop", 2, Completion((5, 2), "end")),
        ((5, 2), "stop", None, Completion((5, 2), "end")),
        ((5, 6), "stop", "Q:", Completion((5, 6), "stop")),
        ((5, 2), "stop", "</s>!", Completion((5, 2), "stop")),
        ((5, 6), "length", None, Completion((5, 6), "length")),
    ],
)
def test_vllms_words_for_an_ending(ids, finish, stop, expected):
    output = SimpleNamespace(token_ids=ids, finish_reason=finish, stop_reason=stop)
    assert vllm_engine._completion(output, Stops((2,), ("Q:", "</s>!"))) == expected


def test_answer_that_vllm_gave_up_is_no_answer():
    output = SimpleNamespace(token_ids=(5,), finish_reason="abort", stop_reason=None)
    with pytest.raises(MachineError, match=r"gave an answer up \(abort\)"):
        vllm_engine._completion(output, Stops((2,)))
