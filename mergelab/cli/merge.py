"""``mergelab merge``: write one point as a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mergelab.cli.options import (
    accept_option,
    device_option,
    inferred_option,
    json_option,
    load_experiment,
    recipe_options,
)
from mergelab.cli.printing import print_json, say


@click.command()
@recipe_options
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The folder to write; new or empty.")
@click.option(
    "--as",
    "layout",
    type=click.Choice(["vlm", "text"]),
    default="vlm",
    show_default=True,
    help="vlm: the vlm with a new tower. text: the tower alone, with base's tokenizer.",
)
@click.option("--point", metavar="ID", help="The point of this id (the table names them) instead of `parameters`.")
@accept_option
@inferred_option
@device_option
@json_option
def merge(
    out: Path,
    layout: str,
    point: str | None,
    accept_unrelated: bool,
    accept_inferred: bool,
    device: str,
    as_json: bool,
    **recipe: Any,
) -> None:
    """Write one merge as a checkpoint that from_pretrained loads: the point of the recipe's `parameters`.

    \b
    Example:
      mergelab merge configs/ties.yaml --out merged --as text
    """
    from mergelab.cli.noise import silenced
    from mergelab.sweeps.models import open_models

    experiment = load_experiment(**recipe)
    models = open_models(experiment.pair, say, accept_unrelated, accept_inferred)
    with silenced():
        from mergelab.sweeps.writing import write_merge

        record = write_merge(experiment.recipe, experiment.pair, models, out, layout, point, device)
    if as_json:
        print_json(record)
        return
    statistics = record["statistics"]
    say(
        f"{record['label']} ({record['point_id']}): {statistics['tensors_merged']} tensors merged in "
        f"{record['seconds']:.1f} s"
    )
    click.echo(str(out))
