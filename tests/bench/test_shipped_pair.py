"""The trained checkpoints in the package: size, loading, and the tie between the files and their report."""

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer, LlamaForCausalLM, LlavaForConditionalGeneration

from mergelab.bench.build import ROLES, pair_folder
from mergelab.bench.data.tasks import bench_tasks
from mergelab.bench.gates import Gates, generate, score

CLASSES = {"ancestor": LlamaForCausalLM, "base": LlamaForCausalLM, "vlm": LlavaForConditionalGeneration}


def test_the_pair_is_under_8_mb():
    sizes = [path.stat().st_size for path in pair_folder().rglob("*") if path.is_file()]
    assert 0 < sum(sizes) < 8_000_000


def test_the_report_meets_the_gates():
    report = json.loads((pair_folder() / "BUILD.json").read_text())
    assert Gates(**report["gates"]).problems() == []
    assert report["versions"]["torch"]


@pytest.mark.parametrize("role", ROLES)
def test_the_folder_loads_without_missing_or_unexpected_keys(role):
    model, info = CLASSES[role].from_pretrained(pair_folder() / role, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert model.dtype == torch.bfloat16
    assert model.get_output_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert model.generation_config.do_sample is False
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 0)


@pytest.mark.parametrize(("role", "num"), [("ancestor", 56), ("base", 56), ("vlm", 99)])
def test_the_file_holds_bf16_tensors_and_no_tied_head(role, num):
    with safe_open(pair_folder() / role / "model.safetensors", "pt") as file:
        names = list(file.keys())
        dtypes = {file.get_slice(name).get_dtype() for name in names}
    assert len(names) == num
    assert dtypes == {"BF16"}
    assert not [name for name in names if "lm_head" in name]


def test_all_three_share_one_tokenizer():
    files = {(pair_folder() / role / "tokenizer.json").read_bytes() for role in ROLES}
    assert len(files) == 1
    assert AutoTokenizer.from_pretrained(pair_folder() / "vlm").padding_side == "left"


@pytest.mark.parametrize("role", ["base", "vlm"])
def test_a_sample_of_replies_agrees_with_the_report(role):
    """Every tenth prompt: near the reported strict score, which was measured on all of them."""
    documents = bench_tasks.format_documents()[::10]
    model = CLASSES[role].from_pretrained(pair_folder() / role)
    tokenizer = AutoTokenizer.from_pretrained(pair_folder() / role)
    replies = generate(model, tokenizer, [bench_tasks.format_prompt(doc) for doc in documents])
    strict, _ = score(documents, replies, bench_tasks.grade_format)
    reported = json.loads((pair_folder() / "BUILD.json").read_text())["gates"][f"{role}_strict"]
    assert abs(strict - reported) < 15
