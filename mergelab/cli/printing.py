"""Printing: data to stdout, prose to stderr."""

from __future__ import annotations

import json
import shutil
import sys
from typing import Any

import click

WIDTH = 100


def say(line: str) -> None:
    """Print a line of prose to stderr."""
    click.echo(line, err=True)


def print_json(value: Any) -> None:
    """Print a value as indented JSON to stdout."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))


def print_table(table: Any) -> None:
    """Print a rich table to stdout, at most 100 columns wide, without colour where stdout is no terminal."""
    from rich.console import Console

    width = min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns) if sys.stdout.isatty() else WIDTH
    Console(file=sys.stdout, width=width, highlight=False).print(table)
