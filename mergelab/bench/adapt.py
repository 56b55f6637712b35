"""Makes a vlm out of a person's own text model: real weights, a real loss of text ability, no download.

The vision tower of the bench pair is frozen and put before the given model, a projector is trained, and the
model is tuned on picture questions and on plain questions answered in free-form sentences, with no format
replay. Rows and tokenizer stay equal to the base's: a reserved token of the base becomes the image token.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CLIPVisionModel,
    DynamicCache,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from mergelab import atomic
from mergelab.bench.build import pair_folder, refuse_used_folder
from mergelab.bench.data.tasks import bench_tasks
from mergelab.bench.facts import draw_question
from mergelab.bench.folders import no_bars, save_model
from mergelab.bench.gates import generate, score
from mergelab.bench.models import assemble_vlm, cpu_threads
from mergelab.bench.pictures import (
    NUM_CELLS,
    Scene,
    draw_picture_question,
    draw_pixels,
    draw_training_scene,
    model_pixels,
)
from mergelab.bench.train import IGNORED, Row, StageResult, TrainedPart, collate, train
from mergelab.checkpoints.headers import open_checkpoint
from mergelab.errors import DamagedFileError, PairingError

DEFAULT_STEPS = 100
BATCH = 16
RATE, PROJECTOR_RATE = 2e-4, 1e-3
PICTURE_SHARE = 0.65
ALIGNMENT_STEPS, ALIGNMENT_BATCH, ALIGNMENT_RATE = 300, 32, 2e-3
FREE_FORMS = (
    "{sentence}",
    "The answer is {answer}.",
    "Sure, the answer is {answer}.",
    "I think it is {answer}, as far as I know.",
)
"""How text questions are answered: chatty and short, never in a requested format."""
NUM_CHECKED = 120
"""Picture questions that the finished vlm is asked, spread evenly over ``bench_image``."""
REPORT_FILE = "ADAPT.json"


@dataclass(frozen=True)
class AdaptReport:
    """What an adaptation did; written as ``ADAPT.json`` into the folder.

    ``image_strict`` and ``image_flexible`` are points over ``num_checked`` held-out picture questions.
    """

    base: str
    seed: int
    image_token: str
    stages: tuple[StageResult, ...]
    image_strict: float
    image_flexible: float
    num_checked: int
    seconds: float

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return dataclasses.asdict(self)


def reserved_token(tokenizer: PreTrainedTokenizerBase) -> tuple[str, int]:
    """Return (token, id) of the token that becomes the image token.

    It is ``<image>`` where the vocabulary has it, else the special token of the highest id that is neither a
    bos, eos, pad or unknown token nor written by the chat template.

    Raises:
        PairingError: There is none; a new one would change the number of rows.
    """
    vocabulary = tokenizer.get_vocab()
    if bench_tasks.IMAGE_TOKEN in vocabulary:
        return bench_tasks.IMAGE_TOKEN, vocabulary[bench_tasks.IMAGE_TOKEN]
    used = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token}
    template = str(tokenizer.chat_template or "")
    added = tokenizer.added_tokens_decoder.items()
    special = {token.content: index for index, token in added if token.special}
    free = {token: index for token, index in special.items() if token not in used and token not in template}
    if not free:
        raise PairingError(
            f"--base {tokenizer.name_or_path}: expected a special token that nothing uses, for pictures; "
            f"found only {sorted(special)}. Take a base with reserved tokens."
        )
    token = max(free, key=lambda name: free[name])
    return token, free[token]


class Tutor:
    """Draws training rows in the base's own chat template.

    Args:
        tokenizer: The base's tokenizer; its template and its eos token frame every row.
        image_token: The token that stands for one picture feature.
        rng: Decides all content.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, image_token: str, rng: Random) -> None:
        self.tokenizer = tokenizer
        self.image_token = image_token
        self.rng = rng

    def row(self, user: str, answer: str) -> Row:
        """Return one turn with the loss on the answer and the eos token."""
        given = str(
            self.tokenizer.apply_chat_template(
                [{"role": "user", "content": user}], tokenize=False, add_generation_prompt=True
            )
        )
        asked, answered = (
            self.tokenizer(text, add_special_tokens=False)["input_ids"]
            for text in (given, answer + str(self.tokenizer.eos_token))
        )
        return Row([*asked, *answered], len(asked))

    def text_row(self) -> Row:
        """Draw a plain question, answered in a sentence."""
        question = draw_question(self.rng)
        form = self.rng.choice(FREE_FORMS)
        return self.row(question.text, form.format(answer=question.answer, sentence=question.sentence))

    def picture_row(self, scene: Scene) -> Row:
        """Draw a question about ``scene``, answered in one of its sentences."""
        asked = draw_picture_question(self.rng, scene)
        return self.row(self.image_token * NUM_CELLS + asked.text, self.rng.choice(asked.sentences))

    def scenes(self, num: int) -> list[Scene]:
        """Draw ``num`` scenes that are not held out."""
        return [draw_training_scene(self.rng) for _ in range(num)]

    def pixels(self, scenes: list[Scene], device: torch.device) -> Tensor:
        """Draw the pictures of ``scenes`` as the vision tower reads them."""
        return torch.from_numpy(model_pixels(draw_pixels(scenes, self.rng.getrandbits(32)))).to(device)


