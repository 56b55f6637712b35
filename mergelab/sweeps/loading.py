"""Builds the live models of an experiment: parents as they are, and the tower that merges are written into."""

from __future__ import annotations

import torch

from mergelab.checkpoints.headers import Checkpoint
from mergelab.checkpoints.reader import torch_dtype
from mergelab.engine.inputs import Inputs
from mergelab.engine.plan import COPY, operation, plan_jobs
from mergelab.engine.stream import stream
from mergelab.engine.targets import LiveTarget
from mergelab.live.configs import has_vlm_class, tower_config
from mergelab.live.model import LiveModel, build_tower, load_text_model
from mergelab.sweeps.experiment import Prepared
from mergelab.sweeps.models import paired
from mergelab.towers.layouts import Tower


def stored_dtype(prepared: Prepared, role: str) -> torch.dtype:
    """Return the dtype of most of a model's weights on disk (of a vlm: of its tower's)."""
    checkpoint = prepared.models.checkpoints[role]
    names = [paired.stored[role] for paired in prepared.models.pairing.tensors]
    return torch_dtype(max((checkpoint.header(name) for name in names), key=lambda header: header.num_entries).dtype)


def load_text_parent(prepared: Prepared, role: str) -> LiveModel:
    """Load base or ancestor as it is: its own config, its own dtype."""
    folder = prepared.models.checkpoints[role].folder
    return load_text_model(folder, prepared.device, stored_dtype(prepared, role))


def load_tower(prepared: Prepared, dtype: torch.dtype) -> LiveModel:
    """Load the vlm's tower in ``dtype``, with the picture view if any task asks for it."""
    models = prepared.models
    live = tower_of(models.checkpoints["vlm"], models.pairing.towers["vlm"], prepared.device, dtype)
    return live if prepared.has_vision else LiveModel(text=live.text)


def tower_of(checkpoint: Checkpoint, tower: Tower, device: str, dtype: torch.dtype) -> LiveModel:
    """Load the tower of a checkpoint under its own config, with the picture view if transformers has a class for it.

    transformers loads the weights itself where it has a class for the vlm, so that the vlm's own scores do not pass
    through our stream. A vlm of the original LLaVA code has none; its tower is streamed in.

    Args:
        checkpoint: A vlm, or a plain text checkpoint.
        tower: Its tower.
        device: Where the weights live.
        dtype: Of the weights.
    """
    folder = checkpoint.folder
    if not tower.sees_pictures:
        return load_text_model(folder, device, dtype)
    config = tower_config(folder, tower.has_head, tower.family)
    if has_vlm_class(folder, tower.family):
        return build_tower(config, device, dtype, folder)
    live = build_tower(config, device, dtype)
    families = {} if tower.family is None else {"base": tower.family, "vlm": tower.family}
    alone, pairing = paired({"base": checkpoint, "vlm": checkpoint}, families)
    jobs = plan_jobs(pairing, alone, str(dtype).removeprefix("torch."))
    inputs = Inputs(alone, device=device)
    target = LiveTarget(live.tensors())
    target.check(jobs)
    stream(jobs, operation(COPY, {"of": "vlm"}, None), inputs, target)
    return live
