"""The four training stages of the bench pair: ancestor, base, vision warm-up, vlm.

Each stage is a function from models to trained models (in place) and draws its data from its own seeded
generator. The recipe's figures were tuned on the held-out prompts of this very task, so absolute levels are a
little optimistic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    CLIPVisionModel,
    LlamaForCausalLM,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
)

from mergelab.bench.facts import Question, draw_question
from mergelab.bench.formats import REPLAYED, draw_training_prompt
from mergelab.bench.pictures import (
    COLOURS,
    NUM_CELLS,
    SHAPES,
    Scene,
    draw_picture_question,
    draw_pixels,
    draw_training_scene,
    model_pixels,
)
from mergelab.bench.tokenizer import BOS, BOT, EOS, IMAGE, PAD, USER
from mergelab.bench.train import Row, StageResult, TrainedPart, collate, next_token_loss, train

ANCESTOR_ROW_TOKENS, ANCESTOR_BATCH, ANCESTOR_RATE = 128, 12, 6e-3
BASE_BATCH, BASE_RATE, FORMATTED_SHARE = 64, 2.5e-3, 0.85
VISION_BATCH, VISION_RATE = 128, 2e-3
VLM_BATCH, VLM_RATE, PROJECTOR_RATE = 48, 7e-4, 3e-3
PICTURE_SHARE, REPLAY_SHARE = 0.65, 0.08


@dataclass(frozen=True)
class Steps:
    """Optimizer steps of each stage; the defaults are the shipped pair's."""

    ancestor: int = 700
    base: int = 800
    vision: int = 250
    vlm: int = 800


@dataclass(frozen=True)
class Context:
    """What every stage needs: the tokenizer, a generator of its own, and where progress lines go."""

    tokenizer: PreTrainedTokenizerFast
    rng: Random
    progress: Callable[[str], None]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of every text, without special tokens."""
        ids: list[list[int]] = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        return ids


def plain_text(rng: Random) -> str:
    """Draw a line of the ancestor's text: a statement, a question with its answer or with a statement."""
    question = draw_question(rng)
    form = rng.random()
    if form < 0.35:
        return question.statement
    if form < 0.70:
        return f"Question: {question.text} Answer: {question.answer}"
    return f"{question.text} {question.statement}"


def train_ancestor(model: LlamaForCausalLM, steps: int, context: Context) -> StageResult:
    """Train on plain text packed to rows of 128 tokens, ``<s>`` first in every row; loss on all tokens."""
    stream: list[int] = []

    def batch_loss() -> Tensor:
        needed = ANCESTOR_BATCH * (ANCESTOR_ROW_TOKENS - 1)
        while len(stream) < needed:
            for ids in context.encode([plain_text(context.rng) + "\n" for _ in range(128)]):
                stream.extend(ids)
        packed = torch.tensor(stream[:needed]).view(ANCESTOR_BATCH, ANCESTOR_ROW_TOKENS - 1)
        del stream[:needed]
        rows = torch.cat([torch.full((ANCESTOR_BATCH, 1), BOS), packed], dim=1)
        return next_token_loss(model(input_ids=rows, use_cache=False).logits, rows)

    return train("ancestor", [TrainedPart(model, ANCESTOR_RATE)], steps, batch_loss, context.progress)


def chat_rows(context: Context, turns: Sequence[tuple[str, str]], num_images: Sequence[int]) -> list[Row]:
    """Return rows in the chat template's form with the loss on the answer and its ``</s>`` only.

    Args:
        context: Gives the tokenizer.
        turns: (what the user says, what the model should answer) for each row.
        num_images: How many image tokens stand right after ``<|user|>`` in each row.
    """
    asked = context.encode([user for user, _ in turns])
    answered = context.encode([answer for _, answer in turns])
    rows = []
    for question, answer, images in zip(asked, answered, num_images, strict=True):
        given = [BOS, USER, *[IMAGE] * images, *question, BOT]
        rows.append(Row([*given, *answer, EOS], len(given)))
    return rows


def base_turn(rng: Random) -> tuple[str, str]:
    """Draw a turn of base training: 85 % with a format request, else the plain question and bare answer."""
    question = draw_question(rng)
    prompt = draw_training_prompt(rng, question) if rng.random() < FORMATTED_SHARE else None
    return (prompt.text, prompt.target) if prompt else (question.text, question.answer)


