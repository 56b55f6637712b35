"""``mergelab methods``: merge methods with parameters, defaults and sources."""

from __future__ import annotations

from typing import Any

import click

from mergelab.cli.options import json_option
from mergelab.cli.printing import print_json, print_table


@click.command()
@json_option
def methods(as_json: bool) -> None:
    """List the merge methods with their parameters, defaults, bounds and sources: ours, then those of mergekit.

    `mergekit:NAME` hands every tensor to mergekit and has mergekit's own parameters and defaults. Where models may
    differ in a parameter, give one value for all or one by role: weight: {base: 1.0, vlm: 0.5}.

    \b
    Example:
      mergelab methods
    """
    from merges.mergekit_methods import MERGEKIT, PREFIX, zero_points
    from merges.parameters import PARAMETERS, describe

    known: dict[str, Any] = {**PARAMETERS, **{PREFIX + name: spec for name, spec in MERGEKIT.items()}}
    described: list[dict[str, Any]] = [
        {
            "method": name,
            "title": kind.title,
            "source": kind.source,
            "draws": kind.draws,
            "zero_points": list(zero_points(name.removeprefix(PREFIX))) if name.startswith(PREFIX) else None,
            "parameters": [vars(info) for info in describe(name)],
        }
        for name, kind in known.items()
    ]
    if as_json:
        print_json(described)
        return
    from rich.table import Table

    for method in described:
        only: list[str] = method["zero_points"] or []
        needs = f"; zero point {only[0]} only" if len(only) == 1 else ""
        click.echo(f"{method['method']}: {method['title']}{needs}\n    {method['source']}")
        table = Table.grid(padding=(0, 2))
        for width in (2, 16, 12, 26, None):
            table.add_column(min_width=width, max_width=width, overflow="fold")
        for info in method["parameters"]:
            default = "" if info["default"] is None else str(info["default"])
            table.add_row("", info["name"], default, info["bounds"], info["meaning"])
        print_table(table)
