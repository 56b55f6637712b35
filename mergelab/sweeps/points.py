"""The points of an experiment: what is merged, under which id. Without transformers, so that it is there at once."""

from __future__ import annotations

from dataclasses import dataclass

from mergelab.engine.plan import Operation, operation
from mergelab.sweeps.grid import PointSpec
from mergelab.sweeps.identity import point_id


@dataclass(frozen=True)
class Point:
    """One point with its id and, unless it is a parent, how its weights are made."""

    spec: PointSpec
    point_id: str
    operation: Operation | None

    @property
    def label(self) -> str:
        """What progress lines call the point."""
        if self.spec.is_parent:
            return str(self.spec.role)
        parameters = self.spec.parameters
        if "of" in parameters:
            return f"{self.spec.method} of {parameters['of']}"
        if "matched" in parameters:
            return f"{self.spec.method} as large as {parameters['matched']['method']}"
        # Words are conventions and equal for all points; weights are worth a place when they differ.
        shown = {key: value for key, value in parameters.items() if type(value) in (int, float)}
        weights = parameters.get("weights") or parameters.get("weight")
        if weights and len(set(weights.values())) > 1:
            shown |= weights
        excluded = [f"without {', '.join(parameters['exclude'])}"] if parameters.get("exclude") else []
        return " ".join([str(self.spec.method), *(f"{key} {value:g}" for key, value in shown.items()), *excluded])


def named(spec: PointSpec, fingerprints: dict[str, str], output_dtype: str) -> Point:
    """Return a point with its id and its operation."""
    made = None
    if spec.method is not None:
        made = operation(
            spec.method,
            spec.parameters,
            spec.zero_point,
            conventions=spec.conventions or "paper",
            seed=spec.seed or 0,
        )
    return Point(spec, point_id(spec, fingerprints, output_dtype), made)
