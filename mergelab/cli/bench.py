"""``mergelab bench``: make the bench pair again, or a small vlm from a real LLM."""

from __future__ import annotations

from pathlib import Path

import click

from mergelab.cli.options import device_option
from mergelab.cli.printing import say


@click.group()
def bench() -> None:
    """Build the bench pair again, or adapt a real LLM into a small vlm.

    \b
    Example:
      mergelab bench build --out my-pair
    """


@bench.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for ancestor, base and vlm.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of data and weights.")
def build(out: Path, seed: int) -> None:
    """Train ancestor, base and vlm of the bench pair and check them against its bounds; minutes on one core.

    \b
    Example:
      mergelab bench build --out my-pair
    """
    from mergelab.bench.build import REPORT_FILE, build_pair

    built = build_pair(out, seed=seed, progress=say)
    gates = built.gates
    say(
        f"Done: {out}, in {built.seconds / 60:.0f} minutes. Strict: base {gates.base_strict:.1f}, "
        f"vlm {gates.vlm_strict:.1f}, pictures {gates.image_strict:.1f}; the rest is in {REPORT_FILE}."
    )


@bench.command()
@click.option("--base", type=click.Path(path_type=Path), required=True, help="Folder of a Llama-like text LLM.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the vlm to make.")
@click.option("--steps", type=click.IntRange(min=1), default=None, help="Training steps.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of data and weights.")
@device_option
def adapt(base: Path, out: Path, steps: int | None, seed: int, device: str) -> None:
    """Train a small vlm on a real text LLM: it learns the bench pictures and loses text ability.

    \b
    Example:
      mergelab bench adapt --base smollm2-135m --out smollm2-135m-vlm
    """
    from mergelab.bench.adapt import adapt_vlm
    from mergelab.device import choose_device

    chosen = {} if steps is None else {"steps": steps}
    adapt_vlm(base, out, seed=seed, device=choose_device(device), progress=say, **chosen)
    say(f"Done: {out}")
