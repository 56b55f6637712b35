"""The stream: blocks or whole, live or on disk, the same bits; ends exact; statistics counted."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mergelab.checkpoints.fingerprint import fingerprint_checkpoint
from mergelab.checkpoints.headers import Checkpoint, open_checkpoint
from mergelab.checkpoints.reader import torch_dtype
from mergelab.engine import stream as stream_module
from mergelab.engine.checks import check_same_rows
from mergelab.engine.inputs import Inputs, free_memory_bytes
from mergelab.engine.plan import COPY, Operation, TensorJob, operation, plan_jobs
from mergelab.engine.statistics import MergeStatistics
from mergelab.engine.stream import stream
from mergelab.engine.targets import LiveTarget, hash_live
from mergelab.errors import PairingError
from mergelab.towers.pairing import pair_checkpoints
from tests.builders import IMAGE_TOKEN, WORDS, hand_made, text_tensors, tiny_llama, tiny_llava

OFFICIAL = {
    "density": 0.3,
    "trim_scope": "model",
    "kept_count": "threshold",
    "zero_sum": "majority",
    "divisor": "count",
}

METHODS: list[tuple[str, dict[str, object]]] = [
    ("task_arithmetic", {"lambda": 0.7}),
    ("linear", {"weights": {"base": 0.25, "vlm": 0.75}}),
    ("ties", {"density": 0.3, "lambda": 0.8}),
    ("dare_linear", {"drop_rate": 0.5, "lambda": 0.5}),
    ("dare_ties", {"drop_rate": 0.5, "lambda": 0.5}),
    ("tsv", {"lambda": 1.0}),
    ("star", {"lambda": 0.5}),
    ("iso_c", {"lambda": 0.5, "svd_scope": "matrices"}),
    ("slerp", {"t": 0.3}),
    ("ties", OFFICIAL),
    ("dare_ties", {"drop_rate": 0.5, "zero_sum": "majority"}),
    ("gaussian", {"scale": 1.0}),
]
IDS = [f"{place}-{name}" for place, (name, _) in enumerate(METHODS)]


def copy_of(role: str) -> Operation:
    return operation(COPY, {"of": role}, None)


class Trio:
    """Opened checkpoints of a tiny ancestor, base and llava, with jobs and empty live tensors."""

    def __init__(self, folders: Mapping[str, Path], output_dtype: str = "auto") -> None:
        self.checkpoints: dict[str, Checkpoint] = {role: open_checkpoint(f) for role, f in folders.items()}
        self.pairing = pair_checkpoints(self.checkpoints)
        self.jobs: list[TensorJob] = plan_jobs(self.pairing, self.checkpoints, output_dtype)

    def live(self) -> dict[str, torch.Tensor]:
        return {
            job.tensor.name: torch.full(tuple(job.tensor.shape), 7.0).to(torch_dtype(job.dtype)) for job in self.jobs
        }

    def merged(self, what: Operation, keep: bool = False) -> dict[str, torch.Tensor]:
        live = self.live()
        stream(self.jobs, what, Inputs(self.checkpoints, keep=keep), LiveTarget(live))
        return live


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("trio")
    ancestor = tiny_llama(root / "ancestor", seed=0)
    base = tiny_llama(root / "base", seed=1, start=ancestor, noise=0.1)
    return {"ancestor": ancestor, "base": base, "vlm": tiny_llava(root / "vlm", seed=2, start=base, noise=0.05)}


@pytest.fixture(scope="module")
def trio(folders: dict[str, Path]) -> Trio:
    return Trio(folders)


def vlm_rows_without_partner(trio: Trio) -> list[int]:
    rows = next(job.tensor.rows for job in trio.jobs if job.tensor.name == "model.embed_tokens.weight")
    assert rows is not None, "the tiny vlm has a token its base lacks"
    return sorted(set(range(32)) - set(rows.rows["vlm"]))


@pytest.mark.parametrize(("method", "values"), METHODS, ids=IDS)
@pytest.mark.parametrize("block", [1, 7, 64])
def test_block_size_never_changes_a_bit(
    trio: Trio, monkeypatch: pytest.MonkeyPatch, method: str, values: dict[str, object], block: int
) -> None:
    what = operation(method, values, "base" if method == "gaussian" else "ancestor", seed=3)
    whole = trio.merged(what)
    monkeypatch.setattr(stream_module, "BLOCK_ENTRIES", 2 * block)
    monkeypatch.setattr(stream_module, "SPAN_ENTRIES", block)
    blocks = trio.merged(what, keep=True)
    for name, tensor in whole.items():
        assert torch.equal(tensor, blocks[name]), name


@pytest.mark.parametrize("role", ["base", "vlm"])
def test_copy_reproduces_the_parent_bit_for_bit(trio: Trio, role: str) -> None:
    merged = trio.merged(copy_of(role))
    vlm_only = vlm_rows_without_partner(trio)
    for job in trio.jobs:
        expected = load_file(trio.checkpoints[role].folder / "model.safetensors")[job.tensor.stored[role]]
        found = merged[job.tensor.name]
        if role == "base" and job.tensor.rows is not None:
            own = load_file(trio.checkpoints["vlm"].folder / "model.safetensors")[job.tensor.stored["vlm"]]
            assert torch.equal(found[vlm_only], own[vlm_only])
            shared = [row for row in range(32) if row not in vlm_only]
            assert torch.equal(found[shared], expected[shared])
        else:
            assert torch.equal(found, expected)


@pytest.mark.parametrize("zero", ["ancestor", "base"])
def test_lambda_zero_is_the_zero_point_and_rows_of_the_vlm_alone_stay_its_own(trio: Trio, zero: str) -> None:
    merged = trio.merged(operation("task_arithmetic", {"lambda": 0.0}, zero))
    expected = trio.merged(copy_of(zero))
    for name, tensor in merged.items():
        assert torch.equal(tensor, expected[name]), name


def test_lambda_one_on_base_is_the_vlm(trio: Trio) -> None:
    merged = trio.merged(operation("task_arithmetic", {"lambda": 1.0}, "base"))
    expected = trio.merged(copy_of("vlm"))
    for name, tensor in merged.items():
        assert torch.equal(tensor, expected[name]), name


def test_two_vectors_at_half_are_the_plain_average(trio: Trio) -> None:
    half = trio.merged(operation("task_arithmetic", {"lambda": 0.5}, "ancestor"))
    average = trio.merged(operation("linear", {"weights": {"base": 0.5, "vlm": 0.5}}, "ancestor"))
    for name, tensor in half.items():
        torch.testing.assert_close(tensor, average[name], rtol=0, atol=1e-6)


def test_output_dtype_rounds_the_float32_result_once(folders: dict[str, Path]) -> None:
    what = operation("task_arithmetic", {"lambda": 0.3}, "ancestor")
    exact = Trio(folders).merged(what)
    rounded = Trio(folders, "bfloat16").merged(what)
    for name, tensor in rounded.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, exact[name].to(torch.bfloat16)), name


def test_live_hash_of_a_copied_base_is_its_fingerprint_on_disk(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "base", seed=1, tokens=None)
    other = tiny_llama(tmp_path / "other", seed=2, start=base, tokens=None)
    pair = Trio({"base": base, "vlm": other})
    assert hash_live(pair.merged(copy_of("base"))) == fingerprint_checkpoint(pair.checkpoints["base"])
    assert hash_live(pair.merged(copy_of("vlm"))) != fingerprint_checkpoint(pair.checkpoints["base"])


def test_statistics_count_changes_and_the_cosine(trio: Trio) -> None:
    live = trio.live()
    inputs = Inputs(trio.checkpoints)
    record = stream(trio.jobs, operation("task_arithmetic", {"lambda": 0.5}, "ancestor"), inputs, LiveTarget(live))
    counted = record.record()
    assert counted["tensors_merged"] == len(trio.jobs)
    entries = sum(job.num_entries for job in trio.jobs)
    assert counted["entries_merged"] + counted["entries_copied"] == entries
    assert counted["entries_copied"] == 2 * 16 * len(vlm_rows_without_partner(trio))
    assert counted["changed_share"]["ancestor"] > 0.9

    vectors = []
    for role in ("base", "vlm"):
        copied, zero = trio.merged(copy_of(role)), trio.merged(copy_of("ancestor"))
        vectors.append(torch.cat([(copied[name] - zero[name]).flatten() for name in copied]).double())
    cosine = torch.nn.functional.cosine_similarity(vectors[0], vectors[1], dim=0)
    assert counted["task_vector_cosine"] == pytest.approx(float(cosine), abs=1e-5)


def test_changed_share_is_told_by_model_and_kind(trio: Trio) -> None:
    live = trio.live()
    what = operation("ties", {"density": 0.3}, "ancestor")
    record = stream(trio.jobs, what, Inputs(trio.checkpoints), LiveTarget(live)).record()
    parents = {role: trio.merged(copy_of(role)) for role in ("ancestor", "base", "vlm")}
    shares = record["changed_share_by_model_and_kind"]
    assert shares.keys() == parents.keys()
    assert record["changed_share_by_kind"] == shares["ancestor"]
    for role, parent in parents.items():
        for kind in ("attention", "mlp", "norm"):
            names = [job.tensor.name for job in trio.jobs if job.tensor.kind == kind]
            changed = sum(int((live[name] != parent[name]).sum()) for name in names)
            assert shares[role][kind] == pytest.approx(changed / sum(live[name].numel() for name in names))
    assert shares["vlm"]["mlp"] != pytest.approx(shares["ancestor"]["mlp"], abs=0.01)


def test_rounding_back_is_counted(folders: dict[str, Path]) -> None:
    trio = Trio(folders, "bfloat16")
    what = operation("task_arithmetic", {"lambda": 0.001}, "base")
    record = stream(trio.jobs, what, Inputs(trio.checkpoints), LiveTarget(trio.live())).record()
    assert 0.5 < record["rounded_back_share"] < 1
    assert record["changed_share"]["base"] < 0.5


def damaged_copy(folder: Path, target: Path, name: str, value: float) -> Path:
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    tensors = load_file(target / "model.safetensors")
    tensors[name].view(-1)[3] = value
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_input_that_is_not_finite_is_refused_by_name(tmp_path: Path, folders: dict[str, Path], value: float) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    trio = Trio({**folders, "base": damaged_copy(folders["base"], tmp_path / "base", name, value)})
    with pytest.raises(PairingError, match=name):
        trio.merged(operation("task_arithmetic", {"lambda": 0.5}, "ancestor"))


def test_result_beyond_the_output_dtype_is_refused_by_name(tmp_path: Path, folders: dict[str, Path]) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    trio = Trio({**folders, "base": damaged_copy(folders["base"], tmp_path / "base", name, 60000.0)}, "float16")
    with pytest.raises(PairingError, match=f"{name}.*float32") as caught:
        trio.merged(operation("task_arithmetic", {"lambda": 2.0}, "ancestor"))
    assert "1.2e+05" in str(caught.value)


def test_live_target_lists_every_tensor_that_does_not_fit(trio: Trio) -> None:
    live = trio.live()
    live["model.norm.weight"] = torch.zeros(3)
    live["model.extra.weight"] = torch.zeros(3)
    del live["lm_head.weight"]
    with pytest.raises(PairingError) as caught:
        LiveTarget(live).check(trio.jobs)
    for name in ("model.norm.weight", "model.extra.weight", "lm_head.weight"):
        assert name in str(caught.value)


def test_without_a_zero_point_nothing_is_told_against_one(trio: Trio) -> None:
    what = operation("linear", {"weights": {"base": 0.5, "vlm": 0.5}}, None)
    record = stream(trio.jobs, what, Inputs(trio.checkpoints), LiveTarget(trio.live())).record()
    assert record["changed_share"]["base"] > 0.9
    assert record["changed_share_by_kind"] is None
    assert record["rounded_back_share"] is None


def test_cosine_of_a_large_tensor_is_that_of_float64(trio: Trio) -> None:
    generator = torch.Generator().manual_seed(0)
    zero, first = torch.zeros(1 << 25), torch.rand(1 << 25, generator=generator)
    second = first.clone()
    second[: 1 << 24] = 0.5
    expected = float((first.double() @ second.double()) / first.double().norm() / second.double().norm())
    statistics = MergeStatistics(operation("task_arithmetic", {"lambda": 1.0}, "ancestor"))
    models = {"ancestor": zero, "base": first, "vlm": second}
    statistics.add(trio.jobs[0], models, zero, zero)
    assert statistics.cosine() == pytest.approx(expected, abs=2e-6)


def test_file_cache_counts_as_free_memory(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9000 kB\nMemFree:   100 kB\nMemAvailable:   7000 kB\n")
    assert free_memory_bytes(meminfo) == 7000 * 1024
    assert free_memory_bytes(tmp_path / "absent") == 0


@pytest.mark.parametrize("moved", [False, True], ids=["same-rows", "moved-rows"])
def test_tower_that_bases_tokenizer_does_not_address_is_refused(tmp_path: Path, moved: bool) -> None:
    tokens = [*WORDS, IMAGE_TOKEN]
    if moved:
        tokens[7], tokens[8] = tokens[8], tokens[7]
    base = tiny_llama(tmp_path / "base")
    pairing = Trio({"base": base, "vlm": tiny_llava(tmp_path / "vlm", start=base, tokens=tokens)}).pairing
    if moved:
        with pytest.raises(PairingError, match="2 shared tokens lie in other rows of vlm"):
            check_same_rows(pairing)
    else:
        check_same_rows(pairing)


def test_arithmetic_of_a_device_without_float64_is_on_the_cpu(trio: Trio) -> None:
    inputs = Inputs(trio.checkpoints, device="mps")
    assert inputs.float_entries("base", "model.norm.weight", 0, 4).device.type == "cpu"


@pytest.mark.parametrize(
    ("method", "zero_point"), [("task_arithmetic", "ancestor"), ("ties", "ancestor"), ("task_arithmetic", "base")]
)
def test_noise_matched_to_a_merge_is_as_large_as_its_change_of_base(trio: Trio, method: str, zero_point: str) -> None:
    point = {"method": method, "parameters": {"lambda": 0.5}, "zero_point": zero_point}
    point |= {"conventions": "official", "seed": None}
    matched = operation("gaussian", {"scale": 1.0, "matched": point}, "base", seed=1)
    own = operation("gaussian", {"scale": 1.0}, "base", seed=1)
    noisy, by_tower = trio.merged(matched), trio.merged(own)
    merge = trio.merged(operation(method, {"lambda": 0.5}, zero_point, conventions="official"))
    base, kinds = trio.merged(copy_of("base")), {job.tensor.name: job.tensor.kind for job in trio.jobs}
    for name, tensor in noisy.items():
        if kinds[name] == "norm":
            assert torch.equal(tensor, base[name])
            continue
        asked = float((merge[name] - base[name]).norm())
        assert float((tensor - base[name]).norm()) == pytest.approx(asked, rel=1e-4), name
        assert not torch.equal(tensor, by_tower[name])


@pytest.mark.parametrize("method", ["task_arithmetic", "ties", "dare_linear", "iso_c"])
def test_bias_of_a_head_merges_by_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Phi's head has one; its entries are tokens, as the head's rows are."""
    words = [f"w{number}" for number in range(16)]
    parents = {}
    for role, tokens, seed in (("base", words, 0), ("vlm", [words[0], "<image>", *words[1:]], 1)):
        tensors = text_tensors(rows=len(tokens), seed=seed, dtype=torch.float32)
        tensors["lm_head.bias"] = torch.randn(len(tokens), generator=torch.Generator().manual_seed(seed))
        parents[role] = hand_made(tmp_path / role, tensors, tokens=tokens)
    pair = Trio(parents)
    base, vlm = (load_file(parents[role] / "model.safetensors")["lm_head.bias"] for role in ("base", "vlm"))
    what = operation(method, {"lambda": 0.5}, "base")
    whole = pair.merged(what)
    if method == "task_arithmetic":
        shared = [0, *range(2, 17)]
        assert torch.equal(whole["lm_head.bias"][shared], base + 0.5 * (vlm[shared] - base))
    assert whole["lm_head.bias"][1] == vlm[1]
    monkeypatch.setattr(stream_module, "BLOCK_ENTRIES", 6)
    monkeypatch.setattr(stream_module, "SPAN_ENTRIES", 3)
    assert torch.equal(pair.merged(what)["lm_head.bias"], whole["lm_head.bias"])
