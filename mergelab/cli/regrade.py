"""``mergelab regrade``: the stored answers of a run, graded again without a model."""

from __future__ import annotations

from pathlib import Path

import click

from mergelab.cli.evaluate import assignments
from mergelab.cli.options import json_option
from mergelab.cli.printing import print_json, print_table, say


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--data", multiple=True, metavar="TASK=FILE.jsonl", help="Documents, if they have moved. Repeatable.")
@json_option
def regrade(run: Path, data: tuple[str, ...], as_json: bool) -> None:
    """Grade the stored answers of a run folder again and write what comes out differently; no model is loaded.

    Documents that are not the ones that were asked about are refused, before anything is written.

    \b
    Example:
      mergelab regrade runs/ties-bench
    """
    from mergelab.cli.noise import silenced

    with silenced():
        from mergelab.sweeps.regrade import regrade_run

        chosen = {task: Path(path) for task, path in assignments(data, "--data").items()}
        found = regrade_run(run, chosen, say)
    rewritten = [one for one in found if one.rewritten]
    say(f"{len(found)} graded tasks of {len({one.point_id for one in found})} points, {len(rewritten)} rewritten.")
    if rewritten:
        say(f"The table is made again by: mergelab report {run}")
    if as_json:
        from dataclasses import asdict

        print_json([asdict(one) for one in found])
        return
    from rich.table import Table

    table = Table(pad_edge=False)
    for heading in ("point", "task", "strict before", "strict now", "flexible before", "flexible now", "documents"):
        table.add_column(heading, overflow="fold", justify="left" if heading in ("point", "task") else "right")
    for one in found:
        scores = (one.before[0], one.strict, one.before[1], one.flexible)
        cells = ["" if score is None else f"{score:.2f}" for score in scores]
        table.add_row(one.point_id, one.task, *cells, str(len(one.changed)))
    print_table(table)
