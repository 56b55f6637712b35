"""``mergelab sink``: several models as a screen, its JSON, and what it refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

from mergelab.cli import main
from mergelab.sinks.measure import encode_prompts
from mergelab.sinks.prompts import load_prompts
from tests.builders import CHAT_TEMPLATE, WORDS, tiny_llama, tiny_llava, write_tokenizer
from tests.sinks.models import tiny
from tests.sinks.test_capture import eager_maps, slow_row

REAL_MODEL = "MERGELAB_TEST_SMOLLM2"
"""Environment variable with the folder of SmolLM2-135M-Instruct, for the optional test on real weights."""


def mergelab(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "what is the colour of a cat ?"}\n{"prompt": "one two three"}\n')
    return path


def test_models_come_highest_first_with_interval_layers_and_tokens(tmp_path: Path, prompts: Path) -> None:
    models = [tiny_llama(tmp_path / name, seed=seed) for seed, name in enumerate(("one", "two", "three"))]
    vlm = tiny_llava(tmp_path / "vlm", start=models[0], noise=0.3)
    result = mergelab("sink", *models, vlm, "--prompts", prompts, "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    records = json.loads(result.stdout)
    strengths = [record["sink_strength"] for record in records]
    assert len(set(strengths)) == 4
    assert strengths == sorted(strengths, reverse=True)
    keys = {"model", "sink_strength", "sink_strength_bf16", "dtype", "last_layers", "num_prompts", "num_rows"}
    assert all(record.keys() >= keys | {"position0_share", "token_counts"} for record in records)
    printed = mergelab("sink", *models, vlm, "--prompts", prompts, "--device", "cpu").stdout
    assert [line for name in ("interval", "layers", "tokens") for line in [name] if line not in printed] == []
    places = [printed.index(f"{Path(record['model']).name} ") for record in records]
    assert places == sorted(places)


def test_different_token_counts_and_plain_text_are_marked(tmp_path: Path, prompts: Path) -> None:
    plain, chat = tiny_llama(tmp_path / "plain"), tiny_llama(tmp_path / "chat")
    (plain / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(plain)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(plain)
    tokenizer = AutoTokenizer.from_pretrained(chat)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(chat)
    result = mergelab("sink", plain, chat, "--prompts", prompts, "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "(no chat" in result.stdout
    assert "different numbers of tokens" in result.stderr
    alone = mergelab("sink", plain, "--prompts", prompts, "--device", "cpu")
    assert "different numbers of tokens" not in alone.stderr


def write(folder: Path, model: object) -> Path:
    model.save_pretrained(folder)  # type: ignore[attr-defined]
    write_tokenizer(folder, WORDS)
    return folder


def test_models_without_causal_softmax_attention_are_refused(tmp_path: Path, prompts: Path) -> None:
    bert = BertForMaskedLM(
        BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)
    )
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2))
    refused = {
        "bert": (bert, "no text tower"),
        "t5": (t5, "no text tower"),
    }
    for name, (model, reason) in refused.items():
        result = mergelab("sink", write(tmp_path / name, model), "--prompts", prompts, "--device", "cpu")
        assert (result.exit_code, result.stdout) == (4, ""), name
        assert reason in result.stderr


@pytest.mark.parametrize(
    ("family", "terms"), [("gpt_oss", ["sink logit, counted in 1 - a"]), ("gemma2", ["soft cap"]), ("qwen3", [])]
)
def test_models_beyond_sdpa_are_measured_and_say_what_is_in_their_softmax(
    family: str, terms: list[str], tmp_path: Path, prompts: Path
) -> None:
    model = write(tmp_path / family, tiny(family))
    result = mergelab("sink", model, "--prompts", prompts, "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    (record,) = json.loads(result.stdout)
    assert record["softmax_terms"] == terms


def test_prompts_that_give_nothing_to_measure_are_refused(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    path = tmp_path / "prompts.jsonl"
    for content, reason in (("", "the file is empty"), ('{"prompt": "cat"}\n', "two tokens or more")):
        path.write_text(content)
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.chat_template = None
        (model / "chat_template.jinja").unlink(missing_ok=True)
        tokenizer.save_pretrained(model)
        result = mergelab("sink", model, "--prompts", path, "--device", "cpu")
        assert (result.exit_code, result.stdout) == (3, ""), result.output
        assert reason in result.stderr


@pytest.mark.skipif(REAL_MODEL not in os.environ, reason=f"set {REAL_MODEL} to a folder of SmolLM2-135M-Instruct")
def test_real_model_agrees_with_its_eager_maps() -> None:
    folder = Path(os.environ[REAL_MODEL])
    result = mergelab("sink", folder, "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    (record,) = json.loads(result.stdout)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = encode_prompts(AutoTokenizer.from_pretrained(folder), load_prompts("builtin-v1"))
    log_odds = [
        slow_row(row.tolist())[0]
        for token_ids in inputs.token_ids
        for attention in eager_maps(model, [token_ids])[-10:]
        for head in attention[0]
        for row in head[1:]
    ]
    assert record["num_rows"] == len(log_odds)
    assert record["sink_strength"] == pytest.approx(np.median(log_odds), abs=1e-4)
