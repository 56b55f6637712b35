"""Nine families of short questions with one right answer each: what the text side of the bench pair knows.

Families 1 to 4 are facts to be memorised, 5 and 6 small arithmetic, 7 to 9 are answered from the question
itself. How an answer must look is not decided here but in ``formats``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

COLOURS = {
    "grass": "green",
    "snow": "white",
    "coal": "black",
    "blood": "red",
    "ocean": "blue",
    "lemon": "yellow",
    "chocolate": "brown",
    "carrot": "orange",
    "plum": "purple",
    "ash": "grey",
    "salmon": "pink",
    "milk": "white",
}
KINDS = {
    "oak": "tree",
    "pine": "tree",
    "rose": "flower",
    "tulip": "flower",
    "dog": "animal",
    "horse": "animal",
    "trout": "fish",
    "shark": "fish",
    "eagle": "bird",
    "owl": "bird",
    "apple": "fruit",
    "pear": "fruit",
    "hammer": "tool",
    "saw": "tool",
    "violin": "instrument",
    "drum": "instrument",
    "iron": "metal",
    "copper": "metal",
    "bee": "insect",
    "ant": "insect",
}
OPPOSITE_PAIRS = (
    ("hot", "cold"),
    ("big", "small"),
    ("open", "closed"),
    ("fast", "slow"),
    ("high", "low"),
    ("light", "dark"),
    ("wet", "dry"),
    ("old", "new"),
    ("hard", "soft"),
    ("full", "empty"),
    ("early", "late"),
    ("rich", "poor"),
)
OPPOSITES = {word: other for pair in OPPOSITE_PAIRS for word, other in (pair, pair[::-1])}
CAPITALS = {
    "France": "Paris",
    "Spain": "Madrid",
    "Italy": "Rome",
    "Germany": "Berlin",
    "Japan": "Tokyo",
    "Egypt": "Cairo",
    "Norway": "Oslo",
    "Greece": "Athens",
    "Peru": "Lima",
    "Cuba": "Havana",
}
# fmt: off
LIST_WORDS = (
    "sand", "boat", "cup", "door", "lamp", "book", "chair", "river", "stone", "bread", "cloud", "glass",
    "paper", "spoon", "table", "wheel", "window", "shoe", "coin", "rope", "leaf", "bell", "key", "hat",
)
# fmt: on
LARGEST_ADDEND = 9
SMALLEST_COMPARED, LARGEST_COMPARED = 10, 49
LONGEST_LIST = 5


@dataclass(frozen=True)
class Question:
    """One question of one family.

    Attributes:
        family: One of the keys of ``FAMILIES``.
        text: The question as a user asks it, without a format request.
        answer: The right answer, one word.
        sentence: A free-form reply that holds the answer and no other candidate.
        statement: The same fact as a sentence that stands alone, for plain text.
    """

    family: str
    text: str
    answer: str
    sentence: str
    statement: str


def colour(thing: str) -> Question:
    """Ask for the colour of a thing of ``COLOURS``."""
    answer = COLOURS[thing]
    told = f"The colour of {thing} is {answer}."
    return Question("colour", f"What colour is {thing}?", answer, told, told)


def kind(thing: str) -> Question:
    """Ask for the kind of a thing of ``KINDS``."""
    answer = KINDS[thing]
    told = f"The kind of {thing} is {answer}."
    return Question("kind", f"What kind of thing is {thing}?", answer, told, told)


def opposite(word: str) -> Question:
    """Ask for the opposite of a word of ``OPPOSITES``."""
    answer = OPPOSITES[word]
    told = f"The opposite of {word} is {answer}."
    return Question("opposite", f"What is the opposite of {word}?", answer, told, told)


def capital(country: str) -> Question:
    """Ask for the capital of a country of ``CAPITALS``."""
    answer = CAPITALS[country]
    told = f"The capital of {country} is {answer}."
    return Question("capital", f"What is the capital of {country}?", answer, told, told)


def plus(first: int, second: int) -> Question:
    """Ask for the sum of two numbers from 0 to 9."""
    answer = str(first + second)
    return Question(
        "plus",
        f"What is {first} plus {second}?",
        answer,
        f"The sum is {answer}.",
        f"{first} plus {second} is {answer}.",
    )


def bigger(first: int, second: int) -> Question:
    """Ask for the bigger of two numbers from 10 to 49 whose tens differ."""
    answer = str(max(first, second))
    return Question(
        "bigger",
        f"Which is bigger, {first} or {second}?",
        answer,
        f"The bigger number is {answer}.",
        f"Of {first} and {second} the bigger is {answer}.",
    )


def last(words: tuple[str, ...]) -> Question:
    """Ask for the last of three words."""
    told = ", ".join(words)
    return Question(
        "last",
        f"Which word is last: {told}?",
        words[-1],
        f"The last word is {words[-1]}.",
        f"In {told} the last is {words[-1]}.",
    )


def first(words: tuple[str, ...]) -> Question:
    """Ask for the first of three words."""
    told = ", ".join(words)
    return Question(
        "first",
        f"Which word is first: {told}?",
        words[0],
        f"The first word is {words[0]}.",
        f"In {told} the first is {words[0]}.",
    )


def count(words: tuple[str, ...]) -> Question:
    """Ask how many words a list of two to five words has."""
    told, answer = ", ".join(words), str(len(words))
    return Question(
        "count",
        f"How many words: {told}?",
        answer,
        f"There are {answer} words.",
        f"In {told} there are {answer}.",
    )


def _compared(rng: Random) -> tuple[int, int]:
    while True:
        pair = (
            rng.randint(SMALLEST_COMPARED, LARGEST_COMPARED),
            rng.randint(SMALLEST_COMPARED, LARGEST_COMPARED),
        )
        if pair[0] // 10 != pair[1] // 10:
            return pair


def _words(rng: Random, num: int) -> tuple[str, ...]:
    return tuple(rng.sample(LIST_WORDS, num))


FAMILIES: dict[str, Callable[[Random], Question]] = {
    "colour": lambda rng: colour(rng.choice(tuple(COLOURS))),
    "kind": lambda rng: kind(rng.choice(tuple(KINDS))),
    "opposite": lambda rng: opposite(rng.choice(tuple(OPPOSITES))),
    "capital": lambda rng: capital(rng.choice(tuple(CAPITALS))),
    "plus": lambda rng: plus(rng.randint(0, LARGEST_ADDEND), rng.randint(0, LARGEST_ADDEND)),
    "bigger": lambda rng: bigger(*_compared(rng)),
    "last": lambda rng: last(_words(rng, 3)),
    "first": lambda rng: first(_words(rng, 3)),
    "count": lambda rng: count(_words(rng, rng.randint(2, LONGEST_LIST))),
}
"""Family name -> a function that draws one question of it."""


def draw_question(rng: Random) -> Question:
    """Draw a question; every family has the same chance."""
    return FAMILIES[rng.choice(tuple(FAMILIES))](rng)


def memorised_questions() -> list[Question]:
    """Return all 66 questions of the four families that are facts to be memorised."""
    return [
        *map(colour, COLOURS),
        *map(kind, KINDS),
        *map(opposite, OPPOSITES),
        *map(capital, CAPITALS),
    ]


def sums() -> list[Question]:
    """Return all 100 additions."""
    numbers = range(LARGEST_ADDEND + 1)
    return [plus(one, other) for one in numbers for other in numbers]
