"""The data of the two bench tasks, made again byte for byte: which held-out prompts and pictures are asked.

Nothing is drawn with replacement and no random generator decides what is asked: candidates are enumerated,
only held-out ones stay, and the first of them in the order of their md5 are taken. The noise of the pictures
is seeded.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from mergelab import atomic
from mergelab.bench import facts
from mergelab.bench.facts import Question
from mergelab.bench.formats import FORMATS, Prompt
from mergelab.bench.pictures import COLOURS, NUM_CELLS, SHAPES, Scene, draw_pixels, questions

FORMAT_FILE, IMAGE_FILE = "bench_format.jsonl", "bench_image.jsonl"
PROMPTS_PER_FAMILY = 180
"""Prompts of each family that is not a list of facts; of the facts every held-out prompt is asked."""
NUM_LISTS = 300
"""Word lists of each length that the in-context families choose from."""
SCENES_PER_COUNT = 150
"""Scenes with two, three and four shapes each; of single shapes every held-out scene is drawn three times."""
SINGLE_DRAWINGS = 3
PIXEL_SEED = 777


def tasks_folder() -> Path:
    """Return the folder of the shipped tasks, for lm-eval's ``include_path``."""
    return Path(str(files("mergelab.bench.data") / "tasks"))


def md5(text: str) -> str:
    """Return the hex md5 of ``text``, here a fixed shuffle and nothing else."""
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def word_lists(length: int) -> list[tuple[str, ...]]:
    """Return ``NUM_LISTS`` lists of ``length`` different words in a fixed pseudo-random order."""
    return [
        tuple(sorted(facts.LIST_WORDS, key=lambda word: md5(f"{length} {index} {word}"))[:length])
        for index in range(NUM_LISTS)
    ]


def generated_questions() -> list[list[Question]]:
    """Return candidates of the five families that are not memorised, one list a family."""
    compared = range(facts.SMALLEST_COMPARED, facts.LARGEST_COMPARED + 1)
    triples = word_lists(3)
    lists = [words for length in range(2, facts.LONGEST_LIST + 1) for words in word_lists(length)]
    return [
        facts.sums(),
        [facts.bigger(a, b) for a, b in itertools.product(compared, compared) if a // 10 != b // 10],
        [facts.last(words) for words in triples],
        [facts.first(words) for words in triples],
        [facts.count(words) for words in lists],
    ]


def held_out_prompts(asked: Iterable[Question]) -> list[Prompt]:
    """Return the held-out prompts of ``asked`` over all formats and orders, each once, in md5 order."""
    prompts = {
        prompt.text: prompt
        for question in asked
        for name in FORMATS
        for request_first in (True, False)
        if (prompt := Prompt(question, name, request_first)).is_held_out
    }
    return [prompts[text] for text in sorted(prompts, key=md5)]


def format_rows() -> list[dict[str, Any]]:
    """Return the documents of ``bench_format``; the cluster is the question, asked in several formats."""
    prompts = held_out_prompts(facts.memorised_questions())
    for family in generated_questions():
        prompts += held_out_prompts(family)[:PROMPTS_PER_FAMILY]
    return [
        {
            "prompt": prompt.text,
            "target": prompt.target,
            "answer": prompt.question.answer,
            "format": prompt.format,
            "family": prompt.question.family,
            "cluster": prompt.question.text,
        }
        for prompt in prompts
    ]


def held_out_scenes(num: int) -> list[Scene]:
    """Return all held-out scenes with ``num`` shapes in the order of their md5."""
    scenes = [
        Scene(shape, colour, cells)
        for shape in SHAPES
        for colour in COLOURS
        for cells in itertools.combinations(range(NUM_CELLS), num)
    ]
    return sorted((scene for scene in scenes if scene.is_held_out), key=lambda scene: md5(scene.key))


def image_rows() -> list[dict[str, Any]]:
    """Return the pictures of ``bench_image``: all questions of each, pixels as base64 of uint8 RGB rows."""
    scenes = held_out_scenes(1) * SINGLE_DRAWINGS
    for num in (2, 3, 4):
        scenes += held_out_scenes(num)[:SCENES_PER_COUNT]
    pixels = draw_pixels(scenes, PIXEL_SEED)
    return [
        {
            "scene": scene.key,
            "questions": [
                {
                    "kind": asked.kind,
                    "question": asked.text,
                    "answers": list(asked.answers),
                    "sentences": list(asked.sentences),
                }
                for asked in questions(scene)
            ],
            "pixels": base64.b64encode(picture.tobytes()).decode("ascii"),
        }
        for scene, picture in zip(scenes, pixels, strict=True)
    ]


def json_lines(rows: Sequence[dict[str, Any]]) -> str:
    """Return ``rows`` as JSON Lines."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def write_task_data(folder: Path) -> None:
    """Write ``bench_format.jsonl`` and ``bench_image.jsonl`` into ``folder``, the same bytes every time."""
    atomic.write_text(folder / FORMAT_FILE, json_lines(format_rows()))
    atomic.write_text(folder / IMAGE_FILE, json_lines(image_rows()))
