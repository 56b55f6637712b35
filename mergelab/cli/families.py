"""``mergelab families``: which vlms are read, and how far that was checked."""

from __future__ import annotations

import click

from mergelab.cli.options import json_option
from mergelab.cli.printing import print_json, print_table


@click.command()
@click.argument("name", required=False)
@json_option
def families(name: str | None, as_json: bool) -> None:
    """List the families of checkpoints that have a file of rules, or print the file of one.

    Most vlms differ from a plain text model by a prefix and need none. `checked` says against what a file was tested:
    a tiny random model of the real class, or tensor names written by hand. NAME prints the rules as YAML, to be
    changed and named as `family:` in a pair.

    \b
    Examples:
      mergelab families
      mergelab families molmo2 > my-family.yaml
    """
    from mergelab.towers.rules import find_family, shipped_families

    if name is not None:
        family = find_family(name)
        if as_json:
            print_json(family.model_dump(mode="json", exclude_defaults=True))
        else:
            click.echo(family.to_yaml(), nl=False)
        return
    known = shipped_families()
    if as_json:
        print_json(
            [
                {"family": one.family, "covers": one.covers, "checked": one.checked, "notes": list(one.notes)}
                for one in known
            ]
        )
        return
    from rich.table import Table

    table = Table(pad_edge=False)
    for heading in ("family", "covers", "checked"):
        table.add_column(heading, overflow="fold")
    for one in known:
        table.add_row(one.family, one.covers, one.checked)
    print_table(table)
