"""An engine over a real tiny model, one prompt at a time without padding: what vLLM does, in a few lines."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Sequence

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from mergelab.errors import MachineError
from mergelab.evals.engines import Completion, Content, EngineSetup, Stops, weights_content


class ModelEngine:
    """Answers with a copy of a model; the switches below make it wrong in the ways that engines can be wrong."""

    def __init__(self, model: PreTrainedModel, tokenizer, max_length: int | None = None) -> None:
        self.model = copy.deepcopy(model)
        self.tokenizer = tokenizer
        self.max_length = max_length or model.config.max_position_embeddings
        self.ignores_updates = False
        self.keeps_old_answers = False
        self.skips: tuple[str, ...] = ()
        self.hides_weights = False
        self.dies_after: int | None = None
        self.closed = False
        self.num_loads = 0
        self.prompts: list[list[int]] = []
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stops: Stops) -> list[Completion]:
        return [self._continue(list(ids), max_new_tokens, stops) for ids in prompts]

    def _continue(self, ids: list[int], max_new_tokens: int, stops: Stops) -> Completion:
        self._live()
        self.prompts.append(ids)
        written = self._known.get(tuple(ids)) if self.keeps_old_answers else None
        if written is None or len(written) < max_new_tokens:
            self.model.generation_config = GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False)
            with torch.no_grad():
                sequences = self.model.generate(input_ids=torch.tensor([ids]))
            written = self._known[tuple(ids)] = tuple(sequences[0, len(ids) :].tolist())
        for length in range(1, max_new_tokens + 1):
            new = written[:length]
            if new[-1] in stops.ids:
                return Completion(new, "end")
            if any(stop in self.tokenizer.decode(new) for stop in stops.strings):
                return Completion(new, "stop")
        return Completion(written[:max_new_tokens], "length")

    def score(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[float, bool]]:
        self._live()
        scores = []
        for context, continuation in pairs:
            ids = [*context, *continuation][-(self.max_length + 1) :]
            logprobs = torch.log_softmax(self._logits(ids[:-1]), dim=-1)[-len(continuation) :]
            chosen = torch.tensor(list(continuation))
            greedy = bool((logprobs.argmax(-1) == chosen).all())
            scores.append((float(logprobs.gather(1, chosen[:, None]).sum()), greedy))
        return scores

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.num_loads += 1
        if self.ignores_updates:
            return
        own = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, tensor in weights:
                if not name.endswith(self.skips or ("-",)):
                    own[name].copy_(tensor)

    def content(self) -> Content | None:
        return None if self.hides_weights else weights_content(p.data for p in self.model.parameters())

    def close(self) -> None:
        self.closed = True

    def _logits(self, ids: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return self.model(input_ids=torch.tensor([ids])).logits[0]

    def _live(self) -> None:
        if self.dies_after is not None:
            self.dies_after -= 1
            if self.dies_after < 0:
                raise MachineError("the engine failed while it answered (out of memory)")


def open_stub(setup: EngineSetup) -> ModelEngine:
    """For ``EngineProcess``: the engine of a folder."""
    sys.stdout.write("an engine that talks on stdout\n")
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(setup.folder, dtype=getattr(torch, setup.dtype)).eval()
    return ModelEngine(model, AutoTokenizer.from_pretrained(setup.tokenizer), setup.max_length)
