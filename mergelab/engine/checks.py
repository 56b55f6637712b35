"""Conditions of a pairing that names cannot settle: tensors whose bytes have to be equal."""

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
        first, second = (checkpoints[role].tensors[name] for role, name in (condition.first, condition.second))
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
