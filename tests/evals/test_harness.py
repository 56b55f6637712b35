"""How answers end and what decodes them: crafted answers through the real generation loop."""

import copy
import io
import logging
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest
import torch
from lm_eval.api.instance import Instance
from transformers import CLIPVisionConfig, GenerationConfig, LlavaConfig, LlavaForConditionalGeneration

from mergelab.errors import RecipeError
from mergelab.evals.harness import Generation, PictureHarness, TextHarness, greedy_decoding
from mergelab.evals.prompts import PromptMemory
from mergelab.evals.quiet import quiet_harness, replaced
from tests.evals.scripted import NO_END, ScriptedModel, byte_tokenizer, tiny_config, tiny_model

SCRIPT = {"a?": "yes", "bb?": "no Q: and on" + NO_END, "ccc?": "never" + NO_END, "d?": "", "e?": "né"}


def ask(model, prompts, batch_size=8, until=("Q:",), budget=12, given=None):
    tokenizer = byte_tokenizer()
    with quiet_harness():
        harness = TextHarness(
            model, tokenizer, batch_size=batch_size, decoding=greedy_decoding(tokenizer, given), memory=PromptMemory()
        )
        settings = {"until": list(until), "max_gen_toks": budget, "do_sample": False}
        requests = [Instance("generate_until", {}, (prompt, settings), 0) for prompt in prompts]
        return harness.generate_until(requests), harness


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_endings_are_noted_in_request_order(batch_size):
    answers, harness = ask(ScriptedModel(SCRIPT), list(SCRIPT), batch_size)
    assert answers == ["yes", "no ", "never       ", "", "né"]
    assert harness.generations == [
        Generation(3, True),
        Generation(5, True),
        Generation(12, False),
        Generation(0, True),
        Generation(3, True),
    ]


def test_answer_of_exactly_the_budget_counts_as_cut():
    _, harness = ask(ScriptedModel({"a?": "yes"}), ["a?"], budget=3)
    assert harness.generations == [Generation(3, False)]


def test_stop_string_ends_a_row_without_waiting_for_the_budget():
    model = ScriptedModel(SCRIPT)
    ask(model, ["bb?"], budget=200)
    assert model.num_forwards <= 7


def test_prompts_that_do_not_fit_are_counted():
    _, harness = ask(ScriptedModel({"?": "x"}, max_position_embeddings=20), ["12345678?", "123456789?"], budget=11)
    assert harness.num_cut_prompts == 1


def test_stored_generation_settings_do_not_reach_the_answers():
    model = tiny_model()
    plain, _ = ask(model, ["hello", "who are you?"], until=())
    model.generation_config.repetition_penalty = 3.0
    model.generation_config.no_repeat_ngram_size = 1
    stored = model.generation_config
    again, _ = ask(model, ["hello", "who are you?"], until=(), given=model.generation_config)
    assert again == plain
    assert model.generation_config is stored
    ids = byte_tokenizer()("hello", return_tensors="pt")
    moved = model.generate(**ids, max_new_tokens=12, do_sample=False)
    assert byte_tokenizer().decode(moved[0, 5:]) != plain[0]


def test_stop_ids_are_those_of_the_given_settings_and_the_tokenizer():
    decoding = greedy_decoding(byte_tokenizer(), GenerationConfig(eos_token_id=[7, 5], repetition_penalty=1.3))
    assert decoding.eos_token_id == [2, 5, 7]
    assert (decoding.repetition_penalty, decoding.do_sample, decoding.pad_token_id) == (1.0, False, 0)


@pytest.mark.parametrize("tied_by_config", [True, False])
def test_building_a_harness_never_ties_an_untied_head(tied_by_config):
    model = tiny_model()
    model.config.tie_word_embeddings = tied_by_config
    before = copy.deepcopy(model.state_dict())
    ask(model, ["hello"])
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert "tie_weights" not in vars(model)


def test_plain_hflm_would_have_tied_it():
    from lm_eval.models.huggingface import HFLM

    model = tiny_model()
    model.config.tie_word_embeddings = True
    with quiet_harness():
        HFLM(pretrained=model, tokenizer=byte_tokenizer())
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_replaced_restores_own_and_inherited_attributes():
    class Owner:
        inherited = 1

    owner = Owner()
    owner.own = 2
    with pytest.raises(KeyError), replaced(owner, "inherited", 5), replaced(owner, "own", 6):
        assert (owner.inherited, owner.own) == (5, 6)
        raise KeyError
    assert (vars(owner), owner.inherited) == ({"own": 2}, 1)


def test_quiet_harness_silences_and_restores(recwarn):
    out, err = io.StringIO(), io.StringIO()
    level = logging.getLogger("lm_eval").level
    with redirect_stdout(out), redirect_stderr(err):
        with quiet_harness():
            sys.stdout.write("noise")
            logging.getLogger("lm_eval.x").error("noise")
        sys.stdout.write("data")
    assert (out.getvalue(), err.getvalue()) == ("data", "")
    assert logging.getLogger("lm_eval").level == level


@pytest.fixture(scope="module")
def llava():
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
        projection_dim=16,
    )
    config = LlavaConfig(
        text_config=tiny_config(),
        vision_config=vision,
        image_token_index=3,
        image_seq_length=4,
        vision_feature_layer=-1,
    )
    return LlavaForConditionalGeneration(config).eval()


def show(model, prompts, pictures, batch_size):
    tokenizer = byte_tokenizer()
    with quiet_harness():
        harness = PictureHarness(
            model, tokenizer, batch_size=batch_size, decoding=greedy_decoding(tokenizer, None), memory=PromptMemory()
        )
        settings = {"until": ["</s>"], "max_gen_toks": 6}
        requests = [
            Instance("generate_until", {}, (prompt, settings, {"visual": shown}), 0)
            for prompt, shown in zip(prompts, pictures, strict=True)
        ]
        return harness.generate_until(requests), harness.generations


def pictures(number):
    return [[torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(seed)) * 5] for seed in range(number)]


def test_picture_answers_equal_one_by_one_generation(llava):
    prompts = ["<image>long question?", "<image>short?", "<image><image><image><image>spelled out?"]
    answers, generations = show(llava, prompts, pictures(3), batch_size=2)
    tokenizer = byte_tokenizer()
    for prompt, (picture,), answer in zip(prompts, pictures(3), answers, strict=True):
        text = prompt.replace("<image>", "<image>" * (4 // prompt.count("<image>")))
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        out = llava.generate(input_ids=ids, pixel_values=picture[None], max_new_tokens=6, do_sample=False)
        assert tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True) == answer
    assert len(generations) == 3


def test_same_question_over_other_pictures_gets_other_answers(llava):
    answers, _ = show(llava, ["<image>what?"] * 8, pictures(8), batch_size=8)
    assert len(set(answers)) > 1


def test_wrong_number_of_image_tokens_is_refused(llava):
    with pytest.raises(RecipeError, match="found 0"):
        show(llava, ["what?"], pictures(1), batch_size=1)
    with pytest.raises(RecipeError, match="names no image token"):
        show(tiny_model(), ["<image>what?"], pictures(1), batch_size=1)
