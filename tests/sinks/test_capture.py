"""Captured rows against eager attention maps in float64, and what capture leaves behind."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
)

from mergelab.errors import DamagedFileError, PairingError
from mergelab.sinks import scores as scores_module
from mergelab.sinks.capture import ArchitectureError, capturing
from mergelab.sinks.metric import Rows
from mergelab.sinks.scores import score_rows
from tests.sinks.models import tiny

TOKENS = [1, 5, 9, 7, 3, 20, 21, 22, 30, 31, 4, 11, 40, 41]
READABLE = [
    "llama",
    "qwen2",
    "qwen3",
    "gemma3_text",
    "mistral",
    "phi3",
    "olmo2",
    "olmo3",
    "gpt2",
    "gpt_neox",
    "gemma2",
    "gpt_oss",
]
EAGER_ONLY = ["gemma2", "gpt_oss"]
WINDOWED = {"gemma3_text": [0, 2], "mistral": [0, 1, 2, 3], "olmo3": [0, 2], "gemma2": [0, 2]}


def eager_maps(model: PreTrainedModel, token_ids: list[list[int]], mask: list[list[int]] | None = None) -> Any:
    """Return the attention maps of plain eager attention, float64, one (batch, H, Q, K) a layer."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        output = model(
            input_ids=torch.tensor(token_ids),
            attention_mask=None if mask is None else torch.tensor(mask),
            output_attentions=True,
            use_cache=False,
        )
    return [attention.double() for attention in output.attentions]


def slow_row(probabilities: list[float], has_sink_logit: bool = False) -> tuple[float, float, int, float, int]:
    """Return log-odds, gap, argmax, mass of key 0 and number of keys from the probabilities of one row."""
    ranked = sorted(probabilities, reverse=True)
    others = math.fsum(ranked[1:])
    if has_sink_logit:  # the map lacks the column of the learned logit, whose mass is not the maximum's
        others = 1 - ranked[0]
    return (
        math.log(ranked[0] / others) if others > 0 else math.inf,
        math.log(ranked[0] / ranked[1]) if ranked[1] > 0 else math.inf,
        probabilities.index(ranked[0]),
        probabilities[0],
        sum(probability > 0 for probability in probabilities),
    )


def assert_rows_equal_map(rows: Rows, attention: torch.Tensor, has_sink_logit: bool = False) -> None:
    heads, queries, _ = attention.shape
    assert rows.log_odds.shape == (heads, queries)
    for head in range(heads):
        for query in range(queries):
            log_odds, gap, sink, first, visible = slow_row(attention[head, query].tolist(), has_sink_logit)
            assert rows.log_odds[head, query].item() == pytest.approx(log_odds, abs=1e-4)
            assert rows.gap[head, query].item() == pytest.approx(gap, abs=1e-4)
            assert rows.is_first[head, query].item() == (sink == 0)
            assert rows.first_mass[head, query].item() == pytest.approx(first, abs=1e-5)
            assert rows.num_visible[head, query].item() == visible


def capture_all(model: PreTrainedModel, token_ids: list[int]) -> dict[int, Rows]:
    with capturing(model, token_ids) as capture:
        return capture.rows(token_ids, capture.layers)


@pytest.mark.parametrize("block_entries", [10**6, 4 * 14 * 5], ids=["one block", "blocks of five"])
@pytest.mark.parametrize("family", READABLE)
def test_rows_equal_eager_maps(family: str, block_entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores_module, "BLOCK_ENTRIES", block_entries)
    has_sink_logit = family == "gpt_oss"
    model = tiny(family)
    if has_sink_logit:  # what is missing from a float32 map is lost in its rounding
        model.double().set_experts_implementation("eager")
    rows = capture_all(model, TOKENS)
    assert list(rows) == [0, 1, 2, 3]
    maps = eager_maps(model, [TOKENS])
    for layer, attention in enumerate(maps):
        assert_rows_equal_map(rows[layer], attention[0], has_sink_logit)
    before = torch.arange(1, len(TOKENS) + 1)
    windowed = [layer for layer in rows if bool((rows[layer].num_visible < before).any())]
    assert windowed == WINDOWED.get(family, [])
    # A wrong layer must be able to fail: the maps of two layers differ by far more than the tolerance.
    with pytest.raises(AssertionError):
        assert_rows_equal_map(rows[0], maps[1][0])


def test_rows_equal_those_of_a_right_padded_batch() -> None:
    model = tiny("llama")
    short = TOKENS[:6]
    batch, mask = [TOKENS, short + [0] * 8], [[1] * 14, [1] * 6 + [0] * 8]
    alone = [capture_all(model, TOKENS), capture_all(model, short)]
    maps = eager_maps(model, batch, mask)
    for number, length in enumerate((14, 6)):
        for layer, attention in enumerate(maps):
            assert_rows_equal_map(alone[number][layer], attention[number, :, :length, :length])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_queries_are_scored_in_float32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (4 * torch.randn(heads, 9, 8, generator=generator) for heads in (4, 2))
    query, key = query.to(dtype), key.to(dtype)
    rows = score_rows(query, key, None)
    assert rows.log_odds.dtype == torch.float32
    exact = score_rows(query.double(), key.double(), None)
    torch.testing.assert_close(rows.log_odds.double(), exact.log_odds, rtol=1e-5, atol=1e-4)
    rounded = (query @ key.repeat_interleave(2, 0).transpose(1, 2)).double()
    assert (rounded - query.double() @ key.double().repeat_interleave(2, 0).transpose(1, 2)).abs().max() > 1e-3


