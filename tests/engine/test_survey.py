"""TIES over the whole model, and deltas kept for a sweep, through the engine on checkpoints on disk."""

from fractions import Fraction
from pathlib import Path

import pytest
import torch

from mergelab.engine import stream as stream_module
from mergelab.engine.deltas import UnscaledDeltas
from mergelab.engine.inputs import Inputs
from mergelab.engine.plan import operation
from mergelab.engine.stream import stream
from mergelab.engine.targets import LiveTarget
from merges.methods import SPECTRAL
from tests.builders import tiny_llama, tiny_llava
from tests.engine.test_stream import Trio, copy_of, vlm_rows_without_partner
from tests.oracles import merging as oracle


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Trio:
    root = tmp_path_factory.mktemp("trio")
    # bfloat16 weights have few magnitudes: the thresholds fall on ties, and many deltas are exactly 0.
    ancestor = tiny_llama(root / "ancestor", seed=0, dtype=torch.bfloat16)
    base = tiny_llama(root / "base", seed=1, start=ancestor, noise=0.01, dtype=torch.bfloat16)
    vlm = tiny_llava(root / "vlm", seed=2, start=base, noise=0.005, dtype=torch.bfloat16)
    return Trio({"ancestor": ancestor, "base": base, "vlm": vlm}, "float32")


def flat(trio: Trio, tensors: dict[str, torch.Tensor]) -> list[float]:
    """Return all merged entries in one list: rows that only the vlm has take no part."""
    own = vlm_rows_without_partner(trio)
    values: list[float] = []
    for job in trio.jobs:
        tensor = tensors[job.tensor.name]
        if job.tensor.rows is not None:
            tensor = tensor[[row for row in range(len(tensor)) if row not in own]]
        values += tensor.flatten().tolist()
    return values


@pytest.mark.parametrize(("twentieths", "block"), [(4, 1 << 22), (4, 37), (13, 100), (20, 1 << 22)])
def test_official_ties_end_to_end_is_the_flat_vector_in_float64(
    trio: Trio, monkeypatch: pytest.MonkeyPatch, twentieths: int, block: int
) -> None:
    monkeypatch.setattr(stream_module, "BLOCK_ENTRIES", block)
    monkeypatch.setattr(stream_module, "SPAN_ENTRIES", min(block, 37))
    values = {"density": twentieths / 20, "lambda": 0.7}
    found = trio.merged(operation("ties", values, "ancestor", conventions="official"))
    parents = {role: flat(trio, trio.merged(copy_of(role))) for role in ("ancestor", "base", "vlm")}
    expected = oracle.official_ties(
        parents["ancestor"], [parents["base"], parents["vlm"]], [1.0, 1.0], 0.7, Fraction(twentieths, 20)
    )
    torch.testing.assert_close(torch.tensor(flat(trio, found)), torch.tensor(expected), rtol=1e-6, atol=1e-8)


