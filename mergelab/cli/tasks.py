"""``mergelab tasks``: the tasks that can be graded, and how each protocol asks them."""

from __future__ import annotations

from pathlib import Path

import click

from mergelab.cli.options import json_option
from mergelab.cli.printing import print_json, print_table


@click.command()
@click.option(
    "--task-folder",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="List the tasks of this folder as well.",
)
@json_option
def tasks(task_folder: Path | None, as_json: bool) -> None:
    """List the tasks, their strict and flexible result keys, and shots and new tokens under every protocol.

    RULER's subtasks stand in one row with the family; they can be asked by name: niah_single_1 and so on (--json).

    \b
    Example:
      mergelab tasks --json
    """
    from mergelab.evals.listing import list_tasks

    listed = list_tasks(task_folder)
    if as_json:
        print_json(listed)
        return
    from rich import box
    from rich.table import Table

    table = Table(pad_edge=False, box=box.SIMPLE_HEAD)
    for heading in ("task", "strict, flexible", "protocol: shots, new tokens", "needs"):
        table.add_column(heading, overflow="fold", no_wrap=heading != "needs")
    for task in listed:
        if task["family"]:
            continue
        asked = [
            f"{name}: {how['num_fewshot']}, {how['max_gen_toks'] or 'none'}" for name, how in task["protocols"].items()
        ]
        graders = [task["strict"], *([task["flexible"]] if task["flexible"] else [])]
        name = f"{task['task']}\n  {task['modality']}"
        table.add_row(name, "\n".join(graders), "\n".join(asked), "\n".join(task["needs"]))
    print_table(table)
