"""``mergelab doctor``: is everything here that a run needs?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from mergelab.cli.options import device_option, json_option, load_experiment, recipe_options
from mergelab.cli.printing import print_json, print_table, say


@click.command()
@recipe_options
@click.option("--out", type=click.Path(path_type=Path), help="The run folder, for the disk it will lie on.")
@device_option
@json_option
def doctor(out: Path | None, device: str, as_json: bool, **recipe: Any) -> None:
    """Check models, tokenizers, tasks, graders, device and disk of a recipe without the network: what is missing?

    Everything missing is listed at once, with how to get it; the exit code is then 6, or that of the one kind of
    error there is.

    \b
    Example:
      mergelab doctor configs/ties.yaml --pair qwen2.5-vl-7b
    """
    from dataclasses import asdict

    experiment = load_experiment(**recipe)
    folder = out or Path("runs") / f"{experiment.recipe.name}-{experiment.pair.name}"

    from mergelab.cli.noise import silenced

    with silenced():
        from mergelab.sweeps.doctor import examine, exit_code

        checks = examine(experiment, folder, device)
    if as_json:
        print_json([asdict(check) for check in checks])
    else:
        from rich.table import Table

        table = Table(pad_edge=False)
        for heading in ("needed", "state", "found", "how to get it offline"):
            table.add_column(heading, overflow="fold")
        for check in checks:
            table.add_row(check.what, "ok" if check.ok else "missing", check.found, check.offline)
        print_table(table)
    missing = sum(not check.ok for check in checks)
    say(f"{missing} of {len(checks)} things are missing or wrong." if missing else f"All {len(checks)} checks passed.")
    if code := exit_code(checks):
        sys.exit(code)
