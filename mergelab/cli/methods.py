"""``mergelab methods``: merge methods with parameters, defaults and sources."""

from __future__ import annotations

from typing import Any

import click

from mergelab.cli.options import json_option
from mergelab.cli.printing import print_json, print_table


@click.command()
@json_option
def methods(as_json: bool) -> None:
    """List the merge methods with their parameters, defaults, bounds and sources.

    \b
    Example:
      mergelab methods
    """
    from merges.parameters import PARAMETERS, describe

    described: list[dict[str, Any]] = [
        {
            "method": name,
            "title": kind.title,
            "source": kind.source,
            "draws": kind.draws,
            "parameters": [vars(info) for info in describe(name)],
        }
        for name, kind in PARAMETERS.items()
    ]
    if as_json:
        print_json(described)
        return
    from rich.table import Table

    table = Table(show_lines=False, pad_edge=False)
    for heading in ("method", "parameter", "default", "values", "meaning"):
        table.add_column(heading, overflow="fold")
    for method in described:
        table.add_row(method["method"], "", "", "", f"{method['title']} ({method['source']})")
        for info in method["parameters"]:
            default = "" if info["default"] is None else str(info["default"])
            table.add_row("", info["name"], default, info["bounds"], info["meaning"])
    print_table(table)
