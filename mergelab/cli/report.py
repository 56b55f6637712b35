"""``mergelab report``: tables from a run folder's records."""

from __future__ import annotations

from pathlib import Path

import click

from mergelab.cli.options import json_option
from mergelab.cli.run import print_run


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--margin",
    type=click.FloatRange(min=0, min_open=True, max=100),
    metavar="POINTS",
    help="Read the run at another margin than the declared one; marked post hoc.",
)
@json_option
def report(run: Path, margin: float | None, as_json: bool) -> None:
    """Print the table of a run folder and write it to report/ there; finished or not.

    \b
    Example:
      mergelab report runs/ties-bench
    """
    print_run(run, margin, as_json)
