"""A diagnosis on disk: its record and two figures, from the record alone. No torch.

``diagnose.json`` is the record, ``depth.svg`` shows its curves over the layers, ``heatmap.svg`` the sink of every
head before and after. What the numbers mean is said in ``mergelab.sweeps.diagnose.diagnose_pair``.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mergelab import atomic

RECORD, DEPTH, HEATMAP = "diagnose.json", "depth.svg", "heatmap.svg"

COLOURS = {"ancestor": "#7f7f7f", "base": "#0072b2", "tower": "#d55e00"}
"""Told apart by colour-blind readers (Okabe and Ito)."""
MARKERS = {"ancestor": "^", "base": "o", "tower": "s"}
"""And in print without colour."""

SETTINGS: Any = {"svg.fonttype": "none", "svg.hashsalt": "mergelab", "font.size": 9}
"""Text stays text, and the same record gives the same bytes."""


def write_diagnosis(record: Mapping[str, Any], folder: Path) -> None:
    """Write the record and its figures to a new or empty folder, all of them or none.

    Args:
        record: Of ``diagnose_pair``; NaN and infinity are refused.
        folder: Must not exist or be empty; the caller checks and words the refusal.
    """
    with atomic.new_folder(folder) as scratch:
        atomic.write_json(scratch / RECORD, dict(record))
        atomic.write_bytes(scratch / DEPTH, to_svg(depth_figure(record)))
        atomic.write_bytes(scratch / HEATMAP, to_svg(heatmap_figure(record)))


def depth_figure(record: Mapping[str, Any]) -> Figure:
    """Draw over the layers: S of every model, the share of row maxima on position 0, and B_gap with the margin."""
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(7, 7.5), layout="constrained")
        strength, share, gap = figure.subplots(3, 1, sharex=True)
        for role in COLOURS:
            if role in record["models"]:
                curves = record["models"][role]["per_layer"]
                _curve(strength, curves, "sink_strength", role)
                _curve(share, curves, "position0_share", role)
        found = record["displacement"]["per_layer"]
        layers = [int(layer) for layer in found]
        gap.plot(layers, [entry["b_gap"] for entry in found.values()], color="#000000", marker="o", ms=3, label="B_gap")
        gap.plot(
            layers,
            [entry["margin"] for entry in found.values()],
            linestyle="--",
            color="#009e73",
            marker="s",
            ms=3,
            label="margin G - B",
        )
        strength.set_ylabel("S, nats")
        share.set_ylabel("row maxima on position 0")
        share.set_ylim(-0.02, 1.02)
        gap.set_ylabel("nats")
        gap.set_xlabel("layer; shaded: the layers of the single numbers")
        measured = record["models"]["base"]["layers"]
        for axes in (strength, share, gap):
            axes.axhline(0, color="#b0b0b0", lw=0.6)
            axes.axvspan(min(measured) - 0.5, max(measured) + 0.5, color="#000000", alpha=0.06, lw=0)
            axes.legend(frameon=False, fontsize=8)
        figure.suptitle(f"{record['pair']['name']}: the attention sink over depth")
    return figure


def heatmap_figure(record: Mapping[str, Any]) -> Figure:
    """Draw S of every layer and head in base and tower on one colour scale."""
    grids = {role: _grid(record["models"][role]["per_head"]) for role in ("base", "tower")}
    limit = max(float(np.nanmax(np.abs(grid))) for grid in grids.values()) or 1.0
    layers = [int(layer) for layer in record["models"]["base"]["per_layer"]]
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(8, 1.6 + 0.16 * max(len(layers), 12)), layout="constrained")
        plots = figure.subplots(1, 2, sharey=True)
        for axes, (role, grid) in zip(plots, grids.items(), strict=True):
            image = axes.imshow(grid, cmap="PuOr_r", vmin=-limit, vmax=limit, aspect="auto", origin="lower")
            axes.set_title(f"{role} (S {record['models'][role]['sink_strength']:.2f})")
            axes.set_xlabel("head")
            # Rows are numbered by place; hybrids have layers without attention in between.
            places = range(0, len(layers), max(1, len(layers) // 12))
            axes.set_yticks(list(places), [str(layers[place]) for place in places])
        plots[0].set_ylabel("layer")
        figure.colorbar(image, ax=list(plots), label="median log-odds of the row maximum, nats")
        figure.suptitle(f"{record['pair']['name']}: the sink before and after")
    return figure


def to_svg(figure: Figure) -> bytes:
    """Return a figure as SVG; equal figures give equal bytes."""
    buffer = io.BytesIO()
    with matplotlib.rc_context(SETTINGS):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _curve(axes: Axes, curves: Mapping[str, Mapping[str, float]], name: str, role: str) -> None:
    layers = [int(layer) for layer in curves]
    values = [entry[name] for entry in curves.values()]
    axes.plot(layers, values, color=COLOURS[role], marker=MARKERS[role], ms=3, label=role)


def _grid(per_head: Sequence[Sequence[float]]) -> np.ndarray:
    """Return layers x heads; where a layer has fewer heads, NaN stays blank."""
    grid = np.full((len(per_head), max(len(heads) for heads in per_head)), np.nan)
    for row, heads in zip(grid, per_head, strict=True):
        row[: len(heads)] = heads
    return grid
