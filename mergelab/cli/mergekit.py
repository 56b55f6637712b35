"""``mergelab export-mergekit`` and ``import-mergekit``: one point as mergekit's YAML, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mergelab.cli.options import load_experiment, recipe_options
from mergelab.cli.printing import say


@click.command("export-mergekit")
@recipe_options
@click.option("--point", metavar="ID", help="The point of this id (the table names them) instead of `parameters`.")
@click.option("--out", type=click.Path(path_type=Path), help="Write it to this new file instead of stdout.")
def export_mergekit(point: str | None, out: Path | None, **recipe: Any) -> None:
    """Write a point as the YAML of mergekit-yaml; comments in it (and stderr) say where mergekit would differ.

    \b
    Examples:
      mergelab export-mergekit configs/ties.yaml
      mergelab export-mergekit configs/ties.yaml --point 5500b0f08ce6 --out ties-mergekit.yaml
    """
    from mergelab.config.mergekit_export import export_point
    from mergelab.sweeps.grid import selected_points

    experiment = load_experiment(**recipe)
    if point is None:
        specs = selected_points(experiment.recipe, experiment.pair)
        if len(specs) > 1:
            from mergelab.errors import RecipeError

            raise RecipeError(
                f"recipe {experiment.recipe.name}: it has {len(specs)} merges. Choose one with --point; the table of a "
                "run names their ids."
            )
        spec = specs[0]
    else:
        from mergelab.cli.noise import silenced
        from mergelab.sweeps.models import open_models

        models = open_models(experiment.pair, say)
        with silenced():
            from mergelab.sweeps.writing import find_point

            spec = find_point(experiment.recipe, experiment.pair, models, point).spec
    exported = export_point(
        experiment.pair, str(spec.method), spec.parameters, spec.zero_point, experiment.recipe.output_dtype
    )
    seed = "" if spec.seed is None else f", seed {spec.seed}"
    text = exported.text(f"{spec.method} of recipe {experiment.recipe.name} on {experiment.pair.name}{seed}")
    for line in exported.lines():
        say(line)
    _write(text, out)


@click.command("import-mergekit")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--vlm", metavar="MODEL", help="Which of the two merged models is the vlm; default: the last.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Write the recipe to this new file, and the pair into pairs/ beside it, instead of stdout.",
)
def import_mergekit(file: Path, vlm: str | None, out: Path | None) -> None:
    """Turn a YAML of mergekit-yaml into a recipe and a pair; what cannot be expressed is refused, never left out.

    \b
    Examples:
      mergelab import-mergekit merge.yaml
      mergelab import-mergekit merge.yaml --vlm my-tower --out recipe.yaml && mergelab plan recipe.yaml
    """
    from mergelab.config.mergekit_import import import_mergekit as read

    imported = read(file, vlm)
    for line in imported.remarks:
        say(f"note: {line}")
    if out is None:
        click.echo(f"# recipe.yaml\n{imported.recipe_text()}---\n# pairs/{imported.pair['name']}.yaml")
        click.echo(imported.pair_text(), nl=False)
        return
    pair = out.parent / "pairs" / f"{imported.pair['name']}.yaml"
    _refuse_existing(out, pair)
    _write(imported.pair_text(), pair)
    _write(imported.recipe_text(), out)


def _write(text: str, out: Path | None) -> None:
    """Print to stdout, or write a new file and name it."""
    if out is None:
        click.echo(text, nl=False)
        return
    from mergelab import atomic

    _refuse_existing(out)
    atomic.write_bytes(out, text.encode())
    click.echo(str(out))


def _refuse_existing(*paths: Path) -> None:
    from mergelab.errors import OutputFolderError

    for path in paths:
        if path.exists():
            raise OutputFolderError(f"{path}: is there already. Choose another --out.")
