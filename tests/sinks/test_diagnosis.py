"""A diagnosis of live models: equal to the plain measurement, on equal tokens, and refused where it means nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mergelab.errors import RecipeError
from mergelab.sinks.capture import ArchitectureError
from mergelab.sinks.diagnosis import SINGLE_NUMBERS, compare, displacement_record, read_model, sink_record
from mergelab.sinks.measure import encode_prompts, measure_sink
from tests.builders import WORDS, write_tokenizer
from tests.sinks.models import tiny
from tests.sinks.test_measure import TEMPLATE, TEXTS, prompts_of

PROMPTS = prompts_of(*TEXTS)


@pytest.fixture
def tokenizer(tmp_path: Path) -> PreTrainedTokenizerBase:
    write_tokenizer(tmp_path, WORDS)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    loaded.chat_template = TEMPLATE
    return loaded


def test_single_numbers_are_those_of_the_plain_measurement(tokenizer: PreTrainedTokenizerBase) -> None:
    model = tiny("gemma3_text")
    inputs = encode_prompts(tokenizer, PROMPTS)
    record = sink_record(read_model(model, PROMPTS, inputs), None)
    plain = measure_sink(model, tokenizer, PROMPTS)
    assert {name: record[name] for name in SINGLE_NUMBERS} == {name: plain[name] for name in SINGLE_NUMBERS}
    assert record["layers"] == plain["layers"] == [2, 3]
    everything = measure_sink(model, tokenizer, PROMPTS, last_layers=4)
    assert {layer: entry["sink_strength"] for layer, entry in record["per_layer"].items()} == everything["per_layer"]
    assert record["per_head"] == everything["per_head"]
    assert record["window_layers"] == [0, 2]


def test_a_model_compared_with_itself_moved_nothing(tokenizer: PreTrainedTokenizerBase) -> None:
    inputs = encode_prompts(tokenizer, PROMPTS)
    base = read_model(tiny("qwen3"), PROMPTS, inputs, keep_projections=True)
    tower, displacements = compare(tiny("qwen3"), PROMPTS, inputs, base)
    found = displacement_record(displacements, None)
    record = sink_record(base, None)
    assert found["b_gap"] == 0
    assert found["margin"] == pytest.approx(record["sink_strength"], abs=1e-5)
    assert found["same_sink_share"] == 1
    assert sink_record(tower, None) == record
    moved = displacement_record(compare(tiny("qwen3", seed=3), PROMPTS, inputs, base)[1], None)
    assert moved["b_gap"] > 1
    assert moved["lemma1"]["num_violations"] == 0


def test_other_layers_or_windows_are_refused_by_name(tokenizer: PreTrainedTokenizerBase) -> None:
    inputs = encode_prompts(tokenizer, PROMPTS)
    base = read_model(tiny("mistral"), PROMPTS, inputs, keep_projections=True)
    with pytest.raises(ArchitectureError, match=r"\[0, 1, 2, 3\] in base and \[0, 1, 2\] in the tower"):
        compare(tiny("mistral", num_hidden_layers=3), PROMPTS, inputs, base)
    with pytest.raises(ArchitectureError, match=r"layer 0: .*another window"):
        compare(tiny("mistral", sliding_window=4), PROMPTS, inputs, base)


def test_tokens_that_a_model_lacks_are_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    inputs = encode_prompts(tokenizer, PROMPTS)
    with pytest.raises(RecipeError, match="lacks tokens"):
        read_model(tiny("llama", vocab_size=10), PROMPTS, inputs)
