"""The tokenizer of the bench pair: byte-level BPE of 640 entries, trained on synthetic text; its template."""

from __future__ import annotations

from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mergelab.bench.facts import draw_question
from mergelab.bench.formats import FORMATS, Prompt
from mergelab.bench.pictures import draw_picture_question, draw_scene

VOCABULARY_SIZE = 640
SPECIAL_TOKENS = ("<pad>", "<s>", "</s>", "<unk>", "<image>", "<|user|>", "<|bot|>")
PAD, BOS, EOS, UNK, IMAGE, USER, BOT = range(len(SPECIAL_TOKENS))
NUM_TRAINING_STRINGS = 20_000

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ '<|bot|>' + message['content'] + eos_token }}"
    "{% else %}{{ '<|user|>' + message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|bot|>' }}{% endif %}"
)
"""The template writes ``<s>`` itself, the tokenizer adds nothing. A system turn reads like a user's."""


def training_strings(rng: Random) -> list[str]:
    """Return the text whose frequent pieces become tokens: facts, formatted prompts, picture sentences."""
    strings: list[str] = []
    while len(strings) < NUM_TRAINING_STRINGS:
        question = draw_question(rng)
        prompt = Prompt(question, rng.choice(tuple(FORMATS)), rng.random() < 0.5)
        asked = draw_picture_question(rng, draw_scene(rng))
        strings += [
            question.statement,
            question.sentence,
            f"Question: {question.text} Answer: {question.answer}",
        ]
        strings += [prompt.text, prompt.target, f"The answer is {question.answer}."]
        strings += [asked.text, rng.choice(asked.sentences)]
    return strings


def train_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Train the tokenizer: all 256 bytes are tokens, so any text round-trips; digits stand alone."""
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_strings(Random(seed)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL_TOKENS[PAD],
        bos_token=SPECIAL_TOKENS[BOS],
        eos_token=SPECIAL_TOKENS[EOS],
        unk_token=SPECIAL_TOKENS[UNK],
        additional_special_tokens=list(SPECIAL_TOKENS[IMAGE:]),
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
    )
