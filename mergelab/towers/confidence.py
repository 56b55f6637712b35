"""How far an inferred tower can be trusted: the report on it and its verdict.

Verdicts:

- high: every tensor of the base has its place, no other stack of layers holds half as much, and all sampled matrices
  are near those of base or ancestor;
- medium: the same, but some tensors of the base are explained instead of placed;
- low: anything else, such as tensors of the tower that the base lacks, or an order that the numbers do not settle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mergelab.errors import PairingError, problem_list
from mergelab.towers.ancestry import COUSIN_NORM, Digest
from mergelab.towers.pairing import Pairing

Confidence = Literal["high", "medium", "low"]

MAX_RUNNER_UP = 0.5
"""A runner-up that holds this share of the base's layers, or more, could be the tower as well."""

VLM_ROLES = ("tower", "extra", "vision", "projector", "other", "unknown")


@dataclass(frozen=True)
class Report:
    """What was inferred about a vlm, and how sure it is."""

    prefix: str
    """Of the tower's layers, before the number."""
    base: Mapping[str, int]
    """Tensors of the base: matched, tied (a head that its embedding stands for), explained, missing."""
    vlm: Mapping[str, int]
    """Tensors of the vlm: tower, extra, vision, projector, other, unknown."""
    unknown: tuple[str, ...]
    """Stored names among the tower's own that the base lacks."""
    runner_up: str
    """The next best prefix, empty if there is none."""
    runner_up_coverage: float
    operations: tuple[str, ...]
    """What had to be done besides renaming the prefix."""
    undecided: tuple[str, ...]
    """What neither shapes nor numbers settle, or numbers do not confirm; the rule has the usual way."""
    verdict: Confidence
    reasons: tuple[str, ...]
    """Why it is not better."""
    rule: str
    """The family as YAML."""

    def record(self) -> dict[str, Any]:
        """Return the report as JSON can say it."""
        return {
            "family": "inferred",
            "verdict": self.verdict,
            "reasons": list(self.reasons),
            "prefix": self.prefix,
            "base": dict(self.base),
            "vlm": dict(self.vlm),
            "unknown": list(self.unknown),
            "runner_up": self.runner_up,
            "runner_up_coverage": self.runner_up_coverage,
            "operations": list(self.operations),
            "undecided": list(self.undecided),
            "rule": self.rule,
        }


@dataclass(frozen=True)
class Findings:
    """What a verdict is made from."""

    prefix: str
    runner_up: str
    runner_up_coverage: float
    operations: tuple[str, ...]
    undecided: tuple[str, ...]
    roles: Mapping[str, str]
    """Stored name of everything outside the tower -> role, with other and unknown."""
    rule: str


def report_on(findings: Findings, pairing: Pairing, digest: Digest) -> Report:
    """Return the report on a tower that was inferred and paired."""
    tied = sum("base" in paired.virtual for paired in pairing.tensors)
    explained = sum(key.startswith("base: ") for key in pairing.explained)
    parts = Counter(findings.roles.values())
    parts["tower"] = sum(role == "tower" for role in pairing.towers["vlm"].roles.values())
    unknown = tuple(name for name, role in findings.roles.items() if role == "unknown")
    grave = [*findings.undecided]
    if unknown:
        grave.append(f"{len(unknown)} tensors of the tower that base lacks, the first: {unknown[0]}")
    if findings.runner_up_coverage >= MAX_RUNNER_UP:
        grave.append(f"{findings.runner_up}.* holds {findings.runner_up_coverage:.0%} of base's layers too")
    if far := far_tensors(digest):
        grave.append(far)
    verdict: Confidence = "low" if grave else "medium" if explained else "high"
    return Report(
        prefix=findings.prefix,
        base={"matched": len(pairing.tensors) - tied, "tied": tied, "explained": explained, "missing": 0},
        vlm={role: parts[role] for role in VLM_ROLES},
        unknown=unknown,
        runner_up=findings.runner_up,
        runner_up_coverage=findings.runner_up_coverage,
        operations=findings.operations,
        undecided=findings.undecided,
        verdict=verdict,
        reasons=tuple(grave) or ((f"{explained} tensors of base are explained, not placed",) if explained else ()),
        rule=findings.rule,
    )


def far_tensors(digest: Digest) -> str:
    """Return, in words, which sampled matrices are far from base and ancestor; empty if they are near one of them."""
    if not digest.relations:
        return f"no weights could be compared: {digest.reason}"
    if digest.stops:
        return f"{digest.verdict}: {digest.reason}"
    best: Sequence[Any] = min(
        (
            [t for t in one.tensors if not t.related or t.relative_norm > COUSIN_NORM]
            for one in digest.relations.values()
        ),
        key=len,
    )
    if not best:
        return ""
    total = len(next(iter(digest.relations.values())).tensors)
    return (
        f"{len(best)} of {total} sampled matrices are more than {COUSIN_NORM:g} of their norm away, "
        f"the first: {best[0].name} by {best[0].relative_norm:.2f}"
    )


class UncertainPairing(PairingError):
    """Names were mapped by inference, and not surely enough to go on unasked."""

    def __init__(self, report: Report, where: str) -> None:
        super().__init__(
            problem_list(
                f"{where}: no known family; how its names map to base's was inferred with {report.verdict} confidence:",
                report.reasons,
                "Look at `mergelab check`, then give --accept-inferred; or keep its rule as a file, correct it, and "
                "name the file in the pair's `family:`.",
            )
        )
        self.report = report
