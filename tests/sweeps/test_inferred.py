"""Inference on files: shapes leave several ways open, the numbers tell which, and a wrong one does not go through."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import permutations
from pathlib import Path

import pytest
import torch
import yaml

from mergelab.checkpoints.headers import open_checkpoint
from mergelab.checkpoints.reader import read_entries
from mergelab.config import pair_from_folders
from mergelab.engine.inference import UNLIKE, Judge, table_distance
from mergelab.engine.inference import Models as Sampled
from mergelab.errors import PairingError
from mergelab.sweeps.models import Models, infer_models, open_models
from mergelab.towers.confidence import UncertainPairing
from mergelab.towers.rules import parse_family
from tests.builders import hand_made
from tests.towers.names import EYE, FOREIGN, UNKNOWN_PREFIX, Shapes, renamed, text_model
from tests.towers.stored import LAYOUTS, plain
from tests.towers.stored import moved as moved_by_noise

HEADS = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
CONFIG = {"model_type": "llama", **HEADS}
Tensors = dict[str, torch.Tensor]


def filled(shapes: Shapes, seed: int = 0) -> Tensors:
    """Return random tensors; gains differ from layer to layer, as trained ones do."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def tuned(tensors: Tensors, noise: float = 0.02) -> Tensors:
    generator = torch.Generator().manual_seed(7)
    return {name: tensor + noise * torch.randn(tensor.shape, generator=generator) for name, tensor in tensors.items()}


def moved(tensors: Tensors, *rules: tuple[str, str]) -> Tensors:
    """Return tensors under other names."""
    names = renamed({name: tuple(tensor.shape) for name, tensor in tensors.items()}, *rules)
    return dict(zip(names, tensors.values(), strict=True))


def layers_replaced(tensors: Tensors, taken: str, make: Callable[[str, Tensors], Tensors]) -> Tensors:
    """Return tensors with those of each layer whose names match ``taken`` replaced by what ``make`` returns."""
    result: Tensors = {}
    grouped: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        start = re.match(r"model\.layers\.\d+\.", name)
        if start and re.search(taken, name):
            grouped.setdefault(start[0], {})[name[start.end() :]] = tensor
        else:
            result[name] = tensor
    for start, group in grouped.items():
        result |= {start + name: tensor.contiguous() for name, tensor in make(start, group).items()}
    return result


def opened(
    tmp_path: Path, base: Tensors, vlm: Tensors, *, accept: bool = False, config: Mapping[str, object] = CONFIG
) -> Models:
    eye = filled(EYE, seed=9)
    folders = hand_made(tmp_path / "base", base, config=CONFIG), hand_made(tmp_path / "vlm", vlm | eye, config=config)
    return open_models(pair_from_folders(*map(str, folders)), accept_inferred=accept)


def check_pairs_truly(models: Models, truth: Tensors) -> None:
    """Compare every weight of the vlm, read through the pairing, with the one it was made of."""
    assert {paired.name for paired in models.pairing.tensors} == set(truth)
    for paired in models.pairing.tensors:
        header = models.checkpoints["vlm"].header(paired.stored["vlm"])
        found = read_entries(header, 0, header.num_entries).reshape(header.shape)
        assert torch.equal(found, truth[paired.name]), paired.name


def fused_qkv(order: str) -> Callable[[str, Tensors], Tensors]:
    def make(start: str, group: Tensors) -> Tensors:
        kinds = {name.rpartition(".")[2] for name in group}
        parts = {kind: {p: group[f"self_attn.{p}_proj.{kind}"] for p in "qkv"} for kind in kinds}
        if order != "grouped":
            return {f"att.c_attn.{kind}": torch.cat([one[p] for p in order]) for kind, one in parts.items()}
        fused = {}
        for kind, one in parts.items():
            groups = (one[p].reshape(2, -1, 4, *one[p].shape[1:]) for p in "qkv")
            fused[f"att.c_attn.{kind}"] = torch.cat([*groups], 1).flatten(0, 2)
        return fused

    return make


@pytest.mark.parametrize("order", ["".join(order) for order in permutations("qkv")] + ["grouped"])
def test_order_of_fused_attention_is_read_off_the_numbers(tmp_path: Path, order: str) -> None:
    base = filled(text_model(biases=True))
    truth = tuned(base)
    vlm = moved(layers_replaced(truth, r"[qkv]_proj", fused_qkv(order)), *FOREIGN)
    models = opened(tmp_path, base, vlm)
    check_pairs_truly(models, truth)
    assert models.report is not None and models.report.verdict == "high"
    expected = "q_proj|self_attn.k_proj" if order == "grouped" else f"{order[0]}_proj|self_attn.{order[1]}_proj"
    assert any(expected in text and ("(grouped)" in text) == (order == "grouped") for text in models.report.operations)


