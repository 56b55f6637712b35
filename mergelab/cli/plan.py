"""``mergelab plan``: what a run would do, from headers alone."""

from __future__ import annotations

import math
from typing import Any

import click

from mergelab.cli.options import device_option, inferred_option, json_option, load_experiment, recipe_options
from mergelab.cli.printing import print_json, print_table, say


@click.command()
@recipe_options
@inferred_option
@device_option
@json_option
def plan(accept_inferred: bool, device: str, as_json: bool, **recipe: Any) -> None:
    """Show the models, how their tensors pair, the points and the tasks of a recipe; nothing is computed.

    \b
    Example:
      mergelab plan configs/ties.yaml --pair smolvlm-256m
    """
    from mergelab.config import announcements
    from mergelab.sweeps.announce import announcement, likely_device, task_sizes
    from mergelab.sweeps.grid import expand
    from mergelab.sweeps.models import open_models
    from mergelab.sweeps.request import eval_request

    experiment = load_experiment(**recipe)
    models = open_models(experiment.pair, say, accept_inferred=accept_inferred, headers_only=True)
    specs = expand(experiment.recipe, experiment.pair)
    sizes = task_sizes(eval_request(experiment.recipe, experiment.pair))
    lines = announcement(experiment.recipe.name, models, specs, sizes, likely_device(device))
    warnings = announcements(experiment.recipe, experiment.pair)
    pairing = models.pairing
    if as_json:
        print_json(
            {
                "points": [
                    {
                        "role": spec.role,
                        "method": spec.method,
                        "parameters": dict(spec.parameters),
                        "seed": spec.seed,
                        "zero_point": spec.zero_point,
                    }
                    for spec in specs
                ],
                "tasks": [vars(size) for size in sizes],
                "tensors": [
                    {
                        "name": paired.name,
                        "kind": paired.kind,
                        "shape": list(paired.shape),
                        "dtype": paired.dtype,
                        "stored": dict(paired.stored),
                    }
                    for paired in pairing.tensors
                ],
                "copied": list(pairing.copied),
                "explained": dict(pairing.explained),
                "layouts": dict(pairing.layouts),
                "notes": [*pairing.notes, *warnings],
            }
        )
        return
    for line in (*lines, *(f"  {warning}" for warning in warnings)):
        click.echo(line)
    click.echo()
    entries = sum(math.prod(paired.shape) for paired in pairing.tensors)
    click.echo(
        f"tensors: {len(pairing.tensors)} merged ({entries:,} entries), {len(pairing.copied)} copied from the vlm, "
        f"{len(pairing.explained)} explained"
    )
    for role, layout in pairing.layouts.items():
        click.echo(f"  {role:<8} layout {layout}")
    for name, reason in pairing.explained.items():
        click.echo(f"  {name}: {reason}")
    for note in pairing.notes:
        click.echo(f"  {note}")
    click.echo()
    from rich.table import Table

    table = Table(pad_edge=False)
    for heading in ("role", "method", "parameters", "seed", "zero point"):
        table.add_column(heading, overflow="fold")
    for spec in specs:
        parameters = ", ".join(f"{key} {value}" for key, value in spec.parameters.items())
        seed = "" if spec.seed is None else str(spec.seed)
        table.add_row(spec.role, spec.method or "", parameters, seed, spec.zero_point or "")
    print_table(table)
