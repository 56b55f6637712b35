"""lm-eval's model object over an engine: the same prompts, budgets, stop strings and endings as over a live model.

The engine gets token ids and gives token ids back; text is made here, by the tokenizer and the rules that ``HFLM``
uses, so that a backend cannot change what is graded other than by the tokens it chose.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import jinja2
from lm_eval.api.model import TemplateLM
from lm_eval.models import huggingface
from lm_eval.models.utils import handle_stop_sequences, has_bos_prefix, postprocess_generated_text
from transformers import GenerationConfig

from mergelab.errors import MergelabError
from mergelab.evals.engines import Completion, Engine, Stops
from mergelab.evals.harness import Generation
from mergelab.evals.prompts import PromptMemory


class EngineHarness(TemplateLM):
    """Asks an engine for text or log-likelihoods.

    Args:
        engine: Holds the weights to be graded.
        tokenizer: The one that text is scored with.
        decoding: From ``greedy_decoding``: where the stop ids come from.
        memory: Prompts that this tokenizer and template have seen before, kept by the caller between calls.
        enable_thinking: Passed to a template that knows the switch; None passes nothing.

    Attributes:
        generations: One entry per generation request, in request order.
        num_cut_prompts: Prompts that lost their beginning because the context is too short.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        *,
        decoding: GenerationConfig,
        memory: PromptMemory,
        enable_thinking: bool | None = None,
    ) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self.decoding = decoding
        self.generations: list[Generation] = []
        self.num_cut_prompts = 0
        self.max_length = engine.max_length
        self._engine = engine
        self._memory = memory
        self._template_settings = {} if enable_thinking is None else {"enable_thinking": enable_thinking}

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's end token."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a continuation without a context."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name, as lm-eval writes it."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """Return nothing: our records say what model this is."""
        return {}

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a conversation, once per text."""
        return self._memory.render(chat_history, add_generation_prompt, self._render_with_or_without_system)

    def _render_with_or_without_system(self, chat_history: list[dict[str, str]], add_generation_prompt: bool) -> str:
        try:
            return self._render(chat_history, add_generation_prompt)
        except jinja2.exceptions.TemplateError:
            without = [turn for turn in chat_history if turn["role"] != "system"]
            return self._render(without, add_generation_prompt)

    def _render(self, chat_history: list[dict[str, str]], add_generation_prompt: bool) -> str:
        text = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **self._template_settings,
        )
        return str(text)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Encode for log-likelihoods; a text that brings its begin token along gets no second one."""
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id)):
            add_special_tokens = False
        given = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **given))

    def _encode_prompt(self, prompt: str) -> list[int]:
        """Encode for generation: ``HFLM`` looks at the begin token alone there, not at what stands in for it."""
        given = {"add_special_tokens": False} if has_bos_prefix(prompt, self.tokenizer.bos_token) else {}
        return list(self.tokenizer(prompt, **given).input_ids)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Answer the requests, all of equal settings at once: the engine makes its own batches."""
        groups: dict[str, list[int]] = defaultdict(list)
        for number, request in enumerate(requests):
            groups[json.dumps(request.args[1], sort_keys=True)].append(number)
        bar = huggingface.tqdm(total=len(requests), disable=disable_tqdm)
        end_text = self.tokenizer.decode(self.eot_token_id, skip_special_tokens=False)
        texts: dict[int, str] = {}
        endings: dict[int, Generation] = {}
        for numbers in groups.values():
            settings = requests[numbers[0]].args[1]
            until = handle_stop_sequences(list(settings["until"]), eos=end_text)
            completions = self._generate([requests[number].args[0] for number in numbers], settings, until)
            for number, one in zip(numbers, completions, strict=True):
                text = self.tokenizer.decode(one.token_ids, skip_special_tokens=True)
                texts[number] = postprocess_generated_text(text, until, None)
                endings[number] = Generation(one.num_tokens, one.reason != "length")
            bar.update(len(numbers))
        bar.close()
        self.generations.extend(endings[number] for number in range(len(requests)))
        return [texts[number] for number in range(len(requests))]

    def _generate(self, prompts: list[str], settings: dict[str, Any], until: list[str]) -> list[Completion]:
        budget = int(settings["max_gen_toks"])
        room = self.max_length - budget
        encoded = [self._encode_prompt(prompt) for prompt in prompts]
        self.num_cut_prompts += sum(len(ids) > room for ids in encoded)
        ids = tuple(self.decoding.eos_token_id)
        end_texts = {self.tokenizer.decode([end], skip_special_tokens=False) for end in ids}
        stops = Stops(ids, tuple(text for text in until if text and text not in end_texts))
        completions = self._engine.generate([one[-room:] for one in encoded], budget, stops)
        if len(completions) != len(prompts):
            raise MergelabError(f"the engine gave {len(completions)} answers to {len(prompts)} prompts.")
        return completions

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        bar = huggingface.tqdm(total=len(requests), disable=disable_tqdm)
        scores = self._engine.score([(context, continuation) for _, context, continuation in requests])
        if len(scores) != len(requests):
            raise MergelabError(f"the engine gave {len(scores)} scores for {len(requests)} requests.")
        bar.update(len(requests))
        bar.close()
        return scores

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Refuse: no known task asks for the likelihood of whole texts."""
        raise NotImplementedError("no task of mergelab asks for rolling log-likelihoods")