@pytest.mark.parametrize("order", ["gate up", "up gate"])
def test_order_of_gate_and_up_is_read_off_the_numbers(tmp_path: Path, order: str) -> None:
    base = filled(text_model())
    truth = tuned(base)

    def make(start: str, group: Tensors) -> Tensors:
        return {"mlp.w13.weight": torch.cat([group[f"mlp.{part}_proj.weight"] for part in order.split()])}

    models = opened(tmp_path, base, moved(layers_replaced(truth, "gate_proj|up_proj", make), *UNKNOWN_PREFIX))
    check_pairs_truly(models, truth)


@pytest.mark.parametrize("way", ["stacked", "transposed", "interleaved", "up first"])
def test_stacked_experts_are_read_off_the_numbers(tmp_path: Path, way: str) -> None:
    base = filled(text_model(experts=3))
    truth = tuned(base)

    def make(start: str, group: Tensors) -> Tensors:
        stack = {
            p: torch.stack([group[f"mlp.experts.{e}.{p}_proj.weight"] for e in range(3)])
            for p in ("gate", "up", "down")
        }
        first, second = ("up", "gate") if way == "up first" else ("gate", "up")
        both = torch.cat([stack[first], stack[second]], 1)
        if way == "interleaved":
            both = torch.stack([stack[first], stack[second]], 2).flatten(1, 2)
        down = stack["down"]
        if way == "transposed":
            both, down = both.mT, down.mT
        return {"moe.experts.w13": both, "moe.experts.w2": down}

    models = opened(tmp_path, base, moved(layers_replaced(truth, r"\.experts\.", make), *UNKNOWN_PREFIX))
    check_pairs_truly(models, truth)


def test_leaves_of_equal_shape_are_told_apart(tmp_path: Path) -> None:
    """q and o, k and v, gate and up, both norms: nothing but numbers tells them apart."""
    base = filled(text_model())
    truth = tuned(base)
    letters = {"o": "a", "q": "b", "v": "a2", "k": "b2"}
    rules = [(rf"\.self_attn\.{old}_proj", f".att.{new}") for old, new in letters.items()]
    rules += [(r"\.mlp\.up_proj", ".ff.x"), (r"\.mlp\.gate_proj", ".ff.y")]
    vlm = moved(truth, *FOREIGN[:4], (r"post_attention_layernorm", "n1"), ("input_layernorm", "n2"), *rules)
    models = opened(tmp_path, base, vlm)
    check_pairs_truly(models, truth)
    assert models.report is not None and models.report.undecided == ()


def test_norms_with_names_of_others_are_told_apart(tmp_path: Path) -> None:
    """As Molmo2 over Olmo3: post_attention_layernorm of the vlm is another norm than base's of that name."""
    base = filled(renamed(text_model(), ("post_attention", "post_feedforward"), ("input", "post_attention")))
    truth = tuned(base)
    vlm = moved(truth, ("post_attention", "input"), ("post_feedforward", "post_attention"))
    check_pairs_truly(opened(tmp_path, base, vlm), truth)


def test_norms_that_numbers_do_not_tell_apart_need_the_flag(tmp_path: Path) -> None:
    base = filled(text_model())
    base |= {name: torch.ones_like(tensor) for name, tensor in base.items() if "layernorm" in name}
    vlm = moved(tuned(base) | {n: t for n, t in base.items() if "layernorm" in n}, *FOREIGN)
    with pytest.raises(UncertainPairing, match="ln_1, ln_2: 2 ways fit by shape and the numbers do not tell which"):
        opened(tmp_path, base, vlm)
    report = opened(tmp_path, base, vlm, accept=True).report
    assert report is not None and report.verdict == "low"


def test_inserted_layers_go_through_and_a_shift_does_not(tmp_path: Path) -> None:
    base = filled(text_model())
    truth = tuned(base)
    vlm = moved(truth, (r"layers\.3\.", "layers.5."), (r"layers\.2\.", "layers.3."), (r"layers\.1\.", "layers.2."))
    for layer in (1, 4):
        vlm |= {
            f"model.layers.{layer}.cross.q.weight": torch.ones(16, 16),
            f"model.layers.{layer}.cross.g": torch.ones(1),
        }
    vlm = moved(vlm, *UNKNOWN_PREFIX)
    models = opened(tmp_path, base, vlm)
    check_pairs_truly(models, truth)
    assert models.report is not None and "layers 1, 4 are no layers of base" in models.report.operations
    shifted = moved(truth, *((rf"layers\.{n}\.", f"blocks.{(n + 1) % 4}.") for n in range(4)), ("^model", "foo"))
    with pytest.raises(UncertainPairing, match="shifted layers"):
        opened(tmp_path / "again", base, shifted)


