"""Pictures of the bench pair: one to four copies of one coloured shape on a 3x3 grid, and questions.

A picture is 36x36 pixels, nine cells of 12 that coincide with the patches of the vision tower. Several
different shapes in one picture were not learnable at this size, so every copy has the same shape and colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray

from mergelab.bench.data.tasks.bench_tasks import POSITIONS
from mergelab.bench.formats import is_held_out

CELL, GRID = 12, 3
SIZE = CELL * GRID
NUM_CELLS = GRID * GRID
BACKGROUND, NOISE = 0.35, 0.04
SHAPES = {"circle": "circles", "square": "squares", "triangle": "triangles", "cross": "crosses"}
COLOURS = {
    "red": (0.9, 0.1, 0.1),
    "green": (0.1, 0.75, 0.1),
    "blue": (0.1, 0.2, 0.9),
    "yellow": (0.95, 0.9, 0.1),
    "purple": (0.6, 0.1, 0.7),
    "white": (1.0, 1.0, 1.0),
}
COUNTS = (1, 1, 2, 3, 4)
"""Drawn with equal chance, so single shapes are twice as frequent: only they have a position question."""


@dataclass(frozen=True)
class Scene:
    """What a picture shows; ``cells`` are sorted indices from 0 (top left) to 8 (bottom right)."""

    shape: str
    colour: str
    cells: tuple[int, ...]

    @property
    def key(self) -> str:
        """The description that decides the split."""
        return f"{self.colour} {self.shape} {','.join(map(str, self.cells))}"

    @property
    def is_held_out(self) -> bool:
        """Whether the scene is kept for testing."""
        return is_held_out(self.key)


@dataclass(frozen=True)
class PictureQuestion:
    """A question about a picture.

    Attributes:
        kind: colour, shape, count or position.
        text: The question, the same for every picture of its kind.
        answers: The words that count as right for the flexible grader (singular and plural of a shape).
        sentences: The replies that the strict grader accepts.
    """

    kind: str
    text: str
    answers: tuple[str, ...]
    sentences: tuple[str, ...]


def questions(scene: Scene) -> list[PictureQuestion]:
    """Return the three or four questions that ``scene`` answers; position only for a single shape."""
    num = len(scene.cells)
    single, plural = scene.shape, SHAPES[scene.shape]
    colour = scene.colour
    if num == 1:
        told_colour = (f"The {single} is {colour}.",)
        told_shape = (f"It is a {single}.", f"It is a {colour} {single}.")
        told_count = (f"There is 1 {colour} shape.", f"There is 1 {single}.")
    else:
        told_colour = (f"The {plural} are {colour}.",)
        told_shape = (f"They are {plural}.", f"They are {colour} {plural}.")
        told_count = (f"There are {num} {colour} shapes.", f"There are {num} {plural}.")
    asked = [
        PictureQuestion("colour", "What colour do you see?", (colour,), told_colour),
        PictureQuestion("shape", "What shape do you see?", (single, plural), told_shape),
        PictureQuestion("count", "How many shapes do you see?", (str(num),), told_count),
    ]
    if num == 1:
        place = POSITIONS[scene.cells[0]]
        asked.append(
            PictureQuestion("position", "Where is the shape?", (place,), (f"The {single} is at the {place}.",))
        )
    return asked


def draw_scene(rng: Random) -> Scene:
    """Draw a scene of either split."""
    cells = tuple(sorted(rng.sample(range(NUM_CELLS), rng.choice(COUNTS))))
    return Scene(rng.choice(tuple(SHAPES)), rng.choice(tuple(COLOURS)), cells)


def draw_training_scene(rng: Random) -> Scene:
    """Draw a scene that is not held out."""
    while True:
        scene = draw_scene(rng)
        if not scene.is_held_out:
            return scene


def draw_picture_question(rng: Random, scene: Scene) -> PictureQuestion:
    """Draw a question about ``scene``; position is asked twice as often, it is learned last."""
    asked = questions(scene)
    return rng.choice(asked + [question for question in asked if question.kind == "position"])


def shape_mask(shape: str, down: int, right: int) -> NDArray[np.bool_]:
    """Return the (12, 12) pixels that ``shape`` covers when its centre is moved by ``down`` and ``right``."""
    rows, columns = np.mgrid[0:CELL, 0:CELL]
    y = rows - (CELL - 1) / 2 - down
    x = columns - (CELL - 1) / 2 - right
    if shape == "circle":
        return np.asarray(x**2 + y**2 <= 4.2**2)
    if shape == "square":
        return np.asarray(np.maximum(abs(x), abs(y)) <= 3.6)
    if shape == "triangle":
        return np.asarray((abs(y) <= 4) & (abs(x) <= (y + 4.5) / 2))
    return np.asarray((np.minimum(abs(x), abs(y)) <= 1.1) & (np.maximum(abs(x), abs(y)) <= 4.6))


MASKS = {
    (shape, down, right): shape_mask(shape, down, right)
    for shape in SHAPES
    for down in (-1, 0, 1)
    for right in (-1, 0, 1)
}


def draw_pixels(scenes: Sequence[Scene], seed: int) -> NDArray[np.uint8]:
    """Draw one picture per scene: uint8 pixels of shape (n, 36, 36, 3).

    Every copy is moved by -1 to 1 pixel inside its cell and Gaussian noise is added. The generator is NumPy's
    ``RandomState``, whose stream is frozen, so a seed gives the same pixels under every NumPy.
    """
    rng = np.random.RandomState(seed)
    pixels = np.full((len(scenes), SIZE, SIZE, 3), BACKGROUND)
    for picture, scene in zip(pixels, scenes, strict=True):
        for cell in scene.cells:
            down, right = (int(move) for move in rng.randint(-1, 2, size=2))
            top, left = CELL * (cell // GRID), CELL * (cell % GRID)
            picture[top : top + CELL, left : left + CELL][MASKS[scene.shape, down, right]] = COLOURS[scene.colour]
    pixels += NOISE * rng.standard_normal(pixels.shape)
    return np.asarray((pixels.clip(0, 1) * 255).round(), dtype=np.uint8)


def model_pixels(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Map uint8 pixels (n, 36, 36, 3) to what the vision tower reads: float32 (n, 3, 36, 36) in [-1, 1]."""
    return np.ascontiguousarray(((pixels.astype(np.float32) / 255 - 0.5) / 0.5).transpose(0, 3, 1, 2))
