"""The digest on checkpoints: what is read, what stops, what goes on when told to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mergelab.checkpoints.headers import open_checkpoint
from mergelab.engine.ancestry import ancestry_summary, check_related, sampled_rows
from mergelab.errors import PairingError
from mergelab.towers.pairing import pair_checkpoints
from tests.builders import hand_made, tiny_llama, tiny_llava


def test_sampled_rows_are_four_stretches(tmp_path: Path) -> None:
    tall = torch.arange(200 * 3, dtype=torch.float32).reshape(200, 3)
    small = torch.arange(12, dtype=torch.bfloat16).reshape(4, 3)
    checkpoint = open_checkpoint(hand_made(tmp_path / "a", {"tall": tall, "small": small}))
    rows = sampled_rows(checkpoint.tensors["tall"]).reshape(-1, 3)[:, 0] / 3
    assert rows.tolist() == [*range(16), *range(61, 77), *range(123, 139), *range(184, 200)]
    assert sampled_rows(checkpoint.tensors["small"]).tolist() == list(range(12))


def opened(**folders: Path) -> tuple:
    checkpoints = {role: open_checkpoint(folder) for role, folder in folders.items()}
    return pair_checkpoints(checkpoints), checkpoints


def test_related_models_pass(tmp_path: Path) -> None:
    ancestor = tiny_llama(tmp_path / "ancestor")
    base = tiny_llama(tmp_path / "base", start=ancestor, seed=1, noise=0.1)
    vlm = tiny_llava(tmp_path / "vlm", start=base, seed=2)
    digest = check_related(*opened(ancestor=ancestor, base=base, vlm=vlm))
    assert digest.verdict == "child"
    assert digest.projection == pytest.approx(1, abs=0.1)
    assert not ancestry_summary(digest, accepted=True)["accepted_unrelated"]


def test_unrelated_models_stop_unless_accepted(tmp_path: Path) -> None:
    base, vlm = tiny_llama(tmp_path / "base", seed=1), tiny_llava(tmp_path / "vlm", seed=2)
    models = opened(base=base, vlm=vlm)
    with pytest.raises(PairingError, match="nothing in common with base's") as caught:
        check_related(*models)
    assert "--accept-unrelated" in str(caught.value) and str(base) in str(caught.value)
    digest = check_related(*models, accept=True)
    assert ancestry_summary(digest, accepted=True) == {
        "verdict": "unrelated",
        "reason": digest.reason,
        "projection": None,
        "accepted_unrelated": True,
    }


def test_swapped_tensors_under_right_names_stop(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    base = tiny_llama(tmp_path / "base")
    vlm = tiny_llama(tmp_path / "vlm", start=base, seed=1)
    tensors = load_file(vlm / "model.safetensors")
    for layer in range(2):
        gate, up = (f"model.layers.{layer}.mlp.{name}_proj.weight" for name in ("gate", "up"))
        tensors[gate], tensors[up] = tensors[up], tensors[gate]
    save_file(tensors, vlm / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PairingError, match=r"swapped projection: .*gate_proj.weight is base's .*up_proj"):
        check_related(*opened(base=base, vlm=vlm))