def test_swapped_matrix_is_caught_by_the_digest(tmp_path: Path) -> None:
    """Names that fit and lie: gate under the name of up."""
    base = filled(text_model())
    vlm = moved(tuned(base), ("gate_proj", "x"), ("up_proj", "gate_proj"), (r"mlp\.x", "mlp.up_proj"), *UNKNOWN_PREFIX)
    with pytest.raises(UncertainPairing, match="swapped projection"):
        opened(tmp_path, base, vlm)


def test_stranger_of_equal_shapes_is_not_sure(tmp_path: Path) -> None:
    with pytest.raises(UncertainPairing, match="unrelated"):
        opened(tmp_path, filled(text_model()), moved(filled(text_model(), seed=5), *UNKNOWN_PREFIX))


def test_tables_without_a_word_are_told_apart(tmp_path: Path) -> None:
    base = filled(text_model())
    truth = tuned(base)
    vlm = moved(truth, (r"^model\.embed_tokens", "foo.bar.llm.b"), ("^lm_head", "foo.bar.llm.a"), *UNKNOWN_PREFIX)
    check_pairs_truly(opened(tmp_path, base, vlm), truth)


def test_unknown_tensor_of_the_tower_needs_the_flag(tmp_path: Path) -> None:
    base = filled(text_model())
    vlm = moved(tuned(base), *UNKNOWN_PREFIX) | {"foo.bar.llm.blocks.1.pool.weight": torch.ones(3, 3)}
    with pytest.raises(UncertainPairing, match=r"1 tensors of the tower that base lacks, .*blocks\.1\.pool\.weight"):
        opened(tmp_path, base, vlm)
    models = opened(tmp_path, base, vlm, accept=True)
    assert "foo.bar.llm.blocks.1.pool.weight" in models.pairing.copied


def test_half_a_second_tower_needs_the_flag(tmp_path: Path) -> None:
    base = filled(text_model())
    decoy = moved(filled(text_model(2, head=False), seed=4), (r"^model\.", "foo.prompt_encoder."))
    vlm = moved(tuned(base), *UNKNOWN_PREFIX) | decoy
    with pytest.raises(UncertainPairing, match=r"foo\.prompt_encoder\.layers\.\* holds 50% of base's layers too"):
        opened(tmp_path, base, vlm)
    check_pairs_truly(opened(tmp_path, base, vlm, accept=True), tuned(base))


def test_two_equal_towers_are_refused_even_with_the_flag(tmp_path: Path) -> None:
    base = filled(text_model())
    vlm = moved(tuned(base), *UNKNOWN_PREFIX) | moved(tuned(base), (r"^model\.", "tts.llm."), ("^lm_head", "tts.head"))
    with pytest.raises(PairingError) as caught:
        opened(tmp_path, base, vlm, accept=True)
    assert "foo.bar.llm.blocks.*" in str(caught.value) and "tts.llm.layers.*" in str(caught.value)


def test_missing_tensor_is_refused_even_with_the_flag(tmp_path: Path) -> None:
    base = filled(text_model())
    vlm = {name: tensor for name, tensor in moved(tuned(base), *UNKNOWN_PREFIX).items() if "up_proj" not in name}
    with pytest.raises(PairingError, match=r"model\.layers\.\*\.mlp\.up_proj\.weight"):
        opened(tmp_path, base, vlm, accept=True)


def test_known_layouts_are_not_inferred(tmp_path: Path) -> None:
    base = filled(text_model())
    folders = hand_made(tmp_path / "b", base, config=CONFIG), hand_made(tmp_path / "v", tuned(base), config=CONFIG)
    assert open_models(pair_from_folders(*map(str, folders))).report is None


def test_printed_rule_reads_the_same_pairing(tmp_path: Path) -> None:
    base = filled(text_model(biases=True))
    vlm = moved(layers_replaced(tuned(base), r"[qkv]_proj", fused_qkv("grouped")), *FOREIGN)
    models = opened(tmp_path, base, vlm)
    assert models.report is not None
    path = tmp_path / "rule.yaml"
    path.write_text(models.report.rule)
    assert parse_family(yaml.safe_load(models.report.rule), "rule").family == "inferred"
    pair = pair_from_folders(str(tmp_path / "base"), str(tmp_path / "vlm")).model_copy(update={"family": str(path)})
    again = open_models(pair)
    assert again.report is None
    assert again.pairing.tensors == models.pairing.tensors and again.pairing.copied == models.pairing.copied
    assert again.mapping == models.mapping != ""


