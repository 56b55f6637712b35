"""What a full-size build must reach, measured by real greedy generation on the shipped tasks' documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoTokenizer,
    LlamaForCausalLM,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from mergelab.bench.data.tasks import bench_tasks
from mergelab.bench.folders import no_bars

BATCH = 128
MAX_NEW_TOKENS = 24
LOWEST_BASE_STRICT = 90.0
LOWEST_STRICT_LOSS = 20.0
LOWEST_PICTURES = 70.0


@dataclass(frozen=True)
class Gates:
    """Scores of a finished pair in points, 0 to 100, over all documents of the two tasks.

    ``vlm_*`` text scores are those of the language tower through the whole vlm.
    """

    base_strict: float
    base_flexible: float
    vlm_strict: float
    vlm_flexible: float
    image_strict: float
    image_flexible: float

    def problems(self) -> list[str]:
        """Return one sentence for every bound that is not met."""
        strict_loss = self.base_strict - self.vlm_strict
        flexible_loss = self.base_flexible - self.vlm_flexible
        checks = (
            (
                self.base_strict >= LOWEST_BASE_STRICT,
                f"base strict {self.base_strict:.1f}, expected at least {LOWEST_BASE_STRICT:.0f}",
            ),
            (
                strict_loss >= LOWEST_STRICT_LOSS,
                f"vlm strict {self.vlm_strict:.1f} is {strict_loss:.1f} below base, "
                f"expected at least {LOWEST_STRICT_LOSS:.0f}",
            ),
            (
                flexible_loss < strict_loss,
                f"flexible loss {flexible_loss:.1f}, expected less than the strict loss {strict_loss:.1f}",
            ),
            (
                self.image_flexible >= LOWEST_PICTURES,
                f"pictures {self.image_flexible:.1f}, expected at least {LOWEST_PICTURES:.0f}",
            ),
        )
        return [message for is_met, message in checks if not is_met]


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    pictures: Sequence[Tensor] = (),
) -> list[str]:
    """Return the greedy replies to ``prompts``, in their order, at most 24 new tokens each.

    Args:
        model: A text model, or a LLaVA; in evaluation mode afterwards.
        tokenizer: Its tokenizer, with padding on the left and a chat template.
        prompts: The user's turns; picture prompts hold their image tokens.
        pictures: One float tensor (3, height, width) per prompt, or none at all.
    """
    model.eval()
    speaker: Any = model
    texts = [
        str(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
        )
        for prompt in prompts
    ]
    order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
    replies = [""] * len(texts)
    for start in range(0, len(order), BATCH):
        chosen = order[start : start + BATCH]
        inputs = tokenizer(
            [texts[index] for index in chosen], return_tensors="pt", padding=True, add_special_tokens=False
        )
        ids, mask = (inputs[name].to(model.device) for name in ("input_ids", "attention_mask"))
        extra = {"pixel_values": torch.stack([pictures[index] for index in chosen])} if pictures else {}
        extra = {name: value.to(model.device, model.dtype) for name, value in extra.items()}
        with torch.inference_mode():
            produced = speaker.generate(
                input_ids=ids,
                attention_mask=mask,
                max_new_tokens=MAX_NEW_TOKENS,
                do_sample=False,
                **extra,
            )
        new = produced[:, ids.shape[1] :]
        for index, reply in zip(chosen, tokenizer.batch_decode(new, skip_special_tokens=True), strict=True):
            replies[index] = reply
    return replies


def score(
    documents: Sequence[dict[str, Any]],
    replies: Sequence[str],
    grade: Callable[[dict[str, Any], Sequence[str]], dict[str, int]],
) -> tuple[float, float]:
    """Return (strict, flexible) in points over all documents."""
    grades = [grade(doc, [reply]) for doc, reply in zip(documents, replies, strict=True)]
    strict, flexible = (100 * sum(row[name] for row in grades) / len(grades) for name in ("strict", "flexible"))
    return strict, flexible


def score_text(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[float, float]:
    """Return (strict, flexible) of ``model`` on ``bench_format``."""
    documents = bench_tasks.format_documents()
    replies = generate(model, tokenizer, [bench_tasks.format_prompt(doc) for doc in documents])
    return score(documents, replies, bench_tasks.grade_format)


def score_pictures(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[float, float]:
    """Return (strict, flexible) of the LLaVA ``model`` on ``bench_image``."""
    documents = bench_tasks.image_documents()
    pictures = [bench_tasks.doc_to_image(doc)[0] for doc in documents]
    replies = generate(model, tokenizer, [bench_tasks.image_prompt(doc) for doc in documents], pictures)
    return score(documents, replies, bench_tasks.grade_image)


def measure_gates(pair: Path) -> Gates:
    """Load the written pair ``pair``/{base,vlm} in its stored dtype, bf16, and score it."""
    with no_bars():
        tokenizer = AutoTokenizer.from_pretrained(pair / "base")
        base = LlamaForCausalLM.from_pretrained(pair / "base", dtype=torch.bfloat16)
        vlm = LlavaForConditionalGeneration.from_pretrained(pair / "vlm", dtype=torch.bfloat16)
    return Gates(
        *score_text(base, tokenizer),
        *score_text(vlm, tokenizer),
        *score_pictures(vlm, tokenizer),
    )
