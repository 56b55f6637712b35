"""A model that says what it is told through the real generation loop; a tokenizer that spells anything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_outputs import CausalLMOutputWithPast

SPECIAL = ("<pad>", "<s>", "</s>", "<image>", "<|user|>", "<|bot|>")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|user|>' if m['role'] == 'user' else '<|bot|>' }}"
    "{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<|bot|>{% endif %}"
)
NO_END = "\N{NO ENTRY}"
"""At the end of a scripted answer: the model does not stop there but fills its budget with blanks."""


def byte_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token a byte, plus the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<image>", "<|user|>", "<|bot|>"],
        chat_template=template,
        padding_side="right",
    )


def tiny_config(**settings: Any) -> LlamaConfig:
    return LlamaConfig(
        **{
            "vocab_size": 262,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **settings,
        }
    )


def tiny_model(seed: int = 0, **settings: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(tiny_config(**settings)).eval()


class ScriptedModel(LlamaForCausalLM):
    """Answers a prompt with the script of the longest key that occurs in it, token by token."""

    def __init__(self, script: Mapping[str, str], **settings: Any) -> None:
        super().__init__(tiny_config(**settings))
        self.tokenizer = byte_tokenizer()
        self.script = dict(script)
        self.lines: list[list[int]] = []
        self.step = 0
        self.num_forwards = 0
        self.eval()

    def _line(self, ids: list[int]) -> list[int]:
        prompt = self.tokenizer.decode(ids)
        key = max((key for key in self.script if key in prompt), key=len)
        answer = self.script[key]
        if answer.endswith(NO_END):
            return self.tokenizer.encode(answer.removesuffix(NO_END)) + self.tokenizer.encode(" ") * 4096
        return [*self.tokenizer.encode(answer), 2]

    def forward(self, input_ids: torch.Tensor, **_: Any) -> CausalLMOutputWithPast:  # type: ignore[override]
        if input_ids.shape[1] > 1:
            self.lines, self.step = [self._line(row) for row in input_ids.tolist()], 0
        self.num_forwards += 1
        logits = torch.zeros(len(input_ids), input_ids.shape[1], 262)
        for row, line in enumerate(self.lines):
            logits[row, -1, line[self.step] if self.step < len(line) else 0] = 1.0
        self.step += 1
        return CausalLMOutputWithPast(logits=logits, past_key_values=None)


def write_jsonl(path: Path, documents: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding="utf-8")
    return path


def gsm8k(*pairs: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"question": question, "answer": f"Think. #### {answer}"} for question, answer in pairs]
