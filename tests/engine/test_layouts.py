"""Every hand-made layout through the whole stream: paired totally, exact at the ends, merged as its parts would."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mergelab.checkpoints.headers import Checkpoint, open_checkpoint
from mergelab.engine.ancestry import check_related
from mergelab.engine.export import Export, export_text, export_vlm
from mergelab.engine.inputs import Inputs
from mergelab.engine.outlets import check_outlets
from mergelab.engine.plan import Operation, TensorJob, operation, plan_jobs
from mergelab.engine.stream import stream
from mergelab.engine.targets import LiveTarget
from mergelab.errors import PairingError
from mergelab.sweeps.models import paired
from mergelab.towers.layouts import repaired
from mergelab.towers.pairing import Pairing
from tests.builders import hand_made
from tests.towers.stored import LAYOUTS, ROWS, Layout, Tensors, in_vlm, internlm2, molmo, moved, plain, stacked

TOKENS = [f"w{number}" for number in range(ROWS)]
COPY_BASE = operation("copy", {"of": "base"}, None)
COPY_VLM = operation("copy", {"of": "vlm"}, None)
METHODS = {
    "task_arithmetic": operation("task_arithmetic", {"lambda": 0.5}, "ancestor"),
    "ties": operation("ties", {"density": 0.3, "lambda": 1.0}, "ancestor"),
    "dare_linear": operation("dare_linear", {"drop_rate": 0.5, "lambda": 1.0}, "ancestor", seed=3),
}

Trio = dict[str, Tensors]


def trio_of(layout: Layout) -> Trio:
    """Return the plain tensors of ancestor, base and tower."""
    ancestor = plain(**layout.base)
    return {"ancestor": ancestor, "base": moved(ancestor, 1), "vlm": moved(ancestor, 2)}


def write(folder: Path, layout: Layout, tensors: Trio) -> dict[str, Path]:
    """Write ancestor and base as plain text models and the vlm in its layout."""
    folders = {}
    for role, own in tensors.items():
        stored, config = (layout.store(own), layout.config) if role == "vlm" else (own, {"model_type": "llama"})
        tokens = [*TOKENS, *(("<a>", "<b>") if role == "vlm" else ())] if layout.by_token else None
        folders[role] = hand_made(folder / role, stored, config=config, tokens=tokens)
    return folders


def opened(folders: Mapping[str, Path]) -> tuple[dict[str, Checkpoint], Pairing, list[TensorJob]]:
    checkpoints, pairing = paired({role: open_checkpoint(path) for role, path in folders.items()})
    return checkpoints, pairing, plan_jobs(pairing, checkpoints)


def merged(folders: Mapping[str, Path], what: Operation, out: Path, *, text: bool = False) -> Tensors:
    """Merge through the stream and return the tensors written."""
    checkpoints, pairing, jobs = opened(folders)
    export = Export(jobs, what, Inputs(checkpoints, keep=True), pairing)
    if text:
        export_text(export, out, {}, {"model_type": "llama"})
    else:
        export_vlm(export, out, {})
    return {name: tensor for shard in out.glob("*.safetensors") for name, tensor in load_file(shard).items()}


def assert_equal(found: Tensors, expected: Tensors) -> None:
    expected = {repaired(name): tensor for name, tensor in expected.items()}
    assert found.keys() == expected.keys()
    different = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
    assert not different


@pytest.fixture(params=LAYOUTS)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Layout, Trio, dict[str, Path], Path]:
    layout = LAYOUTS[request.param]
    tensors = trio_of(layout)
    return layout, tensors, write(tmp_path, layout, tensors), tmp_path / "out"


def test_pairing_is_total_and_knows_its_family(case: tuple[Layout, Trio, dict[str, Path], Path]) -> None:
    layout, tensors, folders, _ = case
    checkpoints, pairing, _ = opened(folders)
    assert {paired.name for paired in pairing.tensors} == set(tensors["base"])
    family = pairing.towers["vlm"].family
    assert (family.family if family else None) == layout.family
    assert not pairing.explained and not pairing.must_equal
    views = pairing.views["vlm"]
    used = {views[own].stored if own in views else own for own in (p.stored["vlm"] for p in pairing.tensors)}
    assert used | set(pairing.copied) == set(checkpoints["vlm"].tensors)
    assert not used & set(pairing.copied)
    for paired_tensor in pairing.tensors:
        rows = 1 if layout.by_token and paired_tensor.kind == "embedding" else 0
        assert paired_tensor.shape[rows:] == tuple(tensors["base"][paired_tensor.name].shape)[rows:]


def test_copy_of_the_vlm_is_the_vlm(case: tuple[Layout, Trio, dict[str, Path], Path]) -> None:
    layout, tensors, folders, out = case
    assert_equal(merged(folders, COPY_VLM, out), layout.store(tensors["vlm"]))


def test_copy_of_the_base_as_text_is_the_base(case: tuple[Layout, Trio, dict[str, Path], Path]) -> None:
    layout, tensors, folders, out = case
    found = merged(folders, COPY_BASE, out, text=True)
    if layout.by_token:
        found["model.embed_tokens.weight"] = found["model.embed_tokens.weight"][:ROWS]
    assert_equal(found, tensors["base"])


@pytest.mark.parametrize("strength", [0.0, 1.0])
def test_ends_are_exact_in_the_vlms_own_layout(
    case: tuple[Layout, Trio, dict[str, Path], Path], strength: float
) -> None:
    layout, tensors, folders, out = case
    del folders["ancestor"]
    what = operation("task_arithmetic", {"lambda": strength}, "base")
    expected = layout.store(tensors["vlm" if strength else "base"])
    assert_equal(merged(folders, what, out), expected)


@pytest.mark.parametrize("method", ["ties", "dare_linear"])
def test_merge_is_that_of_the_plain_tensors(
    case: tuple[Layout, Trio, dict[str, Path], Path], method: str, tmp_path: Path
) -> None:
    layout, tensors, folders, out = case
    twin = Layout(dict, None, {"model_type": "llama"}, layout.base, by_token=layout.by_token)
    alone = write(tmp_path / "plain", twin, tensors)
    expected = merged(alone, METHODS[method], tmp_path / "twin")
    assert_equal(merged(folders, METHODS[method], out), layout.store(expected))


@pytest.mark.parametrize("name", [name for name, layout in LAYOUTS.items() if layout.wrong])
def test_parts_in_a_wrong_order_are_caught_by_the_digest(tmp_path: Path, name: str) -> None:
    layout = LAYOUTS[name]
    tensors = trio_of(layout)
    checkpoints, pairing, _ = opened(write(tmp_path / "right", layout, tensors))
    assert check_related(pairing, checkpoints).verdict in ("child", "cousin", "already merged")
    assert layout.wrong is not None
    wrong = Layout(layout.wrong, None, layout.config, layout.base)
    checkpoints, pairing, _ = opened(write(tmp_path / "wrong", wrong, tensors))
    with pytest.raises(PairingError, match="swapped projection"):
        check_related(pairing, checkpoints)


FUSED_ALIKE = {
    name: LAYOUTS[name]
    for name in ("internlm2 alone", "stacked experts", "stacked experts, transposed", "stacked experts, interleaved")
}


def strip(name: str) -> str:
    return name.replace("model.language_model.", "model.").removeprefix("language_model.")


def fused_alike(folder: Path, layout: Layout, tensors: Trio) -> dict[str, Path]:
    """Write all three models with the same fused tensors."""
    folders = {}
    for role, own in tensors.items():
        stored = layout.store(own)
        if role != "vlm":
            stored = {strip(n): t for n, t in stored.items() if "vision" not in n and "projector" not in n}
        config: dict[str, Any] = layout.config if role == "vlm" else {**layout.config, "model_type": "any"}
        folders[role] = hand_made(folder / role, stored, config=config)
    return folders


@pytest.mark.parametrize("name", FUSED_ALIKE)
def test_tensors_fused_alike_merge_fused_and_equal_the_merge_of_their_parts(tmp_path: Path, name: str) -> None:
    """The oracle is float64 on the plain tensors, fused afterwards."""
    layout = FUSED_ALIKE[name]
    tensors = trio_of(layout)
    folders = fused_alike(tmp_path, layout, tensors)
    _, pairing, _ = opened(folders)
    assert not any(pairing.views.values())
    assert {strip(own) for own in (p.stored["vlm"] for p in pairing.tensors)} == {
        strip(n) for n in layout.store(tensors["vlm"]) if "vision" not in n and "projector" not in n
    }
    found = merged(folders, METHODS["task_arithmetic"], tmp_path / "out")
    double = {role: {n: t.double() for n, t in own.items()} for role, own in tensors.items()}
    oracle = {
        n: zero + 0.5 * ((double["base"][n] - zero) + (double["vlm"][n] - zero))
        for n, zero in double["ancestor"].items()
    }
    expected = layout.store({n: t.float() for n, t in oracle.items()})
    for own, tensor in found.items():
        torch.testing.assert_close(tensor.float(), expected[own].float(), rtol=1 / 128, atol=1e-6)


@pytest.mark.parametrize("name", FUSED_ALIKE)
@pytest.mark.parametrize("block", [50, 10**6])
def test_tensors_fused_alike_fall_apart_in_a_text_model_that_has_the_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, block: int
) -> None:
    layout = FUSED_ALIKE[name]
    tensors = trio_of(layout)
    folders = fused_alike(tmp_path, layout, tensors)
    monkeypatch.setattr("mergelab.engine.stream.BLOCK_ENTRIES", block)
    checkpoints, pairing, jobs = opened(folders)
    what = METHODS["task_arithmetic"]
    shapes = {n: tuple(t.shape) for n, t in tensors["base"].items()}
    check_outlets(jobs, shapes, "the text model")
    export = Export(jobs, what, Inputs(checkpoints, keep=True), pairing)
    export_text(export, tmp_path / "text", {}, {"model_type": "llama"}, shapes)
    alone = {role: hand_made(tmp_path / "plain" / role, own) for role, own in tensors.items()}
    expected = merged(alone, what, tmp_path / "alone")
    assert_equal(load_file(tmp_path / "text" / "model.safetensors"), expected)
    live = {n: torch.zeros(t.shape, dtype=t.dtype) for n, t in tensors["base"].items()}
    target = LiveTarget(live)
    target.check(jobs)
    stream(jobs, what, Inputs(checkpoints), target)
    assert_equal(live, expected)
    with pytest.raises(PairingError, match="the file has none, the text model"):
        check_outlets(jobs, {**shapes, "model.extra.weight": (3,)}, "the text model")
    del live["model.layers.0.self_attn.o_proj.weight"]
    with pytest.raises(PairingError, match=r"o_proj\.weight: not in the live model"):
        LiveTarget(live).check(jobs)


Store = Callable[[Tensors], Tensors]
MIXED: dict[str, tuple[dict[str, Any], dict[str, Store]]] = {
    "base fused by key-value head, vlm split": (
        {"qk_norm": False},
        {"base": lambda t: internlm2(t, ""), "ancestor": lambda t: internlm2(t, ""), "vlm": in_vlm()},
    ),
    "base alone fused": (
        {"qk_norm": False},
        {"base": lambda t: internlm2(t, ""), "ancestor": dict, "vlm": in_vlm("language_model.model.")},
    ),
    "experts stacked both ways": (
        {"experts": True},
        {
            "base": lambda t: stacked(t, transposed=False),
            "ancestor": dict,
            "vlm": lambda t: in_vlm()(stacked(t, transposed=True)),
        },
    ),
    "experts split in the vlm": (
        {"experts": True},
        {
            "base": lambda t: stacked(t, transposed=True),
            "ancestor": lambda t: stacked(t, transposed=False),
            "vlm": in_vlm(),
        },
    ),
    "experts stacked by rows and alone": (
        {"experts": True},
        {"base": dict, "ancestor": lambda t: stacked(t, transposed=False), "vlm": molmo},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXED)
def test_every_model_may_have_a_form_of_its_own(tmp_path: Path, name: str) -> None:
    what, stores = MIXED[name]
    tensors = trio_of(Layout(dict, None, {}, what))
    config = {"num_attention_heads": 8}
    folders = {role: hand_made(tmp_path / role, stores[role](own), config=config) for role, own in tensors.items()}
    alone = {role: hand_made(tmp_path / "plain" / role, own) for role, own in tensors.items()}
    for method, how in METHODS.items():
        expected = merged(alone, how, tmp_path / f"{method} alone")
        assert_equal(merged(folders, how, tmp_path / method), stores["vlm"](expected))
    assert_equal(merged(folders, COPY_BASE, tmp_path / "text", text=True), tensors["base"])


@pytest.mark.parametrize("name", ["internvl with internlm2", "stacked experts, interleaved", "molmoe", "mllama"])
def test_blocks_of_any_size_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    layout = LAYOUTS[name]
    folders = write(tmp_path, layout, trio_of(layout))
    whole = merged(folders, METHODS["dare_linear"], tmp_path / "whole")
    for room in ("stream", "export"):
        monkeypatch.setattr(f"mergelab.engine.{room}.BLOCK_ENTRIES", 53)
    assert_equal(merged(folders, METHODS["dare_linear"], tmp_path / "pieces"), whole)


def test_layers_that_predict_further_tokens_are_explained(tmp_path: Path) -> None:
    """GLM-4.5: the base has one layer more, with experts of its own; the vlm stores its experts stacked."""
    layout = LAYOUTS["stacked experts"]
    base = plain(experts=True, num_layers=5)
    folders = {
        "base": hand_made(tmp_path / "b", base, config={"num_hidden_layers": 4, "num_nextn_predict_layers": 1}),
        "vlm": hand_made(
            tmp_path / "v",
            layout.store({n: t for n, t in base.items() if ".layers.4." not in n}),
            config={"model_type": "glm4v_moe"},
        ),
    }
    _, pairing, _ = opened(folders)
    assert pairing.explained and all(".layers.4." in name for name in pairing.explained)
    assert not any(".layers.4." in paired.name for paired in pairing.tensors)


def test_inserted_layers_must_be_those_of_the_config(tmp_path: Path) -> None:
    layout = LAYOUTS["mllama"]
    folders = write(tmp_path, layout, trio_of(layout))
    config = {"model_type": "mllama", "text_config": {"cross_attention_layers": [1]}}
    (folders["vlm"] / "config.json").write_text(json.dumps(config))
    with pytest.raises(PairingError, match=r"cross_attention_layers \[1\]: the layers that differ .* are \[1, 3\]"):
        opened(folders)
    (folders["vlm"] / "config.json").write_text('{"model_type": "mllama", "text_config": {}}')
    _, pairing, _ = opened(folders)
    assert len(pairing.tensors) == len(plain(qk_norm=False))
