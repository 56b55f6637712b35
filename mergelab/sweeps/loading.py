"""Builds the live models of an experiment: parents as they are, and the tower that merges are written into."""

from __future__ import annotations

import torch
from transformers import PretrainedConfig

from mergelab.checkpoints.reader import torch_dtype
from mergelab.engine.inputs import Inputs
from mergelab.engine.plan import COPY, operation, plan_jobs
from mergelab.engine.stream import stream
from mergelab.engine.targets import LiveTarget
from mergelab.live.configs import has_vlm_class
from mergelab.live.model import LiveModel, build_tower, load_text_model
from mergelab.sweeps.experiment import Prepared
from mergelab.sweeps.models import Models


def stored_dtype(prepared: Prepared, role: str) -> torch.dtype:
    """Return the dtype of most of a model's weights on disk (of a vlm: of its tower's)."""
    checkpoint = prepared.models.checkpoints[role]
    names = [paired.stored[role] for paired in prepared.models.pairing.tensors]
    return torch_dtype(max((checkpoint.tensors[name] for name in names), key=lambda header: header.num_entries).dtype)


def load_text_parent(prepared: Prepared, role: str) -> LiveModel:
    """Load base or ancestor as it is: its own config, its own dtype."""
    folder = prepared.models.checkpoints[role].folder
    return load_text_model(folder, prepared.device, stored_dtype(prepared, role))


def load_tower(prepared: Prepared, dtype: torch.dtype) -> LiveModel:
    """Load the vlm's tower in ``dtype``, with the picture view if any task asks for it."""
    return tower_of(prepared.models, prepared.tower_config, prepared.device, dtype, with_vlm=prepared.has_vision)


def tower_of(
    models: Models, config: PretrainedConfig, device: str, dtype: torch.dtype, *, with_vlm: bool = False
) -> LiveModel:
    """Load the tower of an opened pair's vlm under its own config.

    transformers loads the weights itself where it has a class for the vlm, so that the vlm's own scores do not pass
    through our stream. A vlm of the original LLaVA code has none; its tower is streamed in.

    Args:
        models: The opened pair.
        config: ``live.configs.tower_config`` of the vlm.
        device: Where the weights live.
        dtype: Of the weights.
        with_vlm: Keep the picture view.
    """
    folder = models.checkpoints["vlm"].folder
    if not models.sees_pictures:  # a plain text checkpoint stands as vlm
        return load_text_model(folder, device, dtype)
    if has_vlm_class(folder):
        live = build_tower(config, device, dtype, folder)
        return live if with_vlm else LiveModel(text=live.text)
    live = build_tower(config, device, dtype)
    jobs = plan_jobs(models.pairing, models.checkpoints, str(dtype).removeprefix("torch."))
    inputs = Inputs(models.checkpoints, device=device)
    stream(jobs, operation(COPY, {"of": "vlm"}, None), inputs, LiveTarget(live.tensors()))
    return live
