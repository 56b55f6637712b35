"""The ancestry digest on checkpoints: reads sampled rows, and stops a merge that would mean nothing."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from mergelab.checkpoints.headers import Checkpoint
from mergelab.checkpoints.reader import read_entries
from mergelab.checkpoints.safetensors_format import TensorHeader
from mergelab.errors import PairingError, problem_list
from mergelab.towers.ancestry import STOPPING, Block, Digest, digest_ancestry, linear_modules
from mergelab.towers.pairing import Pairing

STRETCHES = 4
STRETCH_ROWS = 16
"""Of every sampled matrix: 64 rows in four stretches, so that a wrong order of rows shows."""


def ancestry_digest(pairing: Pairing, checkpoints: Mapping[str, Checkpoint]) -> Digest:
    """Judge from sampled rows how the tower is related to base and ancestor; see ``towers.ancestry``.

    Raises:
        DamagedFileError: A file changed since its header was checked.
    """
    stored = {paired.name: paired.stored for paired in pairing.tensors}

    def read(role: str, name: str) -> Block:
        return sampled_rows(checkpoints[role].header(stored[name][role]))

    roles = [role for role in ("ancestor", "base") if role in checkpoints]
    return digest_ancestry(linear_modules(pairing.tensors), roles, read)


def sampled_rows(header: TensorHeader) -> Block:
    """Return the sampled rows of a matrix: all of up to 64, else four evenly spread stretches of 16."""
    rows, width = header.shape[0], header.num_entries // header.shape[0]
    if rows <= STRETCHES * STRETCH_ROWS:
        starts, height = [0], rows
    else:
        starts = [round(step * (rows - STRETCH_ROWS) / (STRETCHES - 1)) for step in range(STRETCHES)]
        height = STRETCH_ROWS
    places = [start * width for start in starts]

    def stretch(place: int) -> torch.Tensor:
        return read_entries(header, place, place + height * width)

    scattered = header.view is not None and not all(piece.is_run for piece in header.view.whole.pieces())
    if scattered:  # every stretch of a transposed expert lies all over it
        whole = read_entries(header, 0, header.num_entries)
        blocks = [whole[place : place + height * width] for place in places]
    elif header.fetch is None:
        blocks = [stretch(place) for place in places]
    else:  # the hub answers several requests in the time of one
        with ThreadPoolExecutor(STRETCHES) as pool:
            blocks = list(pool.map(stretch, places))
    return np.asarray(torch.cat(blocks).to(torch.float32).numpy())


def check_related(pairing: Pairing, checkpoints: Mapping[str, Checkpoint], accept: bool = False) -> Digest:
    """Refuse models whose merge would mean nothing: unrelated, or with tensors in the wrong place.

    Args:
        pairing: The total pairing of the models.
        checkpoints: The models by role.
        accept: Go on all the same; the digest still says what was found.

    Raises:
        PairingError: A stopping verdict on base or ancestor, and ``accept`` is false.
    """
    digest = ancestry_digest(pairing, checkpoints)
    if digest.stops and not accept:
        raise PairingError(
            problem_list(
                f"vlm {checkpoints['vlm'].folder}: shapes fit, the models do not:",
                [
                    f"{role} {checkpoints[role].folder}: {relation.verdict}: {relation.reason}"
                    for role, relation in digest.relations.items()
                    if relation.verdict in STOPPING
                ],
                "Pick the models that the vlm was made from; a merge of unrelated weights is noise. `mergelab check` "
                "shows the numbers; run and merge go on with --accept-unrelated.",
            )
        )
    return digest


def ancestry_summary(digest: Digest, accepted: bool) -> dict[str, Any]:
    """Return what a record keeps: the verdict, and whether a stopping one was overruled."""
    return {
        "verdict": digest.verdict,
        "reason": digest.reason,
        "projection": digest.projection,
        "accepted_unrelated": accepted and digest.stops,
    }
