"""Methods of mergekit through our stream: its values, for every method, whatever the order of the tensors."""

from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mergelab.checkpoints.headers import open_checkpoint
from mergelab.engine import by_mergekit
from mergelab.engine.by_mergekit import merge_by_mergekit
from mergelab.engine.inputs import Inputs
from mergelab.engine.plan import TensorJob, operation, plan_jobs
from mergelab.engine.stream import stream
from mergelab.engine.targets import LiveTarget
from mergelab.errors import MachineError, PairingError
from mergelab.towers.pairing import pair_checkpoints
from merges.block import Block
from merges.mergekit_methods import MERGEKIT, build_mergekit, mergekit_inputs
from tests.builders import tiny_llama
from tests.merges.test_mergekit_methods import merge_methods, wanted

TWO = ("base", "vlm")
DRAWING = ("dare_linear", "dare_ties", "della", "della_linear")
FROM_ANCESTOR = sorted(name for name in MERGEKIT if name not in ("slerp", "nearswap", "arcee_fusion"))
FROM_BASE = sorted(name for name in MERGEKIT if name != "model_stock")


class Trio:
    """Three related text models: ancestor, base, and a text checkpoint in the place of the vlm."""

    def __init__(self, root: Path) -> None:
        ancestor = tiny_llama(root / "ancestor", seed=0)
        base = tiny_llama(root / "base", seed=1, start=ancestor, noise=0.1)
        vlm = tiny_llama(root / "vlm", seed=2, start=base, noise=0.05)
        folders = {"ancestor": ancestor, "base": base, "vlm": vlm}
        self.checkpoints = {role: open_checkpoint(folder) for role, folder in folders.items()}
        self.jobs: list[TensorJob] = plan_jobs(pair_checkpoints(self.checkpoints), self.checkpoints, "float32")
        self.tensors = {role: load_file(folder / "model.safetensors") for role, folder in folders.items()}

    def merged(
        self, method: str, values: Mapping[str, Any], zero: str, seed: int = 0, backwards: bool = False
    ) -> dict[str, torch.Tensor]:
        live = {job.tensor.name: torch.full(tuple(job.tensor.shape), 7.0) for job in self.jobs}
        jobs = self.jobs[::-1] if backwards else self.jobs
        stream(jobs, operation(method, values, zero, seed=seed), Inputs(self.checkpoints, keep=True), LiveTarget(live))
        return live


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Trio:
    return Trio(tmp_path_factory.mktemp("trio"))


def values_for(name: str) -> dict[str, Any]:
    """Return values under which something is dropped, where the method can drop."""
    slots = {slot.name for slot in MERGEKIT[name].slots}
    shares = {"density": 0.6, "select_topk": 0.5}
    return wanted(name) | {key: value for key, value in shares.items() if key in slots and name != "task_arithmetic"}


@pytest.mark.parametrize(
    ("name", "zero"), [*((name, "ancestor") for name in FROM_ANCESTOR), *((name, "base") for name in FROM_BASE)]
)
def test_every_method_gives_the_values_of_mergekit(trio: Trio, name: str, zero: str) -> None:
    values = values_for(name)
    actual = trio.merged(f"mergekit:{name}", values, zero)
    roles, base = mergekit_inputs(name, zero)
    inputs = (*((base,) if base is not None else ()), *roles)
    changed = 0
    for job in trio.jobs:
        tensor = job.tensor.name
        # Rows without a token are the vlm's own and no part of the merge.
        rows = job.tensor.rows.rows if job.tensor.rows is not None else {}
        given = {role: t[tensor][list(rows[role])] if rows else t[tensor] for role, t in trio.tensors.items()}
        merged = actual[tensor][list(rows["vlm"])] if rows else actual[tensor]
        # The draws are the caller's business; the values are mergekit's once they are fixed.
        torch.manual_seed(by_mergekit.draw_key(Block(tensor, "", roles)))
        expected = merge_methods.merge_tensors(
            [given[role] for role in inputs],
            name,
            parameters=values,
            base_index=0 if base is not None else None,
            dtype=torch.float32,
        )
        assert torch.equal(merged, expected), tensor
        changed += int((merged != given["ancestor"]).sum())
    assert changed > 0


