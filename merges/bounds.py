"""What one value of a parameter may be: a number in a range, words of a list, a flag, weights per model.

Each kind tells what is wrong with a value in one sentence, and says its range in words for the user. The
parameters of the methods stand in ``parameters``. Standard library only.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


class ParameterErrors(ValueError):
    """Parameters that make no sense, all of them together.

    Attributes:
        problems: One sentence for each, beginning with the name of the parameter.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


def _is_finite_number(value: object) -> bool:
    # A comparison, because math.isfinite raises on integers beyond the range of floats.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _shown(value: object) -> str:
    return f"the text {value!r}" if isinstance(value, str) else repr(value)


@dataclass(frozen=True)
class Number:
    """A finite number from ``low`` to ``high``; an open end is not itself allowed."""

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False
    type_name: str = "number"

    def text(self) -> str:
        """Return the range in words, such as ``in (0, 1]``."""
        if math.isinf(self.low) and math.isinf(self.high):
            return "any finite number"
        if math.isinf(self.high):
            return f"{'above' if self.low_open else 'at least'} {self.low:g}"
        return f"in {'(['[not self.low_open]}{self.low:g}, {self.high:g}{')]'[not self.high_open]}"

    def problem(self, name: str, value: object) -> str | None:
        """Return what is wrong with ``value`` as the parameter ``name``, or None."""
        if not isinstance(value, int | float) or isinstance(value, bool):
            return f"{name}: expected a number {self.text()}, found {_shown(value)}"
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        if not (_is_finite_number(value) and above and below):
            return f"{name}: expected {self.text()}, found {value!r}"
        return None


@dataclass(frozen=True)
class Whole:
    """A whole number of at least ``low``."""

    low: int = 0
    type_name: str = "whole number"

    def text(self) -> str:
        """Return the range in words."""
        return f"a whole number of at least {self.low}"

    def problem(self, name: str, value: object) -> str | None:
        """Return what is wrong with ``value`` as the parameter ``name``, or None."""
        if isinstance(value, int) and not isinstance(value, bool) and value >= self.low:
            return None
        return f"{name}: expected {self.text()}, found {_shown(value)}"


@dataclass(frozen=True)
class Choice:
    """One word of a list; ``refused`` holds known words that are not available, each with its reason."""

    options: tuple[str, ...]
    refused: Mapping[str, str] = field(default_factory=dict)
    type_name: str = "word"

    def text(self) -> str:
        """Return the words in a row."""
        return " | ".join(self.options)

    def problem(self, name: str, value: object) -> str | None:
        """Return what is wrong with ``value`` as the parameter ``name``, or None."""
        if isinstance(value, str) and value in self.options:
            return None
        if isinstance(value, str) and value in self.refused:
            return f"{name}: {value} is not available: {self.refused[value]}"
        return f"{name}: expected {self.text()}, found {_shown(value)}"


@dataclass(frozen=True)
class Flag:
    """True or false."""

    type_name: str = "flag"

    def text(self) -> str:
        """Return the two values."""
        return "true | false"

    def problem(self, name: str, value: object) -> str | None:
        """Return what is wrong with ``value`` as the parameter ``name``, or None."""
        return None if isinstance(value, bool) else f"{name}: expected true or false, found {_shown(value)}"


@dataclass(frozen=True)
class Weights:
    """A finite number for each model role, or None for 1 each."""

    type_name: str = "weights"

    def text(self) -> str:
        """Return the form in words."""
        return "a finite number per model, such as {base: 1.0, vlm: 1.0}"

    def problem(self, name: str, value: object) -> str | None:
        """Return what is wrong with ``value`` as the parameter ``name``, or None."""
        if value is None:
            return None
        if not isinstance(value, Mapping) or not value:
            return f"{name}: expected {self.text()}, found {_shown(value)}"
        wrong = [
            f"{role}: {_shown(weight)}"
            for role, weight in value.items()
            if not (isinstance(role, str) and _is_finite_number(weight))
        ]
        return f"{name}: expected {self.text()}, found {', '.join(wrong)}" if wrong else None


@dataclass(frozen=True)
class Words:
    """Any number of different words of a list, none of them included."""

    options: tuple[str, ...]
    type_name: str = "words"

    def text(self) -> str:
        """Return the words in a row."""
        return f"a list of {', '.join(self.options)}"

    def problem(self, name: str, value: object) -> str | None:
        """Return what is wrong with ``value`` as the parameter ``name``, or None."""
        if not isinstance(value, list | tuple):
            return f"{name}: expected {self.text()}, found {_shown(value)}"
        wrong = [_shown(word) for word in value if word not in self.options]
        if wrong:
            return f"{name}: expected {self.text()}, found {', '.join(wrong)}"
        twice = sorted({word for word in value if value.count(word) > 1})
        return f"{name}: {', '.join(twice)} given twice" if twice else None


Bounds = Number | Whole | Choice | Flag | Weights | Words
