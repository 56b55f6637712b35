"""How an inferred family is printed and kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from mergelab.cli.printing import say

SHOWN_OPERATIONS = 12


def print_inferred(record: Mapping[str, Any], line: Callable[[str], None]) -> None:
    """Print the report on an inferred family and, as YAML, its rule."""
    line(f"family: inferred, {record['verdict']} confidence, from the layers {record['prefix']}.*")
    for reason in record["reasons"]:
        line(f"  because {reason}")
    for side in ("base", "vlm"):
        line(f"{side}: " + ", ".join(f"{what} {count}" for what, count in record[side].items()))
    if record["runner_up"]:
        line(f"runner-up: {record['runner_up']}.* holds {record['runner_up_coverage']:.0%} of base's layer tensors")
    operations = record["operations"]
    for text in operations[:SHOWN_OPERATIONS]:
        line(f"operation: {text}")
    if len(operations) > SHOWN_OPERATIONS:
        line(f"({len(operations) - SHOWN_OPERATIONS} more operations)")
    click.echo("rule, to keep as a file and name in the pair's `family:`")
    click.echo("---")
    click.echo(record["rule"], nl=False)
    click.echo("---")


def keep_rule(path: Path, rule: str) -> None:
    """Write an inferred rule to a file that does not exist yet.

    Raises:
        UsageError: The file exists.
    """
    from mergelab import atomic
    from mergelab.errors import UsageError

    if path.exists():
        raise UsageError(f"--save-rule {path}: the file exists. Choose another name, or remove it.")
    atomic.write_text(path, rule)
    say(f"rule: {path}")
