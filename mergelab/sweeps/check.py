"""Do the models of a pair fit each other: everything that headers, configs and tokenizer files say. No torch."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict
from typing import Any

from mergelab.checkpoints.headers import TOWER_FOLDER
from mergelab.sweeps.models import Models
from mergelab.towers.config_differences import config_differences
from mergelab.towers.token_differences import token_differences

ROLE_PARTS = ("tower", "vision", "projector", "extra")


def check_record(models: Models) -> dict[str, Any]:
    """Return what is known of a pair that fits; one that does not was refused when it was opened.

    Returns:
        JSON-able. ``models``: role -> folder, model_type, layout, family and how far its file was ``checked``
        (None where a prefix is all there is), ``taken_apart`` (fused tensors and the weights in them), dtypes of the
        tower's tensors, parts (how many tensors are tower, vision, projector, extra), gigabytes. ``coverage``: how
        many tensors of base and ancestor are matched, virtual (a tied head stands for its embedding), explained;
        none is missing. ``merged`` and ``copied`` tensors of the vlm, ``explained`` one by one, ``config``
        differences, ``rows`` of embedding and head, ``tokens`` (None without tokenizer files), ``notes``,
        ``inferred`` (the report on a vlm of no known family, else None).
    """
    pairing = models.pairing
    described = {}
    coverage = {}
    for role, checkpoint in models.checkpoints.items():
        tower = pairing.towers[role]
        dtypes = Counter(checkpoint.header(stored).dtype for stored in tower.stored.values())
        parts = Counter(tower.roles.values())
        described[role] = {
            "folder": str(checkpoint.folder),
            "model_type": checkpoint.config.get("model_type"),
            "layout": f"{TOWER_FOLDER}/ {tower.layout}" if checkpoint.repository else tower.layout,
            "family": None if tower.family is None else tower.family.family,
            "checked": None if tower.family is None else tower.family.checked,
            "taken_apart": {
                "tensors": len({view.stored for view in pairing.views.get(role, {}).values()}),
                "weights": len(pairing.views.get(role, {})),
            },
            "dtypes": dict(dtypes.most_common()),
            "parts": {part: parts[part] for part in ROLE_PARTS if parts[part]},
            "gigabytes": round(checkpoint.num_bytes / 1e9, 3),
        }
        if role != "vlm":
            virtual = sum(role in paired.virtual for paired in pairing.tensors)
            explained = sum(key.startswith(f"{role}: ") for key in pairing.explained)
            coverage[role] = {
                "matched": len(pairing.tensors) - virtual,
                "virtual": virtual,
                "explained": explained,
                "missing": 0,
            }
    apart = [
        f"{role}: its tower is a checkpoint of its own, {checkpoint.folder}; what lies beside it is copied as files"
        for role, checkpoint in models.checkpoints.items()
        if checkpoint.repository
    ]
    folders = {role: checkpoint.folder for role, checkpoint in models.checkpoints.items()}
    tokens = token_differences(folders["base"], folders["vlm"])
    configs = (pairing.towers[role].text_config for role in ("base", "vlm"))
    return {
        "fits": True,
        "models": described,
        "coverage": coverage,
        "merged": len(pairing.tensors),
        "merged_entries": sum(math.prod(paired.shape) for paired in pairing.tensors),
        "copied": len(pairing.copied),
        "explained": dict(pairing.explained),
        "config": config_differences(*configs),
        "rows": {name: dict(counts) for name, counts in pairing.vocabulary.items()},
        "tokens": None if tokens is None else asdict(tokens),
        "notes": [*pairing.notes, *apart],
        "inferred": None if models.report is None else models.report.record(),
    }
