"""Measuring the sink metrics of a live model: prompts to tokens, a forward pass each, rows to a record.

Loading a model, choosing its dtype and device, and writing the record belong to the caller.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from typing import Any

from transformers import BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

from mergelab.errors import RecipeError, problem_list
from mergelab.sinks.capture import ArchitectureError, capturing
from mergelab.sinks.metric import Rows
from mergelab.sinks.prompts import Prompts
from mergelab.sinks.summary import summarize_rows

DEFAULT_LAST_LAYERS = 10
SHORT_MODEL_LAYERS = 20
"""Below this many layers, half of them are measured instead of ten."""

TEMPLATE_DATE = "26 Jul 2024"
"""Date told to templates that ask for one (the fallback of the Llama 3 template); today's would make S change
daily."""


@dataclass(frozen=True)
class Inputs:
    """Prompts as one tokenizer and its template turn them into tokens."""

    token_ids: tuple[list[int], ...]
    chat_template_sha256: str | None
    enable_thinking: bool | None
    """False where the template knows the switch, None where it does not."""

    def sha256(self) -> str:
        """Return a hash of the token ids."""
        return hashlib.sha256(json.dumps(self.token_ids).encode()).hexdigest()


def measure_sink(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Prompts,
    *,
    last_layers: int | None = None,
) -> dict[str, Any]:
    """Measure Sink Strength S and its companions on a live causal language model.

    S is the median over prompts, heads and queries of the last layers of G = ln(a / (1 - a)), a the largest
    attention probability of the row, computed from raw scores in float32; ``sink_strength_bf16`` reads the
    same rows off probabilities rounded to bfloat16, as published values were. Each prompt is one user turn
    in the chat template with the generation prompt, thinking off where the template knows it, and no system
    message (so a template may insert its default one); without a template it is the plain text. One forward
    pass a prompt, no padding: a row depends on its own prompt alone. Query 0 sees only itself and is
    dropped.

    The model runs as it is, in its dtype and on its device, and is left exactly as found.

    Args:
        model: A causal language model whose attention goes through transformers' attention interface.
        tokenizer: Its tokenizer; ``chat_template`` decides between template and plain text.
        prompts: What to ask, each of two or more tokens.
        last_layers: How many of the last layers with softmax attention, 1 to all. None: 10, or half of them
            (at least one) when there are fewer than 20.

    Returns:
        JSON-able record. From ``summary.summarize_rows``: ``sink_strength`` and the other metrics, counters
        and medians per prompt, layer and head. ``dtype``: the forward's. ``last_layers``, ``layers`` (their
        ids), ``num_layers`` (layers with softmax attention), ``softmax_terms`` (a soft cap or a
        learned sink logit beside plain scores; mostly empty). ``num_prompts``, ``token_counts`` (one a
        prompt), ``prompts`` (name, sha256), ``chat_template_sha256`` (None: plain text),
        ``enable_thinking`` (False, or None where the template has no such switch),
        ``add_generation_prompt``, ``token_ids_sha256``, ``seconds``.

    Raises:
        RecipeError: A prompt has fewer than two tokens or more than the model has positions;
            ``last_layers`` is not between 1 and the number of layers with softmax attention.
        ArchitectureError: The model has no attention that can be read, or not causal softmax attention over
            the keys alone (``capture``).
        DamagedFileError: Attention scores are NaN or infinite.

    **Source**: arXiv 2609.00746, Sink Strength; conventions as in the authors' sibling script
    measure_sink_T.py.

    **Deviations**: our own prompts; float32 scores beside the bfloat16 read-out; no row is skipped for its
    sum.
    """
    started = time.perf_counter()
    inputs = encode_prompts(tokenizer, prompts)
    check_lengths(model, prompts, inputs)
    measured: list[dict[int, Rows]] = []
    with capturing(model, inputs.token_ids[0]) as capture:
        layers = choose_layers(capture.layers, last_layers)
        for token_ids in inputs.token_ids:
            measured.append(capture.rows(token_ids, layers))
    try:
        summary = summarize_rows(measured)
    except ValueError as error:
        raise ArchitectureError(f"{type(model).__name__}: {error}. Its windows leave nothing to compare.") from error
    return {
        **summary,
        "dtype": str(model.dtype).removeprefix("torch."),
        "last_layers": len(layers),
        "layers": list(layers),
        "num_layers": len(capture.layers),
        "softmax_terms": list(capture.terms),
        "num_prompts": len(prompts.texts),
        "token_counts": [len(token_ids) for token_ids in inputs.token_ids],
        "prompts": {"name": prompts.name, "sha256": prompts.sha256},
        "chat_template_sha256": inputs.chat_template_sha256,
        "enable_thinking": inputs.enable_thinking,
        "add_generation_prompt": inputs.chat_template_sha256 is not None,
        "token_ids_sha256": inputs.sha256(),
        "seconds": time.perf_counter() - started,
    }


def encode_prompts(tokenizer: PreTrainedTokenizerBase, prompts: Prompts) -> Inputs:
    """Turn prompts into tokens: one user turn in the chat template, or the plain text without one."""
    if not tokenizer.chat_template:
        return Inputs(tuple(list(tokenizer(text)["input_ids"]) for text in prompts.texts), None, None)
    template = tokenizer.get_chat_template()
    options: dict[str, Any] = {}
    if "enable_thinking" in template:
        options["enable_thinking"] = False
    if "date_string" in template:
        options["date_string"] = TEMPLATE_DATE
    token_ids = []
    for text in prompts.texts:
        encoded = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True, **options
        )
        assert isinstance(encoded, BatchEncoding)
        token_ids.append(list(encoded["input_ids"]))
    digest = hashlib.sha256(template.encode("utf-8")).hexdigest()
    return Inputs(tuple(token_ids), digest, options.get("enable_thinking"))


def check_lengths(model: PreTrainedModel, prompts: Prompts, inputs: Inputs) -> None:
    """Refuse prompts of fewer than two tokens or more than the model has positions; all are named."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    problems = []
    for number, (text, token_ids) in enumerate(zip(prompts.texts, inputs.token_ids, strict=True), start=1):
        if len(token_ids) < 2:
            problems.append(
                f"prompt {number} ({text[:40]!r}): expected two tokens or more, found {len(token_ids)}; "
                "one token has no other key to attend to"
            )
        elif positions is not None and len(token_ids) > positions:
            problems.append(f"prompt {number} ({text[:40]!r}): {len(token_ids)} tokens, the model has {positions}")
    if problems:
        advice = "Change these prompts, or leave them out of the file."
        raise RecipeError(problem_list(f"prompts {prompts.name}: not fit for this model", problems, advice))


def choose_layers(available: tuple[int, ...], last_layers: int | None) -> tuple[int, ...]:
    """Return the last layers that are measured: as many as asked for, else 10, or half of fewer than 20."""
    count = len(available)
    if last_layers is None:
        last_layers = DEFAULT_LAST_LAYERS if count >= SHORT_MODEL_LAYERS else max(1, count // 2)
    if not 1 <= last_layers <= count:
        raise RecipeError(
            f"sink.last_layers: expected 1 to {count}, the layers of this model with softmax attention, "
            f"found {last_layers}. Choose fewer, or auto."
        )
    return available[-last_layers:]
