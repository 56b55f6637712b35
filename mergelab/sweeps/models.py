"""The models of a pair, opened and paired from their headers alone. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mergelab.checkpoints.fingerprint import fingerprint_checkpoint
from mergelab.checkpoints.headers import Checkpoint, open_checkpoint
from mergelab.checkpoints.hub import resolve_source
from mergelab.checkpoints.remote import open_source
from mergelab.config.pair import Pair
from mergelab.errors import DamagedFileError, MergelabError, problem_list
from mergelab.towers.pairing import Pairing, pair_checkpoints


@dataclass(frozen=True)
class Models:
    """Opened checkpoints by role, and how the tower's tensors pair with those of base and ancestor."""

    checkpoints: Mapping[str, Checkpoint]
    pairing: Pairing
    accept_unrelated: bool = False
    """Whether to merge them although their weights have nothing in common."""

    @property
    def sees_pictures(self) -> bool:
        """True if the vlm has more than a text tower; a plain text checkpoint may stand as vlm."""
        return self.pairing.towers["vlm"].sees_pictures

    def fingerprints(self) -> dict[str, str]:
        """Return the content hash of every model's weights, by role; reads them all unless they are remembered."""
        return {role: fingerprint_checkpoint(checkpoint) for role, checkpoint in self.checkpoints.items()}

    def num_parameters(self, role: str) -> int:
        """Return the stored entries of a model; of the vlm, those of its tower."""
        if role == "vlm":
            return sum(math.prod(paired.shape) for paired in self.pairing.tensors)
        return sum(math.prod(header.shape) for header in self.checkpoints[role].tensors.values())

    def num_bytes(self, role: str) -> int:
        """Return the bytes of a model's weights on disk."""
        return sum(header.end - header.start for header in self.checkpoints[role].tensors.values())


def open_models(
    pair: Pair,
    say: Callable[[str], None] = lambda line: None,
    accept_unrelated: bool = False,
    headers_only: bool = False,
) -> Models:
    """Open every model of a pair and pair their tensors.

    Models on the hub are paired from their headers before any of their weights are fetched.

    Args:
        pair: The pair; a model is a folder or a hub id.
        say: Told what will be downloaded, with its size, before it is.
        accept_unrelated: Kept for whoever looks at the weights.
        headers_only: Leave the weights of models on the hub there.

    Raises:
        MergelabError: A model is missing, damaged, or does not fit the others. Problems of several models of one
            kind come in one message.
    """
    checkpoints: dict[str, Checkpoint] = {}
    problems: list[MergelabError] = []
    for role, source in pair.sources.items():
        try:
            checkpoints[role] = open_source(source.location, source.revision, announce=say)
        except MergelabError as error:
            problems.append(error)
    if len(problems) == 1:
        raise problems[0]
    if problems:
        kind = type(problems[0]) if len({type(problem) for problem in problems}) == 1 else DamagedFileError
        raise kind(problem_list(f"pair {pair.name}:", [str(problem) for problem in problems]))
    for name, checkpoint in checkpoints.items():
        if checkpoint.is_pickled:
            say(f"{name}: {checkpoint.shards[0].name} is pickled; it is read through torch's weights-only loading")
    pairing = pair_checkpoints(checkpoints)
    if not headers_only and any(checkpoint.fetch for checkpoint in checkpoints.values()):
        for role, source in pair.sources.items():
            if checkpoints[role].fetch:
                checkpoints[role] = open_checkpoint(resolve_source(source.location, source.revision, announce=say))
        pairing = pair_checkpoints(checkpoints)
    return Models(checkpoints, pairing, accept_unrelated)
