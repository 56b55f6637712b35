"""What becomes of a tensor by its kind: the table of ``merges.matrices``, and kinds that a recipe excludes."""

import pytest
import torch

from merges.block import Block
from merges.exclusion import is_excluded
from merges.methods import METHODS, SPECTRAL
from merges.methods import merge as merge_block
from merges.parameters import PARAMETERS, build
from tests.merges.inputs import ONE, TWO, block, merge, normal, same_bits
from tests.merges.test_laws import MODEL_METHODS, defaults

RESTS = {"mean": 0.5, "sum": 1.0, "zero": 0.0}
NO_MAP = [
    ("embedding", (9, 6)),
    ("head", (9, 6)),
    ("norm", (6,)),
    ("bias", (6,)),
    ("other", (6,)),
    ("other", ()),
    ("mlp", (0, 6)),
]


@pytest.mark.parametrize("method", SPECTRAL)
@pytest.mark.parametrize("rest", RESTS)
@pytest.mark.parametrize(("kind", "shape"), NO_MAP)
def test_what_is_no_map_gets_the_rest(method: str, rest: str, kind: str, shape: tuple[int, ...]) -> None:
    zero, one, two = (normal(shape, seed) for seed in range(3))
    found = merge(method, zero, [one, two], kind=kind, weights=[1, 0.5], lambda_=0.5, rest=rest)
    torch.testing.assert_close(found, zero + 0.5 * RESTS[rest] * ((one - zero) + 0.5 * (two - zero)))
    if rest == "zero":
        assert same_bits(found, zero)


@pytest.mark.parametrize("method", SPECTRAL)
@pytest.mark.parametrize("kind", ["embedding", "head"])
def test_scope_matrices_takes_embeddings_and_heads_apart(method: str, kind: str) -> None:
    zero, one, two = (normal((9, 6), seed) for seed in range(3))
    found = merge(method, zero, [one, two], kind=kind, svd_scope="matrices")
    assert same_bits(found, merge(method, zero, [one, two], kind="mlp"))
    assert float((found - merge(method, zero, [one, two], kind=kind)).norm()) > 0.5
    norm = merge(method, zero[0], [one[0], two[0]], kind="norm", svd_scope="matrices")
    torch.testing.assert_close(norm, (one[0] + two[0]) / 2)


@pytest.mark.parametrize("method", SPECTRAL)
@pytest.mark.parametrize("kind", ["attention", "mlp", "other"])
@pytest.mark.parametrize("shape", [(3, 8, 6), (2, 2, 5, 7), (1, 6, 6)])
def test_packed_experts_are_merged_one_by_one(method: str, kind: str, shape: tuple[int, ...]) -> None:
    zero, one, two = (normal(shape, seed) for seed in range(3))
    merged = merge(method, zero, [one, two], kind=kind)
    flat = [tensor.reshape(-1, *shape[-2:]) for tensor in (merged, zero, one, two)]
    for found, *alone in zip(*flat, strict=True):
        assert same_bits(found, merge(method, alone[0], alone[1:], kind=kind))


@pytest.mark.parametrize("method", SPECTRAL)
@pytest.mark.parametrize("scale", [0.3, -2.0])
def test_an_unscaled_delta_at_hand_changes_no_bit(method: str, scale: float) -> None:
    for kind, shape in (("mlp", (9, 6)), ("norm", (6,))):
        zero, one, two = (normal(shape, seed) for seed in range(3))
        parameters, place = build(method, {"lambda": scale}, TWO), block(TWO, kind)
        other = build(method, {"lambda": 1.0}, TWO)
        unscaled = SPECTRAL[method](zero, [one, two], other, place)
        assert (unscaled is None) == (kind == "norm")
        found = merge_block(zero, [one, two], parameters, place, unscaled)
        assert same_bits(found, METHODS[method](zero, [one, two], parameters, place))


@pytest.mark.parametrize("method", [name for name in PARAMETERS if name != "gaussian"])
def test_an_excluded_kind_stays_the_vlms(method: str) -> None:
    zero, one, two = (normal((9, 6), seed) for seed in range(3))
    values = {"weights": {"base": 0.5, "vlm": 0.5}} if method == "linear" else {}
    parameters = build(method, {**values, "exclude": ["embedding", "norm"]}, TWO)
    for kind in ("embedding", "norm"):
        assert same_bits(merge_block(zero, [one, two], parameters, block(TWO, kind)), two)
        assert same_bits(merge_block(zero, [two, one], parameters, block(("vlm", "base"), kind)), two)
    assert not torch.equal(merge_block(zero, [one, two], parameters, block(TWO, "mlp")), two)
    plain = build(method, values, TWO)
    assert same_bits(
        merge_block(zero, [one, two], plain, block(TWO, "embedding")),
        merge(method, zero, [one, two], kind="embedding", **defaults(method)),
    )


@pytest.mark.parametrize("method", [name for name in PARAMETERS if name not in (*MODEL_METHODS, "tsv", "gaussian")])
def test_an_excluded_kind_of_one_vector_is_the_model(method: str) -> None:
    zero, model = normal((6,), 0), normal((6,), 1)
    parameters = build(method, {"exclude": ["norm"], "lambda": 0.5}, ONE)
    assert same_bits(merge_block(zero, [model], parameters, block(ONE, "norm")), model)


@pytest.mark.parametrize(
    ("name", "is_qk"),
    [
        ("model.layers.0.self_attn.q_norm.weight", True),
        ("model.layers.0.self_attn.k_norm.weight", True),
        ("model.layers.0.self_attn.q_layernorm.weight", True),
        ("model.layers.0.self_attn.query_layernorm.weight", True),
        ("model.layers.0.input_layernorm.weight", False),
        ("model.layers.0.self_attn.q_proj.weight", False),
        ("model.norm.weight", False),
    ],
)
def test_q_and_k_norms_can_be_excluded_alone(name: str, is_qk: bool) -> None:
    assert is_excluded(("qk_norm",), "norm", name) == is_qk
    assert is_excluded(("norm",), "norm", name)
    assert not is_excluded((), "norm", name)


def test_block_carries_no_survey_by_default() -> None:
    assert Block("w", "mlp", TWO).survey is None
