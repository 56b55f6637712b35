"""lm-eval's ``hf-multimodal`` over a live vlm and its processor: real pictures, generation only."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.models.hf_vlms import HFMultimodalLM
from transformers import PreTrainedModel

from mergelab.errors import RecipeError
from mergelab.evals.harness import PictureHarness, image_token_id
from mergelab.evals.quiet import replaced


class ProcessorHarness(PictureHarness, HFMultimodalLM):
    """``PictureHarness`` for documents that hold ``Picture``: prompts and pictures go through the processor.

    Chat content, image placeholders and the processor call are ``HFMultimodalLM``'s; batches, decoding and the note of
    how each answer ended are ``PictureHarness``'s. Pictures are decoded batch by batch.

    Args:
        model: The live vlm, on its device.
        processor: A processor that may be changed; its tokenizer gets a pad token where it has none.
        settings: As for ``TextHarness``.
    """

    def __init__(self, model: PreTrainedModel, processor: Any, **settings: Any) -> None:
        image_token_id(model)  # upstream only asserts that there is one
        super().__init__(model, processor, **settings)

    def _create_tokenizer(self, pretrained: Any, tokenizer: Any, *_: Any, **__: Any) -> None:
        # Upstream's takes a processor and forgets to keep it.
        self.processor, self.tokenizer = tokenizer, tokenizer.tokenizer

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a conversation through the processor's template, with the thinking switch where it has one."""
        self.chat_applied = True  # also for a prompt that was rendered for an earlier model
        render = functools.partial(self.processor.apply_chat_template, **self.chat_template_args)
        with replaced(self.processor, "apply_chat_template", render):
            return super().apply_chat_template(chat_history, add_generation_prompt)

    def _encode_prompt(self, request: Any) -> list[int]:
        ids: list[int] = self.tok_encode(request.args[0])
        return ids

    def _inputs(self, requests: Sequence[Any], encoded: list[list[int]]) -> dict[str, torch.Tensor]:
        pictures = [[picture.open() for picture in request.args[2]["visual"]] for request in requests]
        inputs = dict(self.tok_batch_multimodal_encode([request.args[0] for request in requests], pictures))
        length, budget = inputs["input_ids"].shape[1], requests[0].args[1]["max_gen_toks"]
        if length + budget > self.max_length:
            # Cutting the prompt, as lm-eval does, would cut a picture in two.
            raise RecipeError(
                f"picture prompt {requests[0].args[0][:60]!r}: with its pictures it may take {length} tokens, which "
                f"with {budget} new tokens do not fit the model's context of {self.max_length}. Lower "
                "evals.max_gen_toks, or the processor's picture size in a copy of the vlm."
            )
        return inputs