def test_asked_and_kept_counts_stand_in_the_record(trio: Trio) -> None:
    what = operation("ties", {"density": 0.2}, "ancestor", conventions="official")
    seen: list[tuple[int, int]] = []
    record = stream(
        trio.jobs, what, Inputs(trio.checkpoints), LiveTarget(trio.live()), lambda *now: seen.append(now)
    ).record()
    parents = {role: flat(trio, trio.merged(copy_of(role))) for role in ("ancestor", "base", "vlm")}
    num_entries = len(parents["base"])
    deltas = [oracle.subtract(parents[role], parents["ancestor"]) for role in ("base", "vlm")]
    kept = sum(value != 0 for delta in deltas for value in oracle.official_trim(delta, Fraction(1, 5)))
    assert record["asked_share"] == (num_entries // 5 + 1) / num_entries
    assert record["kept_share"] == kept / (2 * num_entries)
    assert kept > 2 * (num_entries // 5 + 1), "ties at the threshold are kept as well"
    for role, delta in zip(("base", "vlm"), deltas, strict=True):
        assert record["trim_thresholds"][role] == sorted(map(abs, delta), reverse=True)[num_entries // 5]
    assert record["majority_sign"] in (-1, 0, 1)
    assert seen[-1] == (4 * sum(job.num_entries for job in trio.jobs),) * 2, "three passes and the merge"


def test_without_a_survey_the_record_says_so(trio: Trio) -> None:
    what = operation("ties", {"density": 0.2}, "ancestor")
    record = stream(trio.jobs, what, Inputs(trio.checkpoints), LiveTarget(trio.live())).record()
    assert record["trim_thresholds"] is None
    assert record["majority_sign"] is None


def test_tied_embeddings_count_once(tmp_path: Path) -> None:
    folders = {"base": tiny_llama(tmp_path / "base", seed=1, tokens=None, tie_word_embeddings=True)}
    folders["vlm"] = tiny_llama(tmp_path / "vlm", seed=2, start=folders["base"], tokens=None, tie_word_embeddings=True)
    pair = Trio(folders)
    what = operation("ties", {"density": 0.5}, "base", conventions="official")
    record = stream(pair.jobs, what, Inputs(pair.checkpoints), LiveTarget(pair.live())).record()
    assert "lm_head.weight" not in {job.tensor.name for job in pair.jobs}
    num_entries = sum(job.num_entries for job in pair.jobs)
    assert record["asked_share"] == (num_entries // 2 + 1) / num_entries


def test_excluded_kinds_stay_the_vlms_and_are_not_counted(trio: Trio) -> None:
    excluded = ["embedding", "head", "norm"]
    values = {"density": 0.5, "exclude": excluded}
    for conventions in ("paper", "official"):
        what = operation("ties", values, "ancestor", conventions=conventions)
        live = trio.live()
        record = stream(trio.jobs, what, Inputs(trio.checkpoints), LiveTarget(live)).record()
        vlm = trio.merged(copy_of("vlm"))
        for job in trio.jobs:
            same = torch.equal(live[job.tensor.name], vlm[job.tensor.name])
            assert same == (job.tensor.kind in excluded), job.tensor.name
        num_entries = sum(job.num_entries for job in trio.jobs if job.tensor.kind not in excluded)
        assert record["asked_share"] == pytest.approx(0.5, abs=2 / num_entries if conventions == "official" else 0.01)


@pytest.mark.parametrize("method", SPECTRAL)
@pytest.mark.parametrize("limit", [None, 0, 2000])
def test_a_sweep_over_lambda_decomposes_once_and_changes_no_bit(
    trio: Trio, monkeypatch: pytest.MonkeyPatch, method: str, limit: int | None
) -> None:
    deltas, inputs = UnscaledDeltas(limit), Inputs(trio.checkpoints)
    calls: list[str] = []
    original = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: (calls.append(method), original(matrix))[1])
    counts = []
    for scale in (0.3, 0.5, 1.0):
        what = operation(method, {"lambda": scale}, "ancestor")
        expected = trio.merged(what)
        calls.clear()
        live = trio.live()
        stream(trio.jobs, what, inputs, LiveTarget(live), deltas=deltas)
        counts.append(len(calls))
        for name, tensor in live.items():
            assert torch.equal(tensor, expected[name]), name
    assert counts[0] > 0
    if limit is None:
        assert counts[1:] == [0, 0]
    elif limit == 0:
        assert counts[0] == counts[1] == counts[2]
    else:
        assert 0 < counts[1] < counts[0]
    stream(
        trio.jobs,
        operation(method, {"lambda": 1.0, "weights": {"base": 1, "vlm": 0.5}}, "ancestor"),
        inputs,
        LiveTarget(live),
        deltas=deltas,
    )
    other = trio.merged(operation(method, {"lambda": 1.0, "weights": {"base": 1, "vlm": 0.5}}, "ancestor"))
    for name, tensor in live.items():
        assert torch.equal(tensor, other[name]), name
