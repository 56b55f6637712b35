"""The class matrix again, with every family file and the prefix table left out: what inference alone makes of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mergelab.checkpoints.headers import open_checkpoint
from mergelab.checkpoints.reader import read_entries
from mergelab.errors import PairingError
from mergelab.sweeps.models import Models, infer_models
from tests.families.catalogue import FAMILIES
from tests.families.checkpoints import Build
from tests.families.family import Family, Layout

CASES = [
    pytest.param(family, layout, id=f"{family.id}-{layout}")
    for family in FAMILIES
    for layout in family.layouts
    if family.id != "gemma3n_text"  # it keeps lists of matrices beside the layers, which are refused, not guessed
]

FOREIGN = {
    **{"model": "m", "language_model": "brain", "text_model": "writer", "layers": "blocks", "transformer": "tr"},
    **{"embed_tokens": "tok", "norm": "last_ln", "lm_head": "out_head"},
    **{"self_attn": "att", "q_proj": "p1", "k_proj": "p2", "v_proj": "p3", "o_proj": "p4", "out_proj": "p4"},
    **{"mlp": "ff", "gate_proj": "g1", "up_proj": "g2", "down_proj": "g3", "gate_up_proj": "g12"},
    **{"input_layernorm": "n1", "post_attention_layernorm": "n2", "pre_feedforward_layernorm": "n3"},
    **{"post_feedforward_layernorm": "n4"},
}
"""Other words for the parts of names: prefixes and leaves that nobody uses."""


def inferred(base: Path, vlm: Path) -> Models:
    checkpoints = {"base": open_checkpoint(base), "vlm": open_checkpoint(vlm)}
    return infer_models(checkpoints, PairingError("no family is known"), accept_inferred=True)


def check_truth(models: Models) -> None:
    """Compare every weight of the pairing in both models: base is the vlm's tower, moved by 0.02 of its spread.

    Every weight is random, so that one in another place or order differs by more than 1, a gain by 0.14.
    """
    for paired in models.pairing.tensors:
        base, vlm = (entries(models, role, paired.stored[role]) for role in ("base", "vlm"))
        rows = min(len(base), len(vlm))
        tied_elsewhere = paired.virtual and paired.name == "lm_head.weight"
        assert tied_elsewhere or torch.norm(vlm[:rows] - base[:rows]) < 0.05 * torch.norm(base), paired.name


def entries(models: Models, role: str, stored: str) -> torch.Tensor:
    header = models.checkpoints[role].header(stored)
    return read_entries(header, 0, header.num_entries).reshape(header.shape).float()


def check_sure(models: Models) -> None:
    """Demand high confidence: nothing missing, nothing that no word explains."""
    report = models.report
    assert report is not None
    assert (report.verdict, report.reasons) == ("high", ())
    assert report.vlm["unknown"] == report.vlm["other"] == 0


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_inference_finds_the_true_tower(built: Build, family: Family, layout: Layout) -> None:
    known = built(family)
    models = inferred(known.base, known.folder(layout))
    check_truth(models)
    check_sure(models)


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_names_that_nobody_uses_are_inferred_as_well(
    built: Build, family: Family, layout: Layout, tmp_path: Path
) -> None:
    known = built(family)
    shutil.copytree(known.folder(layout), tmp_path / "vlm")
    tensors = load_file(known.folder(layout) / "model.safetensors")
    foreign = {"thing." + ".".join(FOREIGN.get(part, part) for part in n.split(".")): t for n, t in tensors.items()}
    assert len(foreign) == len(tensors)
    save_file(foreign, tmp_path / "vlm" / "model.safetensors", metadata={"format": "pt"})
    models = inferred(known.base, tmp_path / "vlm")
    check_truth(models)
    check_sure(models)
