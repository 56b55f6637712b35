"""Every verdict, on matrices whose history is known."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from mergelab.towers.ancestry import NUM_LAYERS, Digest, Module, digest_ancestry, linear_modules, sampled_layers
from mergelab.towers.kinds import module_kind
from mergelab.towers.pairs import PairedTensor

SHAPES = {
    "q": (24, 24),
    "k": (12, 24),
    "v": (12, 24),
    "o": (24, 24),
    "gate": (32, 24),
    "up": (32, 24),
    "down": (24, 32),
}
NUM_MODEL_LAYERS = 6
Model = dict[str, np.ndarray]


def name_of(layer: int, projection: str) -> str:
    part = "self_attn" if projection in "qkvo" else "mlp"
    return f"model.layers.{layer}.{part}.{projection}_proj.weight"


MODULES = [
    Module(name_of(layer, projection), projection, layer, shape)
    for layer in range(NUM_MODEL_LAYERS)
    for projection, shape in SHAPES.items()
]


def fresh(seed: int) -> Model:
    generator = np.random.default_rng(seed)
    return {module.name: generator.normal(size=module.shape) for module in MODULES}


def drifted(model: Model, amount: float, seed: int) -> Model:
    noise = fresh(seed)
    return {name: tensor + amount * noise[name] for name, tensor in model.items()}


def judged(vlm: Model, base: Model, ancestor: Model | None = None) -> Digest:
    models = {"vlm": vlm, "base": base} | ({} if ancestor is None else {"ancestor": ancestor})
    roles = ["base"] if ancestor is None else ["ancestor", "base"]
    return digest_ancestry(MODULES, roles, lambda role, name: models[role][name])


BASE = fresh(1)
VLM = drifted(BASE, 0.1, 2)


def test_child() -> None:
    digest = judged(VLM, BASE)
    assert digest.verdict == "child" and not digest.stops
    assert digest.projection is None
    relation = digest.relations["base"]
    assert relation.relative_norm == pytest.approx(0.1, rel=0.05)
    assert relation.cosine == pytest.approx(1 / np.sqrt(1 + 0.1**2), abs=0.002)
    assert all(tensor.equal_share == 0 for tensor in relation.tensors)


def test_numbers_are_the_ones_stated() -> None:
    vlm = {**BASE, name_of(0, "q"): 2 * BASE[name_of(0, "q")]}
    first = judged(vlm, BASE).relations["base"].tensors[0]
    assert (first.cosine, first.relative_norm, first.equal_share) == (pytest.approx(1), pytest.approx(1), 0.0)
    second = judged(vlm, BASE).relations["base"].tensors[1]
    assert (second.cosine, second.relative_norm, second.equal_share) == (pytest.approx(1), 0.0, 1.0)


def test_heavy_training_is_a_cousin() -> None:
    digest = judged(drifted(BASE, 0.6, 3), BASE)
    assert digest.verdict == "cousin" and not digest.stops


def test_two_branches_of_one_origin() -> None:
    origin = fresh(9)
    digest = judged(drifted(origin, 0.3, 3), drifted(origin, 0.3, 4), origin)
    assert digest.relations["base"].verdict == "cousin"
    assert digest.relations["ancestor"].verdict == "child" == digest.verdict
    assert digest.projection == pytest.approx(0, abs=0.05)
    assert "tuned from ancestor" in digest.reason


def test_tuned_from_base() -> None:
    base = drifted(BASE, 0.1, 5)
    digest = judged(drifted(base, 0.2, 6), base, BASE)
    assert digest.verdict == "child"
    assert digest.projection == pytest.approx(1, abs=0.1)
    assert set(digest.projections) == set(SHAPES)
    assert "tuned from base" in digest.reason


def test_already_merged() -> None:
    base, tower = drifted(BASE, 0.1, 5), drifted(BASE, 0.1, 6)
    half = {name: (base[name] + tower[name]) / 2 for name in base}
    digest = judged(half, base, BASE)
    assert digest.verdict == "already merged" and not digest.stops
    assert digest.projection == pytest.approx(0.5, abs=0.05)


def test_frozen() -> None:
    assert judged(BASE, BASE).verdict == "frozen tower"
    assert judged(BASE, drifted(BASE, 0.1, 5), BASE).verdict == "frozen tower"
    almost = {**BASE, name_of(3, "v"): VLM[name_of(3, "v")]}
    assert judged(almost, BASE).verdict == "child"


def test_unrelated() -> None:
    digest = judged(fresh(7), BASE)
    assert digest.verdict == "unrelated" and digest.stops
    assert digest.relations["base"].relative_norm == pytest.approx(1.414, abs=0.1)


def test_wrong_ancestor() -> None:
    digest = judged(VLM, BASE, fresh(8))
    assert digest.verdict == "wrong ancestor" and digest.stops
    assert digest.relations["base"].verdict == "child"


@pytest.mark.parametrize(("first", "second"), [("gate", "up"), ("k", "v"), ("q", "o")])
def test_swapped(first: str, second: str) -> None:
    vlm = dict(VLM)
    for layer in range(NUM_MODEL_LAYERS):
        names = name_of(layer, first), name_of(layer, second)
        vlm |= {names[0]: VLM[names[1]], names[1]: VLM[names[0]]}
    digest = judged(vlm, BASE)
    assert digest.verdict == "swapped projection" and digest.stops
    assert f"{name_of(0, first)} is base's {name_of(0, second)}" in digest.reason


def test_swapped_in_one_layer_only() -> None:
    names = name_of(2, "gate"), name_of(2, "up")
    digest = judged({**VLM, names[0]: VLM[names[1]], names[1]: VLM[names[0]]}, BASE)
    assert digest.verdict == "swapped projection"
    partners = {tensor.name: tensor.partner for tensor in digest.relations["base"].tensors if tensor.partner}
    assert partners == {names[0]: names[1], names[1]: names[0]}


@pytest.mark.parametrize("start", [0, 3])
def test_shifted(start: int) -> None:
    source: Callable[[int], int] = lambda layer: (layer + 1) % NUM_MODEL_LAYERS if layer >= start else layer  # noqa: E731
    vlm = {name_of(layer, p): VLM[name_of(source(layer), p)] for layer in range(NUM_MODEL_LAYERS) for p in SHAPES}
    digest = judged(vlm, BASE)
    assert digest.verdict == "shifted layers" and digest.stops
    assert f"layers.{start}." in digest.reason and f"base's {name_of(start + 1, 'k')}" in digest.reason


def test_rows_in_another_order() -> None:
    """As when grouped q, k, v are cut as if they were contiguous: a quarter of the rows stays in place."""
    vlm = dict(VLM)
    for layer in range(NUM_MODEL_LAYERS):
        rows = np.arange(24)
        rows[6:] = np.roll(rows[6:], 5)
        vlm[name_of(layer, "q")] = VLM[name_of(layer, "q")][rows]
    digest = judged(vlm, BASE)
    assert digest.verdict == "swapped projection"
    assert digest.reason.startswith("q of every sampled layer")
    assert next(t for t in digest.relations["base"].tensors if t.projection == "q").cosine > 0.1


def test_some_matrices_are_foreign() -> None:
    digest = judged({**VLM, name_of(2, "down"): fresh(11)[name_of(2, "down")]}, BASE)
    assert digest.verdict == "partly unrelated" and digest.stops
    assert name_of(2, "down") in digest.reason


def test_zeros_and_numbers_that_are_not_finite() -> None:
    zero = {**BASE, name_of(1, "v"): np.zeros(SHAPES["v"])}
    assert judged({**VLM, name_of(1, "v"): np.zeros(SHAPES["v"])}, zero).verdict == "child"
    assert judged(VLM, zero).verdict == "partly unrelated"
    broken = VLM[name_of(1, "v")].copy()
    broken[0, 0] = np.inf
    broken[0, 1] = np.nan
    assert judged({**VLM, name_of(1, "v"): broken}, BASE).verdict == "child"


def test_nothing_to_look_at() -> None:
    digest = digest_ancestry([], ["base"], lambda role, name: BASE[name])
    assert digest.verdict == "undecided" and not digest.stops


def test_record_is_json() -> None:
    record = json.loads(json.dumps(judged(VLM, BASE, BASE).record(), allow_nan=False))
    assert set(record["relations"]["base"]["by_projection"]) == set(SHAPES)
    assert list(record["relations"]["base"]["by_layer"]) == [str(layer) for layer in range(NUM_MODEL_LAYERS)]


def test_layers_are_spread_over_the_depth() -> None:
    modules = [Module(name_of(layer, "q"), "q", layer, (4, 4)) for layer in range(80)]
    layers = sampled_layers(modules)
    assert (layers[0], layers[-1], len(layers)) == (0, 79, NUM_LAYERS)
    assert max(np.diff(layers)) - min(np.diff(layers)) <= 1
    read = []
    digest_ancestry(modules, ["base"], lambda role, name: (read.append((role, name)), np.ones(3))[1])
    assert len(read) == 2 * NUM_LAYERS, "models that fit are read at the sampled layers only"


def test_modules_are_the_matrices_of_the_layers() -> None:
    names = {
        "model.embed_tokens.weight": (8, 4),
        "model.layers.0.self_attn.q_proj.weight": (4, 4),
        "model.layers.0.self_attn.q_proj.bias": (4,),
        "model.layers.0.input_layernorm.weight": (4,),
        "model.layers.0.mlp.experts.0.up_proj.weight": (6, 4),
        "model.layers.0.mlp.experts.1.up_proj.weight": (6, 4),
        "lm_head.weight": (8, 4),
    }
    paired = [PairedTensor(name, module_kind(name, s), s, "F32", {}, (), None) for name, s in names.items()]
    assert [module.name for module in linear_modules(paired)] == [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.mlp.experts.0.up_proj.weight",
    ]
