"""``mergelab pairs``: the pairs that recipes can name."""

from __future__ import annotations

import click

from mergelab.cli.options import json_option
from mergelab.cli.printing import print_json, print_table


@click.command()
@json_option
def pairs(as_json: bool) -> None:
    """List the pairs of base, vlm and ancestor that a recipe or --pair can name.

    \b
    Example:
      mergelab pairs --json
    """
    from mergelab.config import list_pairs, load_pair

    known = [load_pair(path) for path in list_pairs().values()]
    if as_json:
        print_json([{"file": str(list_pairs()[pair.name]), **pair.model_dump(mode="json")} for pair in known])
        return
    from rich.table import Table

    table = Table(pad_edge=False)
    for heading in ("pair", "base", "vlm", "ancestor"):
        table.add_column(heading, overflow="fold")
    for pair in known:
        ancestor = pair.ancestor.id if pair.ancestor is not None else "(none)"
        table.add_row(pair.name, pair.base.id, pair.vlm.id, ancestor)
    print_table(table)
