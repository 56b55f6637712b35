"""The class matrix again, with every family file and the prefix table left out: what inference alone makes of it."""

from __future__ import annotations

import re
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
from tests.families.checkpoints import Build, Built
from tests.families.family import Family, Layout

CASES = [pytest.param(family, layout, id=f"{family.id}-{layout}") for family in FAMILIES for layout in family.layouts]

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


def truth(built: Built) -> dict[str, torch.Tensor]:
    """Return the tower's weights, experts one by one as most text models are stored."""
    state = dict(built.tower.state_dict())
    for name in [name for name in state if re.search(r"\.experts\.(gate_up|down)_proj$", name)]:
        halves = state[name].chunk(2, 1) if "gate_up" in name else [state[name]]
        parts = ["gate_proj", "up_proj"] if "gate_up" in name else ["down_proj"]
        for part, half in zip(parts, halves, strict=True):
            for expert, tensor in enumerate(half):
                state[f"{name.rpartition('.')[0]}.{expert}.{part}.weight"] = tensor
    return state


def check_truth(built: Built, models: Models) -> None:
    """Compare every weight of the pairing, read from the vlm, with the tower that the vlm was made of."""
    known = truth(built)
    for paired in models.pairing.tensors:
        header = models.checkpoints["vlm"].header(paired.stored["vlm"])
        found = read_entries(header, 0, header.num_entries).reshape(header.shape)
        rows = min(len(found), len(known[paired.name]))
        assert torch.equal(found[:rows], known[paired.name][:rows]), paired.name


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
    check_truth(known, models)
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
    check_truth(known, models)
    check_sure(models)
