"""Every error a user can cause or meet, each with the exit code the command line ends with.

Messages have three parts in this order: where (file, key, tensor); what was expected and what was found; what to
do. All problems of one kind are collected and raised together, before any work is spent.
"""

from __future__ import annotations

from collections.abc import Iterable


class MergelabError(Exception):
    """Base of all errors that are not bugs of ours."""

    exit_code = 1


class UsageError(MergelabError):
    """The command line asks for something that makes no sense."""

    exit_code = 2


class RecipeError(MergelabError):
    """A recipe, pair, prompts or task file is missing or says something invalid."""

    exit_code = 3


class PairingError(MergelabError):
    """The checkpoints do not fit each other: names, shapes, dtypes or vocabularies."""

    exit_code = 4


class DamagedFileError(MergelabError):
    """Model or record files are missing, damaged or incomplete."""

    exit_code = 5


class MachineError(MergelabError):
    """This machine lacks something: an extra, a resource, a device, disk space, the network."""

    exit_code = 6


class SweepError(MergelabError):
    """A sweep ended with failed points."""

    exit_code = 7


class OutputFolderError(MergelabError):
    """The output folder is foreign, not empty, or in use."""

    exit_code = 8


def problem_list(heading: str, problems: Iterable[str], advice: str = "") -> str:
    """Lay out several problems as one message: a heading, a line for each, and what to do."""
    lines = [heading, *(f"  - {problem}" for problem in problems)]
    return "\n".join([*lines, advice] if advice else lines)