@pytest.mark.parametrize("name", DRAWING)
def test_draws_depend_on_seed_and_tensor_alone(trio: Trio, name: str) -> None:
    values = {"weight": 0.5, "density": 0.6}
    torch.manual_seed(5)
    first = trio.merged(f"mergekit:{name}", values, "ancestor")
    torch.manual_seed(6)
    again = trio.merged(f"mergekit:{name}", values, "ancestor", backwards=True)
    other = trio.merged(f"mergekit:{name}", values, "ancestor", seed=1)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)
    shape = (16, 16)
    masks = []
    for tensor in ("a", "b"):
        block = Block(tensor, "mlp", TWO)
        made = merge_by_mergekit(
            torch.zeros(shape),
            [torch.ones(shape), torch.ones(shape)],
            build_mergekit(f"mergekit:{name}", values, TWO),
            block,
        )
        masks.append(made != 0)
    assert not torch.equal(*masks), "two tensors of one shape get two masks"


def test_global_generator_and_inputs_are_left_alone(trio: Trio) -> None:
    before = torch.random.get_rng_state()
    kept = {role: {key: tensor.clone() for key, tensor in t.items()} for role, t in trio.tensors.items()}
    zero, *models = (trio.tensors[role]["model.embed_tokens.weight"] for role in ("ancestor", "base", "vlm"))
    for name in FROM_ANCESTOR:
        roles, base = mergekit_inputs(name, "ancestor")
        parameters = build_mergekit(f"mergekit:{name}", values_for(name), roles)
        merge_by_mergekit(zero if base else None, models[2 - len(roles) :], parameters, Block("w", "mlp", roles))
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(torch.equal(kept[role][key], t[key]) for role, t in trio.tensors.items() for key in t)


def test_one_value_per_model_reaches_the_model_it_names() -> None:
    zero, models = torch.zeros(4), [torch.ones(4), torch.full((4,), 10.0)]
    parameters = build_mergekit("mergekit:task_arithmetic", {"weight": {"vlm": 2.0, "base": 3.0}}, TWO)
    assert merge_by_mergekit(zero, models, parameters, Block("w", "mlp", TWO)).tolist() == [23.0] * 4
    parameters = build_mergekit("mergekit:linear", {"weight": {"vlm": 0.75, "base": 0.25}}, TWO)
    assert merge_by_mergekit(None, models, parameters, Block("w", "mlp", TWO)).tolist() == [7.75] * 4


@pytest.mark.parametrize("shape", [(0,), (0, 4), (), (1,), (5,), (3, 1)])
@pytest.mark.parametrize("name", ["ties", "sce", "breadcrumbs", "arcee_fusion", "nuslerp", "karcher"])
def test_small_and_empty_tensors(name: str, shape: tuple[int, ...]) -> None:
    roles, base = mergekit_inputs(name, "base" if name == "arcee_fusion" else "ancestor")
    parameters = build_mergekit(f"mergekit:{name}", values_for(name), roles)
    models = [torch.full(shape, 1.0 + position) for position in range(len(roles))]
    zero = torch.full(shape, 0.5) if base else None
    assert merge_by_mergekit(zero, models, parameters, Block("w", "mlp", roles)).shape == shape


def test_what_mergekit_cannot_do_names_method_and_reason() -> None:
    parameters = build_mergekit("mergekit:della", {"weight": 1.0, "density": 0.6}, TWO)
    with pytest.raises(ValueError, match="mergekit refuses it"):
        merge_by_mergekit(torch.zeros(1), [torch.ones(1), torch.ones(1)], parameters, Block("w", "mlp", TWO))
    parameters = build_mergekit("mergekit:task_arithmetic", {"weight": 3e38}, TWO)
    with pytest.raises(ValueError, match="1 NaN or infinite entries"):
        merge_by_mergekit(torch.zeros(1), [torch.ones(1), torch.ones(1)], parameters, Block("w", "mlp", TWO))


def test_not_finite_input_is_named(trio: Trio) -> None:
    parameters = build_mergekit("mergekit:sce", {}, TWO)
    with pytest.raises(ValueError, match="vlm: expected finite float32 numbers, found 1 NaN"):
        merge_by_mergekit(
            torch.zeros(2), [torch.ones(2), torch.tensor([1.0, float("nan")])], parameters, Block("w", "mlp", TWO)
        )


def test_refusal_of_mergekit_names_the_tensor(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr(merge_methods, "merge_tensors", refuse)
    with pytest.raises(PairingError, match=r"mergekit:sce, tensor [\w.]+: mergekit refuses it: no"):
        trio.merged("mergekit:sce", {}, "ancestor")


def test_another_version_is_refused_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_mergekit, "version", lambda _: "0.1.6")
    with pytest.raises(MachineError, match=r"expected version 0\.1\.5 .*, found 0\.1\.6"):
        operation("mergekit:sce", {}, "ancestor")

    def missing(_: str) -> str:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(by_mergekit, "version", missing)
    with pytest.raises(MachineError, match="found none"):
        operation("mergekit:sce", {}, "ancestor")
