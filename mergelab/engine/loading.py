"""What a piece of a merge reads: the stored entries of every model, at once or span by span."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from mergelab.checkpoints.safetensors_format import DTYPE_BITS
from mergelab.engine.inputs import Inputs
from mergelab.engine.pieces import Piece, Span

WHOLE_TENSOR_WORK = 24
"""Bytes an entry that a method on whole tensors is reckoned to need besides its input: float64 and a few copies."""


@dataclass(frozen=True)
class Loaded:
    """The stored entries of a piece.

    ``held`` has the merged entries by role, and ``own`` the vlm's where some rows are copied. Both are None for a
    tensor that is too large to be held; its spans are read again whenever they are needed.
    """

    piece: Piece
    inputs: Inputs
    held: Mapping[str, torch.Tensor] | None
    own: torch.Tensor | None

    def merged(self, role: str, span: Span) -> torch.Tensor:
        """Return the entries of one model that are merged: float32, flat, on the device of the arithmetic."""
        if self.held is not None:
            stored = self.held[role][span.low : span.high]
        else:
            stored = merged_entries(self.piece, self.inputs, role, span.low, span.high)
        return stored.to(self.inputs.device, non_blocking=True).to(torch.float32)

    def copied(self, span: Span) -> torch.Tensor:
        """Return the vlm's own entries of a span, flat, in the stored dtype, on the device of the arithmetic."""
        if self.own is not None:
            stored = self.own[span.start : span.stop]
        else:
            start = self.piece.start
            stored = self.inputs.entries(
                "vlm", self.piece.job.tensor.stored["vlm"], start + span.start, start + span.stop
            )
        return stored.to(self.inputs.device, non_blocking=True)

    def roles_stored_as(self, dtype: str) -> set[str]:
        """Return the models that store this tensor in the dtype of this code."""
        return {
            role
            for role, name in self.piece.job.tensor.stored.items()
            if role in self.inputs.checkpoints and self.inputs.header(role, name).dtype == dtype
        }

    def merged_rows(self, span: Span) -> torch.Tensor:
        """Return the rows of a span that are merged, counted from its first row, on the device of the arithmetic."""
        piece = self.piece
        assert piece.rows is not None and piece.job.tensor.rows is not None
        first, top = piece.rows.start, (piece.start + span.start) // piece.width
        merged = piece.job.tensor.rows.rows["vlm"][first + span.low // piece.width : first + span.high // piece.width]
        return torch.tensor([row - top for row in merged], dtype=torch.long).to(self.inputs.device)


def load(piece: Piece, inputs: Inputs, roles: Sequence[str], hold: bool) -> Loaded:
    """Read the stored entries of a piece.

    With arithmetic on a GPU they are put into page-locked memory, from which they are copied while other kernels run.

    Raises:
        PairingError: A tensor is not floating point; the message names it.
        DamagedFileError: A file changed since its header was checked.
    """
    stored = piece.job.tensor.stored
    for role in roles:
        inputs.check_float(role, stored[role])
    if not hold:
        return Loaded(piece, inputs, None, None)
    held = {role: merged_entries(piece, inputs, role, 0, piece.num_merged) for role in roles}
    own = None if piece.rows is None else inputs.entries("vlm", stored["vlm"], piece.start, piece.stop)
    if inputs.device.startswith("cuda"):
        held = {role: entries.pin_memory() for role, entries in held.items()}
        own = None if own is None else own.pin_memory()
    return Loaded(piece, inputs, held, own)


def merged_entries(piece: Piece, inputs: Inputs, role: str, low: int, high: int) -> torch.Tensor:
    """Return the merged entries ``low..high`` of a piece as one model stores them."""
    tensor = piece.job.tensor
    if piece.rows is None:
        return inputs.entries(role, tensor.stored[role], piece.start + low, piece.start + high)
    assert tensor.rows is not None
    first = piece.rows.start
    width = max(1, piece.width)
    rows = tensor.rows.rows[role][first + low // width : first + high // width]
    return inputs.rows(role, tensor.stored[role], rows, piece.width)


def held_bytes(piece: Piece, inputs: Inputs, roles: Sequence[str]) -> int:
    """Return the bytes that a piece takes while it is read, computed and written."""
    stored = piece.job.tensor.stored
    bits = sum(DTYPE_BITS[inputs.header(role, stored[role]).dtype] for role in roles)
    own = 0 if piece.rows is None else DTYPE_BITS[inputs.header("vlm", stored["vlm"]).dtype]
    output = DTYPE_BITS[piece.job.dtype]
    num_bytes = (piece.num_merged * bits + (piece.stop - piece.start) * (own + output)) // 8
    if not piece.span_entries:
        num_bytes += piece.num_merged * (WHOLE_TENSOR_WORK + 4 * len(roles))
    return num_bytes
