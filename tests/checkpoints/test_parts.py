"""Weights inside fused tensors: read and written through views, bit for bit, in any order, from several threads."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from mergelab.checkpoints.headers import open_checkpoint
from mergelab.checkpoints.reader import read_entries, read_tensor
from mergelab.checkpoints.writer import CheckpointWriter, TensorPlan
from mergelab.strides import MIN_RUN, View, rows_of
from tests.builders import hand_made

WIDE = MIN_RUN
Cut = Callable[[torch.Tensor], dict[str, torch.Tensor]]

FUSED: dict[str, tuple[tuple[int, ...], dict[str, View], Cut]] = {
    "rows": (
        (7, 3),
        {"a": rows_of((7, 3), 0, 4), "b": rows_of((7, 3), 4, 3)},
        lambda t: {"a": t[:4], "b": t[4:]},
    ),
    "grouped": (
        (12, WIDE),
        {
            "q": View((6, WIDE), 0, (2, 3 * WIDE), (6 * WIDE, 1)),
            "k": View((6, WIDE), 3 * WIDE, (2, 3 * WIDE), (6 * WIDE, 1)),
        },
        lambda t: {"q": t.view(2, 6, WIDE)[:, :3].reshape(6, WIDE), "k": t.view(2, 6, WIDE)[:, 3:].reshape(6, WIDE)},
    ),
    "transposed": (
        (2, 5, 6),
        {f"{e}{h}": View((3, 5), 30 * e + 3 * h, (3, 5), (1, 6)) for e in range(2) for h in range(2)},
        lambda t: {f"{e}{h}": t[e, :, 3 * h : 3 * h + 3].T for e in range(2) for h in range(2)},
    ),
    "interleaved": (
        (2, 5, 6),
        {f"{e}{h}": View((3, 5), 30 * e + h, (3, 5), (2, 6)) for e in range(2) for h in range(2)},
        lambda t: {f"{e}{h}": t[e, :, h::2].T for e in range(2) for h in range(2)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FUSED)
def test_parts_are_read_as_indexing_gives_them(tmp_path: Path, name: str) -> None:
    shape, views, cut = FUSED[name]
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    folder = hand_made(tmp_path / "m", {"first": torch.zeros(5), "fused": whole})
    checkpoint = open_checkpoint(folder).with_parts({f"fused[{part}]": ("fused", v) for part, v in views.items()})
    for part, expected in cut(whole).items():
        header = checkpoint.header(f"fused[{part}]")
        assert torch.equal(read_tensor(header), expected)
        for start, stop in ((0, 1), (1, 4), (2, header.num_entries), (3, 3), (4, 9)):
            assert torch.equal(read_entries(header, start, stop), expected.reshape(-1)[start:stop])
        with pytest.raises(ValueError, match="entries 0 to"):
            read_entries(header, 0, header.num_entries + 1)
    assert checkpoint.num_bytes == open_checkpoint(folder).num_bytes


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("block", [4, 7 * WIDE])
def test_parts_written_in_any_order_by_threads_give_the_tensor(tmp_path: Path, name: str, block: int) -> None:
    shape, views, cut = FUSED[name]
    if shape[-1] == WIDE and block == 4:
        block = WIDE + 3
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    parts = cut(whole)
    blocks = [(part, start) for part, tensor in parts.items() for start in range(0, tensor.numel(), block)]
    random.Random(0).shuffle(blocks)
    plans = [TensorPlan("fused", "BF16", shape), TensorPlan("other", "F32", (3,))]
    with CheckpointWriter(tmp_path / "m", plans, parts={p: ("fused", v) for p, v in views.items()}) as writer:
        with ThreadPoolExecutor(4) as pool:
            for done in [
                pool.submit(writer.write, part, start, parts[part].reshape(-1)[start : start + block])
                for part, start in blocks
            ]:
                done.result()
        writer.write("other", 0, torch.ones(3))
        writer.add_file("config.json", b"{}")
    assert torch.equal(read_tensor(open_checkpoint(tmp_path / "m").tensors["fused"]), whole)


def test_part_that_was_not_written_refuses_to_commit(tmp_path: Path) -> None:
    _, views, _ = FUSED["rows"]
    parts = {name: ("fused", view) for name, view in views.items()}
    with (
        pytest.raises(ValueError, match="b at entry 6 of 9"),
        CheckpointWriter(tmp_path / "m", [TensorPlan("fused", "F32", (7, 3))], parts=parts) as writer,
    ):
        writer.write("a", 0, torch.zeros(12))
        writer.write("b", 0, torch.zeros(6))
    assert not (tmp_path / "m").exists()


def test_parts_that_are_not_the_whole_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="its parts have 12 of 21 entries"):
        CheckpointWriter(
            tmp_path / "m", [TensorPlan("fused", "F32", (7, 3))], parts={"a": ("fused", FUSED["rows"][1]["a"])}
        )
    checkpoint = open_checkpoint(hand_made(tmp_path / "h", {"fused": torch.zeros(6, 3)}))
    with pytest.raises(ValueError, match="no part of fused"):
        checkpoint.with_parts({"fused[b]": ("fused", FUSED["rows"][1]["b"])})