@pytest.mark.parametrize("family", READABLE)
def test_logits_during_capture_equal_plain_sdpa(family: str) -> None:
    model = tiny(family)
    before = model.config._attn_implementation
    assert before == ("eager" if family in EAGER_ONLY else "sdpa")
    logits: list[torch.Tensor] = []
    handle = model.register_forward_hook(lambda _module, _inputs, output: logits.append(output.logits))
    with torch.no_grad():
        model(
            input_ids=torch.tensor([TOKENS]),
            attention_mask=torch.ones(1, 14, dtype=torch.long),
            use_cache=False,
        )
    capture_all(model, TOKENS)
    handle.remove()
    assert model.config._attn_implementation == before
    assert logits[0].shape == logits[-1].shape
    assert torch.equal(logits[0], logits[-1])
    assert not logits[-1].requires_grad


def whole_llava() -> LlavaForConditionalGeneration:
    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
    )
    text = LlamaConfig(vocab_size=48, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4)
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text, image_token_id=47))


@pytest.mark.parametrize("fails", [False, True], ids=["clean exit", "error"])
def test_model_is_left_exactly_as_found(fails: bool) -> None:
    model = whole_llava()
    model.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})
    model.train()
    model.model.vision_tower.eval()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def state() -> list[object]:
        configs = [model.config, model.config.text_config, model.config.vision_config]
        configs += [module.config for module in model.modules() if hasattr(module, "config")]
        modes = [module.training for module in model.modules()]
        return [[config._attn_implementation for config in configs], modes]

    before = state()
    assert len(set(before[0])) > 1 and len(set(before[1])) == 2  # type: ignore[arg-type, call-overload]
    try:
        with capturing(model, TOKENS) as capture:
            assert capture.layers == (0, 1)
            capture.rows(TOKENS, capture.layers)
            assert state() != before
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert fails
    assert state() == before
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor any operation returns."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return result


def test_no_map_is_ever_made() -> None:
    model = tiny("llama", num_hidden_layers=2, max_position_embeddings=2048)
    token_ids = [1, *([7, 9, 11] * 600)]
    num_tokens = len(token_ids)
    with LargestTensor() as watch:
        rows = capture_all(model, token_ids)
    assert rows[1].log_odds.shape == (4, num_tokens)
    assert watch.largest <= scores_module.BLOCK_ENTRIES < num_tokens**2
    with LargestTensor() as watch_eager:
        eager_maps(model, [token_ids])
    assert watch_eager.largest >= 4 * num_tokens**2


def test_hybrid_model_lists_only_layers_with_softmax_attention() -> None:
    model = tiny(
        "qwen3_next",
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
    )
    with capturing(model, TOKENS) as capture:
        assert capture.layers == (1, 3)
        assert list(capture.rows(TOKENS, (3,))) == [3]


@pytest.mark.parametrize(
    ("family", "named"),
    [
        ("mamba", r"MambaForCausalLM \(mamba\).*no attention\."),
        ("bloom", r"BloomForCausalLM \(bloom\): not one layer called softmax attention"),
        ("doge", r"DogeForCausalLM.*its attention mask is torch.float32 and may change scores"),
        ("bert", r"BertLMHeadModel, BertSelfAttention: its attention sees later tokens"),
    ],
)
def test_unreadable_architectures_are_refused_by_name(family: str, named: str) -> None:
    model = tiny(family)
    before = model.config._attn_implementation
    with pytest.raises(ArchitectureError, match=named) as caught, capturing(model, TOKENS):
        pass
    assert isinstance(caught.value, PairingError)
    assert model.config._attn_implementation == before


def test_encoder_decoder_is_refused() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(T5Config(vocab_size=48, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    named = pytest.raises(ArchitectureError, match="T5ForConditionalGeneration is an encoder-decoder")
    with named, capturing(model, TOKENS):
        pass


@pytest.mark.parametrize("argument", ["s_aux", "softcap", "position_bias"])
def test_arguments_that_change_scores_are_refused(argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    attention = model.model.layers[2].self_attn
    original = attention.forward
    monkeypatch.setattr(attention, "forward", lambda *a, **k: original(*a, **k, **{argument: torch.ones(4)}))
    with pytest.raises(ArchitectureError, match=r"LlamaForCausalLM, LlamaAttention: .*(softmax|soft-capped|bias)"):
        capture_all(model, TOKENS)


def test_bidirectional_mask_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    attention = model.model.layers[0].self_attn
    original = attention.forward

    def see_everything(*args: Any, **kwargs: Any) -> Any:
        length = kwargs["hidden_states"].shape[1]
        return original(*args, **{**kwargs, "attention_mask": torch.ones(1, 1, length, length, dtype=torch.bool)})

    monkeypatch.setattr(attention, "forward", see_everything)
    with pytest.raises(ArchitectureError, match="its attention mask shows later tokens"):
        capture_all(model, TOKENS)


def test_looped_layer_is_refused() -> None:
    model = tiny("llama")
    model.model.layers[1] = model.model.layers[0]
    with pytest.raises(ArchitectureError, match="layer 0 computes attention twice in one pass"):
        capture_all(model, TOKENS)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_scores_that_are_not_finite_name_the_layer(value: float) -> None:
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[2].self_attn.k_proj.weight[0, 0] = value
    with pytest.raises(DamagedFileError, match="LlamaForCausalLM, layer 2: expected finite attention scores"):
        capture_all(model, TOKENS)
