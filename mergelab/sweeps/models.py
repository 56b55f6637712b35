"""The models of a pair, opened and paired from their headers alone. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from mergelab.checkpoints.fingerprint import fingerprint_checkpoint
from mergelab.checkpoints.headers import Checkpoint, open_checkpoint
from mergelab.checkpoints.hub import resolve_source
from mergelab.checkpoints.remote import open_source
from mergelab.config.pair import AUTO, Pair
from mergelab.errors import DamagedFileError, MergelabError, PairingError, problem_list
from mergelab.sweeps.identity import MAPPING, hash_family
from mergelab.sweeps.inferred import infer_family, report_pairing
from mergelab.towers.confidence import Report, UncertainPairing
from mergelab.towers.pairing import Pairing, pair_checkpoints
from mergelab.towers.rules import Family, find_family, shipped_families


@dataclass(frozen=True)
class Models:
    """Opened checkpoints by role, and how the tower's tensors pair with those of base and ancestor."""

    checkpoints: Mapping[str, Checkpoint]
    pairing: Pairing
    accept_unrelated: bool = False
    """Whether to merge them although their weights have nothing in common."""
    report: Report | None = None
    """How far the vlm's family was inferred; None: it is known."""
    mapping: str = ""
    """Hash of the family that maps the vlm's names, if it is inferred or a file; empty: what mergelab ships."""

    @property
    def sees_pictures(self) -> bool:
        """True if the vlm has more than a text tower; a plain text checkpoint may stand as vlm."""
        return self.pairing.towers["vlm"].sees_pictures

    def fingerprints(self) -> dict[str, str]:
        """Return the content hash of every model's weights, by role; reads them all unless they are remembered."""
        found = {role: fingerprint_checkpoint(checkpoint) for role, checkpoint in self.checkpoints.items()}
        return {**found, MAPPING: self.mapping} if self.mapping else found

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
    accept_inferred: bool = False,
    headers_only: bool = False,
) -> Models:
    """Open every model of a pair and pair their tensors.

    Models on the hub are paired from their headers before any of their weights are fetched.

    Args:
        pair: The pair; a model is a folder or a hub id.
        say: Told what will be downloaded, with its size, before it is.
        accept_unrelated: Kept for whoever looks at the weights.
        accept_inferred: Go on although how the vlm's names map to base's was inferred with low confidence.
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
    models = pair_models(pair, checkpoints, accept_inferred)
    if not headers_only and any(checkpoint.on_hub for checkpoint in checkpoints.values()):
        for role, source in pair.sources.items():
            if checkpoints[role].on_hub:
                checkpoints[role] = open_checkpoint(resolve_source(source.location, source.revision, announce=say))
        models = pair_models(pair, checkpoints, accept_inferred)
    if models.report is not None:
        say(
            f"vlm: of no known family; its names were mapped by inference, with {models.report.verdict} confidence "
            "(mergelab check shows how)"
        )
    return replace(models, accept_unrelated=accept_unrelated)


def pair_models(pair: Pair, checkpoints: Mapping[str, Checkpoint], accept_inferred: bool = False) -> Models:
    """Pair opened checkpoints: by the family that the pair names, else by what is known, else by inference.

    Raises:
        RecipeError: There is no such family, or its file is not valid.
        PairingError: The models do not fit.
        UncertainPairing: The vlm's family was inferred with low confidence, and that is not accepted.
    """
    if pair.family != AUTO:
        family = find_family(pair.family)
        mapping = "" if family in shipped_families() else hash_family(family)
        return Models(*paired(checkpoints, {"vlm": family}), mapping=mapping)
    try:
        return Models(*paired(checkpoints))
    except PairingError as refusal:
        return infer_models(checkpoints, refusal, accept_inferred)


def infer_models(checkpoints: Mapping[str, Checkpoint], refusal: PairingError, accept_inferred: bool) -> Models:
    """Pair checkpoints by inference, or raise the refusal of those who know families, with why that failed too."""
    try:
        inferred = infer_family(checkpoints)
        parted, pairing = paired(checkpoints, {"vlm": inferred.family})
    except PairingError as error:
        if str(error) == str(refusal):
            raise refusal from None
        raise type(refusal)(f"{refusal}\nNor could its names be inferred: {error}") from None
    report = report_pairing(inferred, pairing, parted)
    if report.verdict == "low" and not accept_inferred:
        raise UncertainPairing(report, f"vlm {checkpoints['vlm'].folder}")
    return Models(parted, pairing, report=report, mapping=hash_family(inferred.family))


def paired(
    checkpoints: Mapping[str, Checkpoint], families: Mapping[str, Family] | None = None
) -> tuple[dict[str, Checkpoint], Pairing]:
    """Return the pairing of checkpoints, and the checkpoints with the parts of fused tensors that it speaks of.

    Raises:
        PairingError: They do not fit.
    """
    pairing = pair_checkpoints(checkpoints, families)
    return {
        role: checkpoint.with_parts({name: (part.stored, part.view) for name, part in pairing.views[role].items()})
        for role, checkpoint in checkpoints.items()
    }, pairing
