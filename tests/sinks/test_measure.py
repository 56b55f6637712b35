"""The whole measurement on tiny models: record, template, layers, independence of prompts, refusals."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mergelab.errors import RecipeError
from mergelab.sinks.measure import measure_sink
from mergelab.sinks.prompts import Prompts, load_prompts
from tests.builders import WORDS, write_tokenizer
from tests.sinks.models import tiny
from tests.sinks.test_capture import eager_maps, slow_row

TEXTS = (
    "what is the colour of a cat ?",
    "the dog is blue : one two three . what is red",
    "green green answer three two one",
)
TEMPLATE = (
    "{% for message in messages %}<s> {{ message['role'] }} : {{ message['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}answer :{% endif %}"
)


def prompts_of(*texts: str) -> Prompts:
    return Prompts("here", texts, hashlib.sha256(repr(texts).encode()).hexdigest())


@pytest.fixture
def tokenizer(tmp_path: Path) -> PreTrainedTokenizerBase:
    write_tokenizer(tmp_path, WORDS)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    loaded.chat_template = TEMPLATE
    return loaded


def without_seconds(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != "seconds"}


def test_strength_equals_slow_median_of_eager_maps(tokenizer: PreTrainedTokenizerBase) -> None:
    model = tiny("qwen3")
    record = measure_sink(model, tokenizer, prompts_of(*TEXTS))
    inputs = [tokenizer(f"<s> user : {text} </s> answer :")["input_ids"] for text in TEXTS]
    assert record["token_counts"] == [len(token_ids) for token_ids in inputs]
    log_odds, on_first = [], []
    for token_ids in inputs:
        for attention in eager_maps(model, [token_ids])[2:]:
            for head in attention[0]:
                for row in head[1:]:
                    value, _, sink, _, _ = slow_row(row.tolist())
                    log_odds.append(value)
                    on_first.append(sink == 0)
    assert record["sink_strength"] == pytest.approx(np.median(log_odds), abs=1e-4)
    assert record["num_rows"] == len(log_odds) == 2 * 4 * sum(len(token_ids) - 1 for token_ids in inputs)
    assert record["position0_share"] == pytest.approx(np.mean(on_first))


def test_record_says_what_made_it_and_is_json(tokenizer: PreTrainedTokenizerBase) -> None:
    prompts = prompts_of(*TEXTS)
    record = measure_sink(tiny("llama").to(torch.bfloat16), tokenizer, prompts)
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert record["dtype"] == "bfloat16"
    assert record["prompts"] == {"name": "here", "sha256": prompts.sha256}
    assert record["chat_template_sha256"] == hashlib.sha256(TEMPLATE.encode()).hexdigest()
    assert record["enable_thinking"] is None
    assert record["add_generation_prompt"] is True
    assert record["num_prompts"] == 3
    assert (record["last_layers"], record["layers"], record["num_layers"]) == (2, [2, 3], 4)
    assert record["sink_strength_low"] <= record["sink_strength"] <= record["sink_strength_high"]
    assert record["seconds"] > 0
    assert list(record["per_layer"]) == ["2", "3"]
    assert np.shape(record["per_head"]) == (2, 4)


def test_same_input_gives_the_same_record(tokenizer: PreTrainedTokenizerBase) -> None:
    model = tiny("llama")
    first, second = (measure_sink(model, tokenizer, prompts_of(*TEXTS)) for _ in range(2))
    assert without_seconds(first) == without_seconds(second)


def test_a_prompt_does_not_depend_on_the_others(tokenizer: PreTrainedTokenizerBase) -> None:
    model = tiny("llama")
    together = measure_sink(model, tokenizer, prompts_of(*TEXTS))
    alone = [measure_sink(model, tokenizer, prompts_of(text)) for text in TEXTS]
    backwards = measure_sink(model, tokenizer, prompts_of(*TEXTS[::-1]))
    assert together["per_prompt"] == [record["sink_strength"] for record in alone]
    assert len(set(together["per_prompt"])) == 3
    assert backwards["sink_strength"] == together["sink_strength"]
    assert alone[0]["sink_strength_low"] is None


def test_without_template_the_plain_text_is_measured_and_marked(tokenizer: PreTrainedTokenizerBase) -> None:
    model = tiny("llama")
    with_template = measure_sink(model, tokenizer, prompts_of(*TEXTS))
    tokenizer.chat_template = None
    record = measure_sink(model, tokenizer, prompts_of(*TEXTS))
    assert record["chat_template_sha256"] is None
    assert record["add_generation_prompt"] is False
    assert record["token_counts"] == [len(tokenizer(text)["input_ids"]) for text in TEXTS]
    assert record["token_ids_sha256"] != with_template["token_ids_sha256"]


def test_thinking_is_switched_off_where_the_template_knows_it(tokenizer: PreTrainedTokenizerBase) -> None:
    switch = "{% if enable_thinking is defined and enable_thinking is false %} dog cat{% endif %}"
    model = tiny("llama")
    plain = measure_sink(model, tokenizer, prompts_of(*TEXTS))
    tokenizer.chat_template = TEMPLATE + switch
    record = measure_sink(model, tokenizer, prompts_of(*TEXTS))
    assert record["enable_thinking"] is False
    assert record["token_counts"] == [count + 2 for count in plain["token_counts"]]


def test_template_date_is_not_todays(tokenizer: PreTrainedTokenizerBase) -> None:
    dated = (
        "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
        "{% if date_string == '26 Jul 2024' %}dog {% endif %}"
    )
    model = tiny("llama")
    plain = measure_sink(model, tokenizer, prompts_of(*TEXTS))
    tokenizer.chat_template = dated + TEMPLATE
    record = measure_sink(model, tokenizer, prompts_of(*TEXTS))
    assert record["token_counts"] == [count + 1 for count in plain["token_counts"]]


@pytest.mark.parametrize(("num_layers", "expected"), [(1, [0]), (3, [2]), (19, range(10, 19)), (20, range(10, 20))])
def test_default_number_of_layers(tokenizer: PreTrainedTokenizerBase, num_layers: int, expected: list[int]) -> None:
    model = tiny("llama", num_hidden_layers=num_layers)
    assert measure_sink(model, tokenizer, prompts_of(*TEXTS))["layers"] == list(expected)


@pytest.mark.parametrize("last_layers", [0, -1, 5])
def test_impossible_number_of_layers_is_refused(tokenizer: PreTrainedTokenizerBase, last_layers: int) -> None:
    model = tiny("llama")
    with pytest.raises(RecipeError, match=rf"sink.last_layers: expected 1 to 4, .* found {last_layers}\."):
        measure_sink(model, tokenizer, prompts_of(*TEXTS), last_layers=last_layers)
    assert measure_sink(model, tokenizer, prompts_of(*TEXTS), last_layers=4)["layers"] == [0, 1, 2, 3]


def test_prompts_that_do_not_fit_are_all_named(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = None
    model = tiny("llama", max_position_embeddings=8)
    with pytest.raises(RecipeError) as caught:
        measure_sink(model, tokenizer, prompts_of("cat", "red blue", "dog", "cat " * 9))
    message = str(caught.value)
    assert "prompt 1 ('cat'): expected two tokens or more, found 1" in message
    assert "prompt 3 ('dog')" in message
    assert "prompt 2" not in message
    assert "9 tokens, the model has 8" in message


def test_builtin_prompts_run_through_any_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    record = measure_sink(tiny("llama"), tokenizer, load_prompts("builtin-v1"))
    assert record["num_prompts"] == 15
    assert record["prompts"]["name"] == "builtin-v1"
