"""Conditions of a pairing that names cannot settle: tensors that must be equal, and models that must be related."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

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


UNRELATED_COSINE = 0.2
"""Below this median cosine two models share no training: independent weights give 0, fine-tuning leaves over 0.9."""

SAMPLED_TENSORS = 16
SAMPLED_ENTRIES = 1 << 16


def check_related(pairing: Pairing, checkpoints: Mapping[str, Checkpoint]) -> None:
    """Refuse models of equal shapes that do not come from one another.

    Compares the first 65,536 entries of 16 linear weights spread over the layers: the cosine between the vlm and
    every other model, median over the tensors.

    Raises:
        PairingError: A model whose median cosine to the vlm is below 0.2.
    """
    linear = [paired for paired in pairing.tensors if paired.kind in ("attention", "mlp")]
    linear = linear[:: max(1, len(linear) // SAMPLED_TENSORS)][:SAMPLED_TENSORS]
    problems = []
    for role in checkpoints:
        cosines = []
        for paired in linear if role != "vlm" else ():
            mine, vlm = (
                read_entries(header, 0, min(SAMPLED_ENTRIES, header.num_entries)).float()
                for header in (checkpoints[who].tensors[paired.stored[who]] for who in (role, "vlm"))
            )
            cosines.append(float(torch.nn.functional.cosine_similarity(mine, vlm, dim=0)))
        if cosines and median(cosines) < UNRELATED_COSINE:
            problems.append(
                f"{role} {checkpoints[role].folder}: its weights have nothing in common with the vlm's "
                f"(median cosine {median(cosines):.2f} over {len(cosines)} tensors, expected near 1)"
            )
    if problems:
        raise PairingError(
            problem_list(
                f"vlm {checkpoints['vlm'].folder}: shapes fit, the models do not:",
                problems,
                "Pick the models that the vlm was made from; a merge of unrelated weights is noise.",
            )
        )