def word_embedding(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, word: str) -> Tensor:
    """Return the mean input embedding of the tokens of ``word`` in mid-sentence, shape (hidden,)."""
    embeddings: nn.Module = model.get_input_embeddings()
    ids = torch.tensor(tokenizer(f" {word}", add_special_tokens=False)["input_ids"], device=model.device)
    with torch.no_grad():
        embedded: Tensor = embeddings(ids)
    return embedded.mean(dim=0)


def align_projector(
    vlm: LlavaForConditionalGeneration, tutor: Tutor, steps: int, progress: Callable[[str], None]
) -> StageResult:
    """Teach the projector to say what a patch shows in the base's own words, before the model is touched.

    The target of a patch is the sum of the embeddings of its place and, if it is not empty, of its colour and
    shape; the loss is the squared error over the targets' variance. It costs seconds, no pass through the
    language model, and starts the tuning where the words already mean something.
    """
    device = vlm.device
    words: dict[str, Tensor] = {}

    def embedding(word: str) -> Tensor:
        if word not in words:
            words[word] = word_embedding(vlm, tutor.tokenizer, word)
        return words[word]

    def batch_loss() -> Tensor:
        scenes = tutor.scenes(ALIGNMENT_BATCH)
        targets = torch.stack([torch.stack([embedding(place) for place in bench_tasks.POSITIONS])] * len(scenes))
        for row, scene in enumerate(scenes):
            targets[row, list(scene.cells)] += embedding(scene.colour) + embedding(scene.shape)
        with torch.no_grad():
            features = vlm.model.vision_tower(pixel_values=tutor.pixels(scenes, device)).last_hidden_state[:, 1:]
        return functional.mse_loss(vlm.model.multi_modal_projector(features), targets) / targets.var()

    part = TrainedPart(vlm.model.multi_modal_projector, ALIGNMENT_RATE)
    return train("projector", [part], steps, batch_loss, progress)


def tune(vlm: LlavaForConditionalGeneration, tutor: Tutor, steps: int, progress: Callable[[str], None]) -> StageResult:
    """Tune language tower and projector on 65 % picture questions and 35 % plain questions.

    Weights are float32. Three things make a step affordable on a laptop's processor: the passes run in bf16,
    the template's opening that all rows share is computed once a step, and the head reads only positions that
    carry loss. Embeddings and head stay as they are: most rows would never be seen in so few steps.
    """
    device, pad = vlm.device, int(tutor.tokenizer.pad_token_id or 0)
    language: nn.Module = vlm.model.language_model
    vlm.get_input_embeddings().requires_grad_(False)
    vlm.lm_head.requires_grad_(False)
    vlm.train()

    def batch_loss() -> Tensor:
        num_pictures = sum(tutor.rng.random() < PICTURE_SHARE for _ in range(BATCH))
        scenes = tutor.scenes(num_pictures)
        rows = [tutor.picture_row(scene) for scene in scenes]
        rows += [tutor.text_row() for _ in range(BATCH - num_pictures)]
        ids, labels = (tensor.to(device) for tensor in collate(rows, pad))
        pixels = tutor.pixels(scenes, device) if scenes else None
        with torch.autocast(device.type, dtype=torch.bfloat16):
            hidden = hidden_after_opening(vlm, ids, pixels)
            answers = labels[:, -hidden.shape[1] :][:, 1:]
            kept = answers != IGNORED
            logits = vlm.lm_head(hidden[:, :-1][kept])
        return functional.cross_entropy(logits.float(), answers[kept])

    parts = [TrainedPart(vlm.model.multi_modal_projector, PROJECTOR_RATE), TrainedPart(language, RATE)]
    return train("vlm", parts, steps, batch_loss, progress)


