"""Mutated headers against the format's own reader, and the encoder against its own parser."""

import json
import random
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from mergelab.checkpoints.safetensors_format import TensorHeader, encode_header, read_headers

REPLACEMENTS = [
    b"0",
    b"9",
    b"-1",
    b"null",
    b"[",
    b"]",
    b"{",
    b"}",
    b'"',
    b",",
    b":",
    b"\xff",
    b"",
    b"1e9",
    b"true",
    b"F16",
]


def mutate(raw: bytes, draw: random.Random) -> bytes:
    """Change a few bytes of the length or the header, sometimes the file's length."""
    length = struct.unpack("<Q", raw[:8])[0]
    for _ in range(draw.randint(1, 3)):
        kind = draw.randrange(4)
        position = draw.randrange(8 + length)
        if kind == 0:
            raw = raw[:position] + bytes([draw.randrange(256)]) + raw[position + 1 :]
        elif kind == 1:
            new = draw.choice(REPLACEMENTS)
            header = raw[8 : 8 + length]
            at = draw.randrange(len(header))
            header = header[:at] + new + header[at + draw.randint(0, 2) :]
            raw = struct.pack("<Q", len(header)) + header + raw[8 + length :]
            length = len(header)
        elif kind == 2:
            raw = raw[: draw.randrange(len(raw))]
            return raw
        else:
            raw = struct.pack("<Q", max(0, length + draw.randint(-9, 9))) + raw[8:]
    return raw


def theirs(path: Path) -> dict[str, tuple[str, tuple[int, ...]]] | None:
    """What the reader of the safetensors package finds, None if it refuses."""
    try:
        with safe_open(path, "pt") as file:
            names = file.keys()
            return {n: (file.get_slice(n).get_dtype(), tuple(file.get_slice(n).get_shape())) for n in names}
    except Exception:
        # Its refusals have no common class: SafetensorError, UnicodeDecodeError, OSError.
        return None


@pytest.mark.parametrize("seed", range(10))
def test_no_mutated_file_is_accepted_that_the_reference_refuses(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(3, 2), "b": torch.zeros(5, dtype=torch.bfloat16), "c": torch.zeros(0)}, path)
    original = path.read_bytes()
    refused = 0
    for _ in range(60):
        path.write_bytes(mutate(original, draw))
        headers, problems = read_headers(path)
        expected = theirs(path)
        if problems:
            refused += 1
        else:
            assert expected == {header.name: (header.dtype, header.shape) for header in headers}, path.read_bytes()
    assert refused > 30


def test_unmutated_file_agrees_with_the_reference(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(3, 2), "b": torch.zeros(5, dtype=torch.bfloat16)}, path)
    headers, problems = read_headers(path)
    assert not problems
    assert theirs(path) == {header.name: (header.dtype, header.shape) for header in headers}


def test_encoded_header_is_aligned_and_reads_back(tmp_path: Path) -> None:
    tensors = [("b", "F32", (3,)), ("ä", "BF16", (5, 1)), ("empty", "I64", (0,)), ("scalar", "U8", ())]
    raw, starts = encode_header(tensors)
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw + bytes(12 + 10 + 1))
    headers, problems = read_headers(path)
    assert not problems
    assert len(raw) % 8 == 0
    assert starts == [len(raw), len(raw) + 12, len(raw) + 22, len(raw) + 22]
    assert json.loads(raw[8:])["__metadata__"] == {"format": "pt"}
    assert {header.name: header for header in headers} == {
        name: TensorHeader(name, dtype, shape, path, start, start + size)
        for (name, dtype, shape), start, size in zip(tensors, starts, (12, 10, 0, 1), strict=True)
    }