def test_table_that_is_unlike_bases_needs_the_flag(tmp_path: Path) -> None:
    """The embedding is missing, and another table has its shape."""
    base = filled(text_model())
    vlm = moved(tuned(base), *UNKNOWN_PREFIX)
    vlm["foo.bar.llm.tok.weight"] = torch.randn(32, 16, generator=torch.Generator().manual_seed(3))
    with pytest.raises(UncertainPairing, match=r"embed_tokens\.weight: foo\.bar\.llm\.tok\.weight .* no likeness"):
        opened(tmp_path, base, vlm)


def test_table_that_is_no_head_is_none(tmp_path: Path) -> None:
    """The vlm ties its head, and has another table of that shape elsewhere."""
    base = filled(text_model())
    base["lm_head.weight"] = base["model.embed_tokens.weight"].clone()
    vlm = moved({n: t for n, t in tuned(base).items() if "lm_head" not in n}, *UNKNOWN_PREFIX)
    vlm["foo.extra.weight"] = torch.randn(32, 16, generator=torch.Generator().manual_seed(3))
    models = opened(tmp_path, base, vlm)
    assert models.report is not None and models.report.verdict == "medium" and models.report.vlm["other"] == 1
    assert not models.pairing.towers["vlm"].has_head and "foo.extra.weight" in models.pairing.copied


@pytest.mark.parametrize("trained", [True, False])
def test_last_gain_without_a_word_is_told_by_its_numbers(tmp_path: Path, trained: bool) -> None:
    base = filled(text_model())
    if not trained:
        base |= {name: torch.ones_like(tensor) for name, tensor in base.items() if "norm" in name}
    vlm = moved(tuned(base), (r"^model\.norm", "foo.bar.llm.g"), *UNKNOWN_PREFIX)
    if trained:
        assert opened(tmp_path, base, vlm).report is not None
        return
    with pytest.raises(UncertainPairing, match=r"model\.norm\.weight: foo\.bar\.llm\.g\.weight has its shape"):
        opened(tmp_path, base, vlm)


@pytest.mark.parametrize("related", [True, False])
def test_single_gain_of_its_shape_is_proven_layer_by_layer(tmp_path: Path, related: bool) -> None:
    """Gains that resemble no layer of base more than another are told by their shape alone."""
    base = filled(text_model() | {f"model.layers.{layer}.self_attn.q_norm.weight": (4,) for layer in range(4)})
    truth = tuned(base)
    if not related:
        truth |= {n: 1 + 0.1 * t for n, t in filled({n: (4,) for n in base if "q_norm" in n}, seed=3).items()}
    vlm = moved(truth, (r"self_attn\.q_norm", "att.gain"), *UNKNOWN_PREFIX)
    if related:
        check_pairs_truly(opened(tmp_path, base, vlm), truth)
        return
    with pytest.raises(UncertainPairing, match=r"att\.gain: that it is self_attn\.q_norm is told by its shape alone"):
        opened(tmp_path, base, vlm)


def test_base_may_stack_experts_that_the_vlm_stores_one_by_one(tmp_path: Path) -> None:
    split = filled(text_model(experts=3))

    def make(start: str, group: Tensors) -> Tensors:
        gate, up, down = (
            torch.stack([group[f"mlp.experts.{number}.{part}_proj.weight"] for number in range(3)])
            for part in ("gate", "up", "down")
        )
        return {"mlp.experts.gate_up_proj": torch.cat([gate, up], 1), "mlp.experts.down_proj": down}

    truth = tuned(split)
    vlm = moved(truth, *UNKNOWN_PREFIX, (r"gate_proj", "a"), ("up_proj", "b"), ("down_proj", "c"))
    check_pairs_truly(opened(tmp_path, layers_replaced(split, r"\.experts\.", make), vlm), truth)


