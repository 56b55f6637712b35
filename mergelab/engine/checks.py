"""Conditions of a pairing that names cannot settle: tensors that must be equal, tokens that must share a row."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mergelab.checkpoints.headers import Checkpoint
from mergelab.checkpoints.reader import read_entries
from mergelab.engine.plan import BLOCK_ENTRIES
from mergelab.errors import PairingError, problem_list
from mergelab.towers.pairing import Pairing


def check_equal_tensors(pairing: Pairing, checkpoints: Mapping[str, Checkpoint]) -> None:
    """Compare, block by block, the tensors that must be equal for the pairing to hold.

    Raises:
        PairingError: With every pair that differs.
    """
    problems = []
    for condition in pairing.must_equal:
        first, second = (checkpoints[role].header(name) for role, name in (condition.first, condition.second))
        equal = first.shape == second.shape and first.dtype == second.dtype
        for start in range(0, first.num_entries if equal else 0, BLOCK_ENTRIES):
            stop = min(start + BLOCK_ENTRIES, first.num_entries)
            if not torch.equal(read_entries(first, start, stop), read_entries(second, start, stop)):
                equal = False
                break
        if not equal:
            names = " and ".join(f"{name} of {role}" for role, name in (condition.first, condition.second))
            problems.append(f"{names} differ: {condition.reason}")
    if problems:
        raise PairingError(
            problem_list("These tensors must be equal for a merge to mean anything:", problems, "Pick another base.")
        )


def check_same_rows(pairing: Pairing) -> None:
    """Refuse a tower that base's tokenizer does not address: shared tokens must have the same row in all models.

    Merging rows by token needs no such thing. Scoring text, or writing a text checkpoint, with base's tokenizer
    does: it would name one token and read the weights of another.

    Raises:
        PairingError: A shared token has another row in the vlm or ancestor than in base.
    """
    problems = []
    for paired in pairing.tensors:
        for role in paired.rows.rows if paired.rows is not None else ():
            assert paired.rows is not None
            both = zip(paired.rows.rows["base"], paired.rows.rows[role], strict=True)
            moved = [(mine, theirs) for mine, theirs in both if mine != theirs]
            if moved:
                mine, theirs = moved[0]
                problems.append(
                    f"{paired.name}: {len(moved)} shared tokens lie in other rows of {role} than of base, the "
                    f"first in row {theirs} instead of {mine}"
                )
    if problems:
        raise PairingError(
            problem_list(
                "Text is read with base's tokenizer, whose tokens have other rows in these models:",
                problems,
                "`mergelab merge --as vlm` keeps the vlm's tokenizer and is possible.",
            )
        )
