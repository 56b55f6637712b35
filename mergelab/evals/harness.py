"""lm-eval's model object over a live model: text through ``HFLM`` itself, pictures through a small subclass.

Both decode with one explicit ``GenerationConfig`` and note for every request how many tokens came and whether
the answer ended by itself, which lm-eval's output no longer shows. The evaluation loop stays lm-eval's.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lm_eval.models import huggingface
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, postprocess_generated_text
from transformers import GenerationConfig, PreTrainedModel

from mergelab.errors import RecipeError
from mergelab.evals.prompts import PromptMemory
from mergelab.evals.quiet import replaced
from mergelab.evals.stopping import StopStrings


@dataclass(frozen=True)
class Generation:
    """How one answer ended: its tokens without the end token, with a stop string; and whether it ended."""

    num_tokens: int
    ended: bool


def greedy_decoding(tokenizer: Any, given: GenerationConfig | None) -> GenerationConfig:
    """Return the one decoding of a run: greedy, no penalties, stop ids of ``given`` and of the tokenizer.

    Everything else that ``given`` holds is left out on purpose: a stored penalty moves strict scores.
    """
    stored = given.eos_token_id if given is not None else None
    stops = stored if isinstance(stored, list) else [stored]
    ids = sorted({int(stop) for stop in [*stops, tokenizer.eos_token_id] if stop is not None})
    return GenerationConfig(
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        eos_token_id=ids,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        use_cache=True,
    )


class TextHarness(HFLM):
    """``HFLM`` over a live text model.

    Args:
        model: The live model, on its device; left untied if it is untied.
        tokenizer: A tokenizer that may be changed (a pad token is chosen where none is).
        batch_size: Rows a batch.
        decoding: From ``greedy_decoding``.
        memory: Prompts that this tokenizer and template have seen before, kept by the caller between calls.
        enable_thinking: Passed to a template that knows the switch; None passes nothing.

    Attributes:
        generations: One entry per generation request, in request order.
        num_cut_prompts: Prompts that lost their beginning because the context is too short.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        *,
        batch_size: int,
        decoding: GenerationConfig,
        memory: PromptMemory,
        enable_thinking: bool | None = None,
    ) -> None:
        # HFLM ties on construction, which would overwrite an untied head and leave callers with stale
        # tensors.
        with replaced(model, "tie_weights", lambda *_, **__: None):
            super().__init__(
                pretrained=model,
                backend="causal",
                tokenizer=tokenizer,
                batch_size=batch_size,
                enable_thinking=enable_thinking,
            )
        self.decoding = decoding
        self.generations: list[Generation] = []
        self.num_cut_prompts = 0
        self._memory = memory
        self._prompts: list[str] = []
        self._ended: dict[str, Generation] = {}

    def get_model_info(self) -> dict[str, Any]:
        """Return nothing: our records say what model this is, and lm-eval would ask the hub for a hash."""
        return {}

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a conversation, once per text: the points of a sweep ask the same questions."""
        return self._memory.render(chat_history, add_generation_prompt, super().apply_chat_template)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Answer the requests with ``HFLM``'s loop, then file how each one ended."""
        self._ended = {}
        # HFLM encodes every prompt to sort them by length, one by one.
        with replaced(self, "tok_encode", self._encode_once):
            texts: list[str] = super().generate_until(requests, disable_tqdm=disable_tqdm)
        self.generations.extend(self._ended[request.args[0]] for request in requests)
        return texts

    def _encode_once(self, prompt: str) -> array[int]:
        encoded = self._memory.encoded
        if prompt not in encoded:
            encoded[prompt] = array("i", super().tok_encode(prompt))
        return encoded[prompt]

    def tok_batch_encode(
        self,
        strings: Sequence[str],
        padding_side: str = "left",
        left_truncate_len: int | None = None,
        truncation: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode as ``HFLM`` does; remember the prompts of the batch and count those that are cut."""
        self._prompts = list(strings)
        ids, mask = super().tok_batch_encode(list(strings), padding_side=padding_side, truncation=truncation)
        if left_truncate_len:
            self.num_cut_prompts += int((mask.sum(dim=1) > left_truncate_len).sum())
            ids, mask = ids[:, -left_truncate_len:], mask[:, -left_truncate_len:]
        return ids, mask

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> torch.Tensor:
        sequences, generations = self.decode(
            context, generation_kwargs["attention_mask"], max_length - context.shape[1], stop
        )
        self._ended.update(zip(self._prompts, generations, strict=True))
        return sequences

    def decode(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        max_new_tokens: int,
        stop: Sequence[str],
        **model_inputs: torch.Tensor,
    ) -> tuple[torch.Tensor, list[Generation]]:
        """Decode a left-padded batch greedily.

        Args:
            ids: Prompt ids, int64 [rows, length].
            mask: 1 where ``ids`` is a real token, same shape.
            max_new_tokens: The budget.
            stop: Stop strings; the end token's own text may be among them and is left to its id.
            model_inputs: Further inputs of the model, such as ``pixel_values``.

        Returns:
            Prompt and answer ids, int64 [rows, length + new], and how each row ended.
        """
        config = copy.deepcopy(self.decoding)
        config.max_new_tokens = max_new_tokens
        end_ids = set(config.eos_token_id)
        end_texts = {self.tok_decode([end], skip_special_tokens=False) for end in end_ids}
        stops = [text for text in stop if text and text not in end_texts]
        criterion = StopStrings(self.tokenizer, stops, ids.shape[1], len(ids)) if stops else None
        # generate() fills gaps of the given config from the model's stored one: hold that out as well.
        # inference_mode costs less a step than generate()'s own no_grad, and changes no number.
        with torch.inference_mode(), replaced(self.model, "generation_config", config):
            sequences: torch.Tensor = self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                generation_config=config,
                stopping_criteria=[criterion] if criterion else None,
                **model_inputs,
            )
        stopped_at = criterion.stopped_at if criterion else [None] * len(ids)
        answers = sequences[:, ids.shape[1] :].tolist()
        return sequences, [_ending(answer, end_ids, at) for answer, at in zip(answers, stopped_at, strict=True)]


def _ending(answer: Sequence[int], end_ids: set[int], stopped_at: int | None) -> Generation:
    """Return how a row ended: at its end token, at a stop string, or not at all within the budget."""
    end = next((place for place, token in enumerate(answer) if token in end_ids), None)
    places = [place for place in (end, stopped_at) if place is not None]
    return Generation(min(places), True) if places else Generation(len(answer), False)


def image_token_id(model: PreTrainedModel) -> int:
    """Return the token that stands for a picture in prompts.

    Raises:
        RecipeError: The model's config names none.
    """
    for name in ("image_token_id", "image_token_index"):
        found = getattr(model.config, name, None)
        if found is not None:
            return int(found)
    raise RecipeError(f"{type(model).__name__}: its config names no image token; it cannot be shown pictures.")


class PictureHarness(TextHarness):
    """``TextHarness`` over a vision-language model, for tasks whose documents carry pixels.

    A request holds a prompt with one image token a picture (or already one a feature) and
    ``{"visual": [picture, ...]}``, each picture an array of normalised floats [channels, height, width].
    """

    MULTIMODAL = True

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Answer picture requests: sorted by length, left-padded, in batches of the fixed size."""
        encoded = [self._encode_prompt(request) for request in requests]
        order = sorted(range(len(requests)), key=lambda number: (-len(encoded[number]), number))
        texts: dict[int, str] = {}
        generations: dict[int, Generation] = {}
        bar = huggingface.tqdm(total=len(requests), disable=disable_tqdm)
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            settings = requests[batch[0]].args[1]
            stop = handle_stop_sequences(list(settings["until"]), eos=self.tok_decode([self.eot_token_id], False))
            inputs = self._inputs([requests[number] for number in batch], [encoded[number] for number in batch])
            ids, mask = inputs.pop("input_ids"), inputs.pop("attention_mask")
            sequences, ended = self.decode(ids, mask, settings["max_gen_toks"], stop, **inputs)
            for number, row, generation in zip(batch, sequences[:, ids.shape[1] :].tolist(), ended, strict=True):
                texts[number] = postprocess_generated_text(self.tok_decode(row), stop, None)
                generations[number] = generation
            bar.update(len(batch))
        self.generations.extend(generations[number] for number in range(len(requests)))
        return [texts[number] for number in range(len(requests))]

    def _encode_prompt(self, request: Any) -> list[int]:
        """Return prompt ids with one image token a picture feature."""
        prompt, num_pictures = request.args[0], len(request.args[2]["visual"])
        config = self.model.config
        image_id = image_token_id(self.model)
        ids = self.tok_encode(prompt)
        features = getattr(config, "image_seq_length", 1)
        found = ids.count(image_id)
        if found == num_pictures * features:
            return ids
        if found != num_pictures:
            raise RecipeError(
                f"picture prompt {prompt[:60]!r}: expected one image token (id {image_id}) for each of its "
                f"{num_pictures} pictures, found {found}. The tokenizer and the model do not belong together."
            )
        return [token for one in ids for token in ([one] * features if one == image_id else [one])]

    def _inputs(self, requests: Sequence[Any], encoded: list[list[int]]) -> dict[str, torch.Tensor]:
        """Return what the model is given for a batch: ``input_ids``, ``attention_mask`` and the pictures."""
        ids, mask = self._pad(encoded)
        pixels = [picture for request in requests for picture in request.args[2]["visual"]]
        return {"input_ids": ids, "attention_mask": mask, "pixel_values": self._pixels(pixels)}

    def _pad(self, rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ids and mask of the rows, padded on the left, on the model's device."""
        width = max(len(row) for row in rows)
        ids = [[self.tokenizer.pad_token_id] * (width - len(row)) + row for row in rows]
        mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
        return torch.tensor(ids, device=self.device), torch.tensor(mask, device=self.device)

    def _pixels(self, pictures: list[Any]) -> torch.Tensor:
        """Return the pictures as one tensor [pictures, channels, height, width] in the model's dtype."""
        stacked = torch.from_numpy(np.stack([np.asarray(picture, dtype=np.float32) for picture in pictures]))
        return stacked.to(device=self.device, dtype=self.model.dtype)
