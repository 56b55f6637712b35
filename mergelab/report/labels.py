"""Short names of points for people: the method and what tells it from its neighbours in the grid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mergelab.records import PointFolder

_ORDER = ("base", "ancestor", "vlm", "control", "merge")


def point_labels(points: Sequence[PointFolder]) -> dict[str, str]:
    """Label of every point by its id: parents, controls, merges in run order; all different."""
    ordered = sorted(points, key=lambda point: _ORDER.index(point.role))
    labels = {point.point_id: _label(point, points) for point in ordered}
    count = Counter(labels.values())
    return {point_id: label if count[label] == 1 else f"{label} ({point_id[:8]})" for point_id, label in labels.items()}


def copied_parent(point: PointFolder) -> str | None:
    """Role whose weights an endpoint control sends through the stream; None for every other point."""
    if point.role != "control" or point.point["method"] != "copy":
        return None
    return str((point.point["parameters"] or {}).get("of"))


def short_value(value: object) -> str:
    """A parameter value as people write it: 0.5, tensor, base 0.25 vlm 0.75."""
    if isinstance(value, Mapping) and "method" in value:  # the merge that a gaussian control is as large as
        told = {k: v for k, v in value["parameters"].items() if type(v) in (int, float) or (k == "weights" and v)}
        return " ".join([str(value["method"]), *(f"{key} {short_value(item)}" for key, item in told.items())])
    if isinstance(value, Mapping):
        return " ".join(f"{key} {short_value(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return " ".join(short_value(item) for item in value) or "none"
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def _label(point: PointFolder, points: Sequence[PointFolder]) -> str:
    if point.role not in ("control", "merge"):
        return point.role
    parent = copied_parent(point)
    if parent is not None:
        return f"control: copy of {parent}"
    method = str(point.point["method"])
    alike = [other.point for other in points if (other.role, other.point["method"]) == (point.role, method)]
    values = [other["parameters"] or {} for other in alike]
    mine: Mapping[str, Any] = point.point["parameters"] or {}
    told = [
        f"{name}={short_value(mine[name])}" for name in mine if any(other.get(name) != mine[name] for other in values)
    ]
    if len({other.get("seed") for other in alike}) > 1:
        told.append(f"seed={point.point.get('seed')}")
    return " ".join([f"control: {method}" if point.role == "control" else method, *told])