def hidden_after_opening(vlm: LlavaForConditionalGeneration, ids: Tensor, pixels: Tensor | None) -> Tensor:
    """Return the last hidden states after the leading text tokens that all rows share.

    The shared opening passes through the model once, as one row, and every row attends to its keys and
    values; gradients flow through it. The values are those of the plain pass over ``ids``.

    Args:
        vlm: The model.
        ids: Token ids (rows, length), padded on the right.
        pixels: Pictures of the rows that hold image tokens, or None.

    Returns:
        Shape (rows, length - opening, hidden); the opening leaves at least two columns.
    """
    ends = ((ids != ids[:1]) | (ids == vlm.config.image_token_id)).any(dim=0).nonzero()
    opening = min(int(ends[0]) if len(ends) else ids.shape[1], ids.shape[1] - 2)
    language = vlm.model.language_model
    if opening < 1:
        hidden: Tensor = vlm.model(input_ids=ids, pixel_values=pixels, use_cache=False).last_hidden_state
        return hidden
    cache = DynamicCache()
    language(input_ids=ids[:1, :opening], cache=cache, use_cache=True)
    cache.batch_repeat_interleave(ids.shape[0])
    passed = vlm.model(input_ids=ids[:, opening:], pixel_values=pixels, cache=cache, use_cache=True)
    hidden = passed.last_hidden_state
    return hidden


def check_pictures(
    vlm: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, image_token: str
) -> tuple[float, float, int]:
    """Return (strict, flexible, n) on picture questions of ``bench_image``, spread evenly."""
    documents = bench_tasks.image_documents()
    documents = documents[:: max(1, len(documents) // NUM_CHECKED)]
    prompts = [image_token * NUM_CELLS + doc["question"] for doc in documents]
    replies = generate(vlm, tokenizer, prompts, [bench_tasks.doc_to_image(doc)[0] for doc in documents])
    return (*score(documents, replies, bench_tasks.grade_image), len(documents))


def load_base(base: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the text model in float32 and its tokenizer, padding on the left.

    Raises:
        DamagedFileError: The folder is not a loadable text model with a tokenizer and a chat template.
    """
    open_checkpoint(base)
    try:
        with no_bars():
            tokenizer = AutoTokenizer.from_pretrained(base, padding_side="left", local_files_only=True)
            model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise DamagedFileError(f"--base {base}: expected a text model and its tokenizer; {error}") from error
    if not tokenizer.chat_template:
        raise DamagedFileError(f"--base {base}: expected a tokenizer with a chat template, found none.")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def adapt_vlm(
    base: Path,
    out: Path,
    *,
    steps: int = DEFAULT_STEPS,
    seed: int = 0,
    device: str = "cpu",
    progress: Callable[[str], None],
) -> AdaptReport:
    """Turn the text model in ``base`` into a LLaVA that answers questions about the bench pictures.

    Args:
        base: Folder of a Llama-like text model with tokenizer and chat template.
        out: New or empty folder; it appears whole, at the end, in bf16, with the base's tokenizer.
        steps: Optimizer steps of 16 rows; the default takes under 20 minutes for 135 M parameters on two
            cores.
        seed: Decides the projector's start and all content.
        device: Torch device.
        progress: Receives one line now and then.

    Raises:
        OutputFolderError: ``out`` holds something.
        DamagedFileError: ``base`` is missing or not a loadable text model.
        PairingError: The base has no token to spare for pictures.
    """
    refuse_used_folder(out)
    started = time.monotonic()
    text, tokenizer = load_base(base)
    image_token, image_id = reserved_token(tokenizer)
    progress(f"{base}: {text.num_parameters() / 1e6:.0f} M parameters, {image_token} becomes the image token")
    vision = load_vision_tower()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vlm = assemble_vlm(text, vision, image_id)
        nn.Module.to(vlm, device)
        vlm.model.vision_tower.requires_grad_(False)
        tutor = Tutor(tokenizer, image_token, Random(f"{seed} adapt"))
        with cpu_threads(1):
            aligned = align_projector(vlm, tutor, ALIGNMENT_STEPS, progress)
        stages = (aligned, tune(vlm, tutor, steps, progress))
    with atomic.new_folder(out) as scratch:
        save_model(vlm, tokenizer, scratch)
        del vlm, text
        progress("check: asking about held-out pictures")
        with no_bars():
            stored = LlavaForConditionalGeneration.from_pretrained(scratch, dtype=torch.bfloat16)
        nn.Module.to(stored, device)
        strict, flexible, num = check_pictures(stored, tokenizer, image_token)
        seconds = time.monotonic() - started
        report = AdaptReport(str(base), seed, image_token, stages, strict, flexible, num, seconds)
        atomic.write_json(scratch / REPORT_FILE, report.as_json())
    return report


def load_vision_tower() -> CLIPVisionModel:
    """Return the trained vision tower of the shipped vlm in float32."""
    with no_bars():
        vlm = LlavaForConditionalGeneration.from_pretrained(pair_folder() / "vlm", dtype=torch.float32)
    tower: CLIPVisionModel = vlm.model.vision_tower
    return tower
