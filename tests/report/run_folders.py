"""Run folders made by hand: scores in, files on disk out, all through the writers of ``mergelab.records``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mergelab import records

TEXT = "bench_format"
VISION = "bench_image"


def scores(right: int, wrong: int) -> list[float]:
    """``right`` ones, then ``wrong`` zeros."""
    return [1.0] * right + [0.0] * wrong


def samples(
    strict: Sequence[float | None],
    *,
    task: str = TEXT,
    author: str = "somebody",
    clusters: Sequence[str | None] | None = None,
    truncated: int = 0,
) -> list[dict[str, Any]]:
    """One sample line for each score; a wrong answer carries the author's name, a right one is the target."""
    return [
        {
            "doc_id": index,
            "doc_hash": f"{task}-doc-{index}",
            "prompt_hash": f"{task}-prompt-{index}",
            "target_hash": f"{task}-target-{index}",
            "response": f"right {index}" if score == 1 else f"{author} wrong {index}",
            "strict": score,
            "flexible": None if score is None else max(score, 0.5 if score == 0 and index % 2 else score),
            "truncated": index < truncated,
            "empty": index == 0 and score == 0,
            "unparsable": False,
            "ungradable": score is None,
            "num_tokens": 4,
            "cluster": clusters[index] if clusters else None,
        }
        for index, score in enumerate(strict)
    ]


@dataclass
class PointMaker:
    """One point to write."""

    role: str
    text: Sequence[float | None] | None = None
    vision: Sequence[float | None] | None = None
    method: str | None = None
    parameters: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None
    sink: float | None = 1.0
    weights: str | None = None
    author: str | None = None
    truncated: int = 0
    merge: dict[str, Any] = field(default_factory=dict)

    @property
    def point_id(self) -> str:
        named = [self.role, self.method or "", *(f"{key}{value}" for key, value in self.parameters.items())]
        return "-".join([part for part in named if part] + ([f"seed{self.seed}"] if self.seed is not None else []))


def write_run(
    folder: Path,
    points: Sequence[PointMaker],
    *,
    margin: float = 2.0,
    clusters: Sequence[str | None] | None = None,
    primary: Sequence[str] = (TEXT, VISION),
    missing: Sequence[str] = (),
) -> records.Run:
    """Write a whole run folder and read it back."""
    asked = [
        {"task": TEXT, "modality": "text", "protocol": "bench-v1", "n": 0},
        {"task": VISION, "modality": "vision", "protocol": "bench-v1", "n": 0},
    ]
    modalities = {"text": any(p.text is not None for p in points), "vision": any(p.vision for p in points)}
    records.write_experiment(
        folder,
        {
            "name": "by-hand",
            "claims": {"margin": margin, "alpha": 0.05, "primary": list(primary), "correction": "holm"},
            "tasks": [task for task in asked if modalities[str(task["modality"])]],
            "zero_point": "ancestor",
            "conventions": "paper",
            "versions": {"mergelab": "0.1.0"},
            "points": [point.point_id for point in points] + list(missing),
        },
    )
    for point in points:
        write_point(folder, point, clusters)
    return records.read_run(folder)


def write_point(folder: Path, point: PointMaker, clusters: Sequence[str | None] | None = None) -> None:
    name = point.point_id
    records.write_point(
        folder,
        {
            "point_id": name,
            "role": point.role,
            "method": point.method,
            "parameters": point.parameters,
            "seed": point.seed,
            "zero_point": None if point.role in ("base", "ancestor", "vlm") else "ancestor",
            "conventions": None if point.role in ("base", "ancestor", "vlm") else "paper",
            "weights_hash": point.weights or f"weights of {name}",
        },
    )
    if point.role == "merge":
        shares = {"base": 0.5, "vlm": 0.25, "ancestor": 1.0}
        records.write_stage(folder, name, "merge", {"key": "m", "changed_share": shares, **point.merge})
    if point.sink is not None:
        records.write_stage(folder, name, "sink", {"key": "s", "sink_strength": point.sink, "sink_strength_bf16": None})
    for task, modality, strict in ((TEXT, "text", point.text), (VISION, "vision", point.vision)):
        if strict is None:
            continue
        lines = samples(
            strict,
            task=task,
            author=point.author or name,
            clusters=clusters if modality == "text" else None,
            truncated=point.truncated,
        )
        metrics = {"key": "t", "task": task, "modality": modality, "protocol": "bench-v1", "n": len(lines)}
        records.write_task(folder, name, task, metrics, lines)


def usual_points(n: int = 600) -> list[PointMaker]:
    """Base 95 %, vlm 35 %, controls, and three TIES cells: one restores, one helps a little, one harms."""

    def text(share: float) -> list[float]:
        return scores(round(share * n), n - round(share * n))

    def pictures(share: float) -> list[float]:
        return scores(round(share * 240), 240 - round(share * 240))

    return [
        PointMaker("base", text=text(0.95), sink=1.25, weights="base"),
        PointMaker("ancestor", text=text(0.0), sink=1.7),
        PointMaker("vlm", text=text(0.35), vision=pictures(1.0), sink=0.94, weights="vlm"),
        PointMaker(
            "control",
            text=text(0.95),
            vision=pictures(0.1),
            method="copy",
            parameters={"of": "base"},
            weights="base",
            author="base",
        ),
        PointMaker(
            "control",
            text=text(0.35),
            vision=pictures(1.0),
            method="copy",
            parameters={"of": "vlm"},
            weights="vlm",
            author="vlm",
        ),
        PointMaker(
            "control",
            text=text(0.9),
            vision=pictures(0.5),
            method="gaussian",
            parameters={"scale": 1.0},
            seed=0,
        ),
        PointMaker(
            "merge",
            text=text(0.95),
            vision=pictures(1.0),
            method="ties",
            parameters={"density": 0.2, "lambda": 0.5},
            sink=1.2,
        ),
        PointMaker(
            "merge",
            text=text(0.5),
            vision=pictures(0.9),
            method="ties",
            parameters={"density": 0.5, "lambda": 0.5},
            sink=1.1,
        ),
        PointMaker(
            "merge",
            text=text(0.1),
            vision=pictures(0.99),
            method="ties",
            parameters={"density": 0.2, "lambda": 1.0},
            sink=1.0,
        ),
    ]
