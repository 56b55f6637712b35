"""Which family file a checkpoint needs, told by its keys; the config only breaks ties."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from mergelab.errors import PairingError
from mergelab.towers.rules import Family, shipped_families


def choose_family(
    names: Collection[str], config: Mapping[str, Any], families: Sequence[Family] | None = None
) -> Family | None:
    """Return the family that fits a checkpoint best, or None where the generic prefix table is all there is.

    A family that names keys fits if all of them are found and none of those that it excludes; such families come
    before those that only name a ``model_type``. Among equals, one that names the ``model_type`` wins.

    Args:
        names: The stored names.
        config: The checkpoint's ``config.json``.
        families: To choose from; None: the shipped ones.

    Raises:
        PairingError: Two families fit equally well.
    """
    model_type = config.get("model_type")
    scores: dict[str, tuple[Family, tuple[bool, bool]]] = {}
    for family in shipped_families() if families is None else families:
        detect = family.detect
        named = model_type in detect.model_type
        by_keys = bool(detect.keys_all) and all(any_found(pattern, names) for pattern in detect.keys_all)
        if (by_keys or (named and not detect.keys_all)) and not any(
            any_found(pattern, names) for pattern in detect.keys_none
        ):
            scores[family.family] = family, (by_keys, named)
    if not scores:
        return None
    best = max(score for _, score in scores.values())
    chosen = [family for family, score in scores.values() if score == best]
    if len(chosen) > 1:
        fitting = ", ".join(family.family for family in chosen)
        raise PairingError(f"the names fit several families: {fitting}. Name one as `family:` in the pair.")
    return chosen[0]


def family_of_type(model_type: str) -> Family | None:
    """Return the one shipped family that names this ``model_type``; None if there is none or there are several."""
    found = [family for family in shipped_families() if model_type in family.detect.model_type]
    return found[0] if len(found) == 1 else None


def any_found(pattern: Any, names: Iterable[str]) -> bool:
    """Say whether a pattern is found in any name."""
    return any(pattern.search(name) for name in names)
