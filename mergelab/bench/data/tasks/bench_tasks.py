"""Documents, prompts and graders of the tasks ``bench_format`` and ``bench_image``, as lm-eval calls them.

This file and the JSONL beside it are the whole of both tasks: it imports nothing of mergelab, so a copy of
the folder is still a task folder. ``strict`` and ``flexible`` are 0 or 1 and one document gives one sample
row.

Strict means equality with the target, character by character, of the generated text as lm-eval delivers it,
that is without special tokens and cut at the stop string. Nothing is stripped: a leading or trailing blank is
a format error. Flexible asks only whether the right word occurs anywhere as a whole word, in any case of
letters.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
SIZE = 36
NUM_IMAGE_TOKENS = 9
IMAGE_TOKEN = "<image>"
POSITION = "position"
POSITIONS = (
    "top left",
    "top",
    "top right",
    "left",
    "middle",
    "right",
    "bottom left",
    "bottom",
    "bottom right",
)


def read_lines(name: str) -> list[dict[str, Any]]:
    """Return the JSON objects of the file ``name`` of this folder, one a line."""
    with (FOLDER / name).open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def format_documents() -> list[dict[str, Any]]:
    """Return the documents of ``bench_format``: prompt, target, answer, format, family, cluster."""
    return read_lines("bench_format.jsonl")


def image_documents() -> list[dict[str, Any]]:
    """Return the documents of ``bench_image``, one for every question of every picture.

    The file holds a picture once, with all its questions; the pixels are repeated in the documents.
    """
    return [
        {**question, "cluster": picture["scene"], "pixels": picture["pixels"]}
        for picture in read_lines("bench_image.jsonl")
        for question in picture["questions"]
    ]


def test_split(documents: list[dict[str, Any]]) -> dict[str, Any]:
    """Return ``documents`` as the only split of a data set held in memory; nothing is cached on disk."""
    from datasets import Dataset

    return {"test": Dataset.from_list(documents)}


def load_format(**_: Any) -> dict[str, Any]:
    """Return the splits of ``bench_format`` for lm-eval; the keywords it passes (metadata) are not needed."""
    return test_split(format_documents())


def load_image(**_: Any) -> dict[str, Any]:
    """Return the splits of ``bench_image`` for lm-eval; the keywords it passes (metadata) are not needed."""
    return test_split(image_documents())


def format_prompt(doc: Mapping[str, Any]) -> str:
    """Return the user's turn of a text document."""
    return str(doc["prompt"])


def format_target(doc: Mapping[str, Any]) -> str:
    """Return the one strictly right reply of a text document."""
    return str(doc["target"])


def image_prompt(doc: Mapping[str, Any]) -> str:
    """Return the user's turn of a picture document: nine image tokens, then the question."""
    return IMAGE_TOKEN * NUM_IMAGE_TOKENS + str(doc["question"])


def image_target(doc: Mapping[str, Any]) -> str:
    """Return the first of the strictly right sentences of a picture document."""
    return str(doc["sentences"][0])


def doc_to_image(doc: Mapping[str, Any]) -> list[Any]:
    """Return the picture for the vision tower: a list with one float32 tensor (3, 36, 36) in [-1, 1]."""
    import torch

    pixels = torch.frombuffer(bytearray(base64.b64decode(doc["pixels"])), dtype=torch.uint8)
    return [(pixels.view(SIZE, SIZE, 3).permute(2, 0, 1).float() / 255 - 0.5) / 0.5]


def has_word(text: str, word: str) -> bool:
    """Return whether ``word`` (or phrase) stands whole in ``text``, in any case: "1" is not in "12"."""
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, flags=re.IGNORECASE) is not None


def longest_position(text: str) -> str | None:
    """Return the longest position name in ``text``, so "top" in "top left" does not count, or None."""
    return max((name for name in POSITIONS if has_word(text, name)), key=len, default=None)


def is_flexibly_right(text: str, answers: Iterable[str], kind: str = "") -> bool:
    """Return whether one of ``answers`` occurs in ``text`` as a whole word.

    For positions the longest name found must be an answer.
    """
    if kind == POSITION:
        return longest_position(text) in set(answers)
    return any(has_word(text, answer) for answer in answers)


def grade(text: str, targets: Sequence[str], answers: Iterable[str], kind: str = "") -> dict[str, int]:
    """Grade a reply: ``strict`` is equality with one of ``targets``, ``flexible`` the right word anywhere."""
    return {"strict": int(text in targets), "flexible": int(is_flexibly_right(text, answers, kind))}


def grade_format(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, int]:
    """Grade the reply to a text document."""
    return grade(results[0], [doc["target"]], [doc["answer"]])


def grade_image(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, int]:
    """Grade the reply to a picture document."""
    return grade(results[0], doc["sentences"], doc["answers"], doc["kind"])