def test_ancestor_takes_part_in_the_verdict(tmp_path: Path) -> None:
    """A base far from the ancestor of both: the tower is near one of them, and that is enough."""
    ancestor = filled(text_model())
    generator = torch.Generator().manual_seed(5)
    base = {name: tensor + 0.8 * torch.randn(tensor.shape, generator=generator) for name, tensor in ancestor.items()}
    vlm = moved(tuned(ancestor), *UNKNOWN_PREFIX) | filled(EYE, seed=9)
    roles = {"ancestor": ancestor, "base": base, "vlm": vlm}
    folders = {role: str(hand_made(tmp_path / role, tensors, config=CONFIG)) for role, tensors in roles.items()}
    with pytest.raises(UncertainPairing, match=r"more than 0\.3 of their norm away"):
        open_models(pair_from_folders(folders["base"], folders["vlm"]))
    models = open_models(pair_from_folders(folders["base"], folders["vlm"], folders["ancestor"]))
    assert models.report is not None
    assert "sampled matrices" not in " ".join(models.report.reasons)


REFUSED = {"phi4 multimodal": "LoRA adapters", "stacked experts, interleaved": "no stack of layers holds half"}
"""Needs a family file: adapters, and biases of experts that are stacked."""


@pytest.mark.parametrize(
    ("name", "swapped"),
    [*((name, False) for name in LAYOUTS), *((name, True) for name, layout in LAYOUTS.items() if layout.wrong)],
)
def test_hand_made_layouts_need_no_family_file(tmp_path: Path, name: str, swapped: bool) -> None:
    """Where a layout fuses, it is also stored in the order that its family file would get wrong."""
    layout = LAYOUTS[name]
    store = layout.wrong if swapped else layout.store
    assert store is not None
    ancestor = plain(**layout.base)
    base, truth = moved_by_noise(ancestor, 1), moved_by_noise(ancestor, 2)
    tokens = [f"w{number}" for number in range(24)]
    more = {"base": tokens, "vlm": [*tokens, "<a>", "<b>"]} if layout.by_token else {"base": None, "vlm": None}
    folders = {
        "base": hand_made(tmp_path / "base", base, config={"model_type": "llama"}, tokens=more["base"]),
        "vlm": hand_made(tmp_path / "vlm", store(truth), config=layout.config, tokens=more["vlm"]),
    }
    checkpoints = {role: open_checkpoint(folder) for role, folder in folders.items()}
    if name in REFUSED:
        with pytest.raises(PairingError, match=REFUSED[name]):
            infer_models(checkpoints, PairingError("no family is known"), True)
        return
    models = infer_models(checkpoints, PairingError("no family is known"), True)
    assert models.report is not None and models.report.verdict == ("low" if name == "wings" else "high")
    for paired in models.pairing.tensors:
        header = models.checkpoints["vlm"].header(paired.stored["vlm"])
        found = read_entries(header, 0, header.num_entries).reshape(header.shape)
        assert torch.equal(found[: len(truth[paired.name])], truth[paired.name]), paired.name


def test_layers_that_cannot_be_read_back_leave_a_doubt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = filled(text_model())
    monkeypatch.setattr(Judge, "read", lambda self, operations: None)
    with pytest.raises(UncertainPairing, match="the sampled layers cannot be read as inferred"):
        opened(tmp_path, base, moved(tuned(base), *UNKNOWN_PREFIX))


def test_model_type_that_is_no_text_does_not_stop_inference(tmp_path: Path) -> None:
    base = filled(text_model())
    vlm = moved(tuned(base), *UNKNOWN_PREFIX)
    models = opened(tmp_path, base, vlm, config={**CONFIG, "model_type": ["odd"]})
    assert models.report is not None


def test_single_number_is_no_table(tmp_path: Path) -> None:
    base = filled(text_model())
    vlm = moved(tuned(base), *UNKNOWN_PREFIX) | {"foo.scale": torch.tensor(1.0)}
    checkpoint = open_checkpoint(hand_made(tmp_path, vlm, config=CONFIG))
    known = {"model.embed_tokens.weight": checkpoint.tensors["foo.scale"]}
    assert table_distance(Sampled(known, checkpoint), "model.embed_tokens.weight", "foo.scale") == UNLIKE


def test_refusal_that_inference_repeats_is_said_once(tmp_path: Path) -> None:
    base = filled(text_model())
    folders = {"base": base, "vlm": {"a.weight": torch.ones(2, 2)}}
    checkpoints = {r: open_checkpoint(hand_made(tmp_path / r, t, config=CONFIG)) for r, t in folders.items()}
    with pytest.raises(PairingError) as first:
        infer_models(checkpoints, PairingError("no family is known"), accept_inferred=False)
    reason = str(first.value).partition("Nor could its names be inferred: ")[2]
    assert reason
    with pytest.raises(PairingError) as second:
        infer_models(checkpoints, PairingError(reason), accept_inferred=False)
    assert str(second.value) == reason