def train_base(model: LlamaForCausalLM, steps: int, context: Context) -> StageResult:
    """Teach the ancestor to answer in the eight formats."""

    def batch_loss() -> Tensor:
        turns = [base_turn(context.rng) for _ in range(BASE_BATCH)]
        ids, labels = collate(chat_rows(context, turns, [0] * len(turns)), PAD)
        return next_token_loss(model(input_ids=ids, use_cache=False).logits, labels)

    return train("base", [TrainedPart(model, BASE_RATE)], steps, batch_loss, context.progress)


def patch_labels(scenes: Sequence[Scene]) -> tuple[Tensor, Tensor, Tensor]:
    """Return shape (0 empty, 1-4), colour (0 empty, 1-6), place (0-8) of each patch: int64 (n, 9) each."""
    shapes = torch.zeros(len(scenes), NUM_CELLS, dtype=torch.int64)
    colours = torch.zeros(len(scenes), NUM_CELLS, dtype=torch.int64)
    for row, scene in enumerate(scenes):
        cells = list(scene.cells)
        shapes[row, cells] = 1 + list(SHAPES).index(scene.shape)
        colours[row, cells] = 1 + list(COLOURS).index(scene.colour)
    return shapes, colours, torch.arange(NUM_CELLS).expand(len(scenes), NUM_CELLS)


def train_vision(tower: CLIPVisionModel, steps: int, context: Context) -> StageResult:
    """Warm the vision tower up: linear heads, dropped later, read shape, colour and place off every patch.

    Without this stage shape stays below chance: the vlm memorises (colour, place) -> shape, and the split
    holds out exactly the combinations it has not seen.
    """
    width = tower.config.hidden_size
    heads = nn.ModuleList([nn.Linear(width, 1 + len(SHAPES)), nn.Linear(width, 1 + len(COLOURS))])
    heads.append(nn.Linear(width, NUM_CELLS))

    def batch_loss() -> Tensor:
        scenes = [draw_training_scene(context.rng) for _ in range(VISION_BATCH)]
        pixels = torch.from_numpy(model_pixels(draw_pixels(scenes, context.rng.getrandbits(32))))
        features = tower(pixel_values=pixels).last_hidden_state[:, 1:]
        losses = [
            functional.cross_entropy(head(features).flatten(0, 1), labels.flatten())
            for head, labels in zip(heads, patch_labels(scenes), strict=True)
        ]
        return torch.stack(losses).sum()

    parts = [TrainedPart(tower, VISION_RATE), TrainedPart(heads, VISION_RATE)]
    return train("vision", parts, steps, batch_loss, context.progress)


def free_form(rng: Random, question: Question) -> str:
    """Draw one of the two sentences in which the vlm learns to answer: no format, the same content."""
    return question.sentence if rng.random() < 0.5 else f"The answer is {question.answer}."


def vlm_text_turn(rng: Random) -> tuple[str, str]:
    """Draw a text turn of vlm training: 92 % a plain question and a sentence, 8 % a replayed format."""
    question = draw_question(rng)
    prompt = draw_training_prompt(rng, question, REPLAYED) if rng.random() < REPLAY_SHARE else None
    return (prompt.text, prompt.target) if prompt else (question.text, free_form(rng, question))


def train_vlm(vlm: LlavaForConditionalGeneration, steps: int, context: Context) -> StageResult:
    """Train language tower and projector on 65 % pictures and 35 % text; the vision tower is frozen.

    Picture and text rows share a batch: pictures are consumed in row order, rows without image tokens take
    none.
    """
    vlm.model.vision_tower.requires_grad_(False)
    rng = context.rng

    def batch_loss() -> Tensor:
        turns: list[tuple[str, str]] = []
        num_images: list[int] = []
        scenes: list[Scene] = []
        for _ in range(VLM_BATCH):
            if rng.random() < PICTURE_SHARE:
                scene = draw_training_scene(rng)
                asked = draw_picture_question(rng, scene)
                turns.append((asked.text, rng.choice(asked.sentences)))
                scenes.append(scene)
                num_images.append(NUM_CELLS)
            else:
                turns.append(vlm_text_turn(rng))
                num_images.append(0)
        ids, labels = collate(chat_rows(context, turns, num_images), PAD)
        pixels = torch.from_numpy(model_pixels(draw_pixels(scenes, rng.getrandbits(32)))) if scenes else None
        logits = vlm(input_ids=ids, pixel_values=pixels, use_cache=False).logits
        return next_token_loss(logits, labels)

    parts = [
        TrainedPart(vlm.model.multi_modal_projector, PROJECTOR_RATE),
        TrainedPart(vlm.model.language_model, VLM_RATE),
    ]
    return train("vlm", parts, steps, batch_loss, context.progress)
