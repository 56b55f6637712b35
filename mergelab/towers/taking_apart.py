"""Which fused tensors are taken apart: those that a partner stores in another form. The others merge as they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mergelab.errors import PairingError, problem_list
from mergelab.towers.layouts import Tower, first
from mergelab.towers.pairs import StoredView


@dataclass(frozen=True)
class PartHeader:
    """What is asked of a tensor, of a part of one."""

    shape: tuple[int, ...]
    dtype: str


def taken_apart(towers: Mapping[str, Tower]) -> tuple[dict[str, Tower], dict[str, dict[str, StoredView]]]:
    """Return the towers with fused tensors replaced by their parts, where not all models have them fused alike.

    Returns:
        Role -> tower, whose ``stored`` then has the parts under names such as ``STORED[q_proj]``; and role -> such a
        name -> where it lies.

    Raises:
        PairingError: A model stores a weight inside a fused tensor and by itself as well.
    """
    names = [
        {*tower.stored, *(part.name for parts in tower.parts.values() for part in parts)} for tower in towers.values()
    ]
    apart = set()
    for fused in {name for tower in towers.values() for name in tower.parts}:
        parts = {part.name for tower in towers.values() for part in tower.parts.get(fused, ())}
        if not fused_alike(fused, towers) and not any(parts.isdisjoint(own) for own in names):
            apart.add(fused)
    changed: dict[str, Tower] = {}
    views: dict[str, dict[str, StoredView]] = {}
    doubled: list[str] = []
    for role, tower in towers.items():
        stored = {name: own for name, own in tower.stored.items() if not (name in apart and name in tower.parts)}
        views[role] = {}
        for name in apart.intersection(tower.parts):
            for part in tower.parts[name]:
                label = f"{tower.stored[name]}[{part.label}]"
                if part.name in stored:
                    doubled.append(f"{role}: {part.name} is stored twice: as {stored[part.name]} and as {label}")
                stored[part.name] = label
                views[role][label] = StoredView(tower.stored[name], part.view)
        kept = {name: parts for name, parts in tower.parts.items() if name not in apart}
        changed[role] = replace(tower, stored=stored, parts=kept)
    if doubled:
        raise PairingError(
            problem_list("weights that lie inside a fused tensor and beside it:", first(doubled), "Save one of them.")
        )
    return changed, views


def fused_alike(name: str, towers: Mapping[str, Tower]) -> bool:
    """Say whether every model stores a fused tensor, cut in the same way."""
    first, *others = (tower.parts.get(name) for tower in towers.values())
    return first is not None and all(other == first for other in others)
