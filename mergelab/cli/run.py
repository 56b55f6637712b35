"""``mergelab run``: the main job, from a recipe to a table."""

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
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="The run folder; default runs/RECIPE-PAIR. The same command continues what was interrupted.",
)
@accept_option
@inferred_option
@click.option("--no-cache", is_flag=True, help="Grade base, vlm and ancestor anew, and keep nothing of them.")
@device_option
@json_option
def run(
    out: Path | None,
    accept_unrelated: bool,
    accept_inferred: bool,
    no_cache: bool,
    device: str,
    as_json: bool,
    **recipe: Any,
) -> None:
    """Merge, measure the sink, grade text and pictures at every point, and print which merges restore.

    \b
    Examples:
      mergelab run configs/ties.yaml
      mergelab run configs/ties.yaml --pair qwen2.5-vl-7b --limit 200
      mergelab run configs/linear.yaml --base llama-dir --vlm llava-dir --out runs/mine
    """
    from mergelab.config import announcements
    from mergelab.records import refuse_foreign_folder
    from mergelab.sweeps.announce import announcement, check_disk, likely_device, task_sizes
    from mergelab.sweeps.grid import expand
    from mergelab.sweeps.models import open_models
    from mergelab.sweeps.request import eval_request

    experiment = load_experiment(**recipe)
    folder = out or Path("runs") / f"{experiment.recipe.name}-{experiment.pair.name}"
    refuse_foreign_folder(folder)
    models = open_models(experiment.pair, say, accept_unrelated, accept_inferred)
    specs = expand(experiment.recipe, experiment.pair)
    check_disk(experiment.recipe, models, specs, folder)
    sizes = task_sizes(eval_request(experiment.recipe, experiment.pair))
    for line in announcement(experiment.recipe.name, models, specs, sizes, likely_device(device)):
        say(line)
    for line in announcements(experiment.recipe, experiment.pair):
        say(f"  {line}")

    from mergelab.cli.noise import silenced

    with silenced():
        from mergelab.cli.progress import Progress
        from mergelab.errors import SweepError, problem_list
        from mergelab.sweeps.cache import ResultCache
        from mergelab.sweeps.experiment import prepare
        from mergelab.sweeps.run import run as run_experiment

        prepared = prepare(experiment.recipe, experiment.pair, models, device, say)
        with Progress(prepared.points) as progress:
            cache = None if no_cache else ResultCache()
            outcome = run_experiment(prepared, folder, progress.report, progress.finished, progress.failed, cache)
    if outcome.num_cached:
        say(f"{outcome.num_cached} results of parents are those of an earlier run (--no-cache makes them again).")
    if outcome.num_worked == 0 and not outcome.failures:
        say("All points were finished before; the table is made from their records.")
    print_run(folder, None, as_json)
    if outcome.bug is not None:
        raise outcome.bug
    if outcome.failures:
        problems = [f"{label}: {why}" for label, why in outcome.failures.items()]
        raise SweepError(
            problem_list(
                f"{len(problems)} of {outcome.num_points} points failed:",
                problems,
                "What is finished is safe; mend the cause and give the same command again.",
            )
        )


def print_run(folder: Path, margin: float | None, as_json: bool) -> None:
    """Write the report files of a run folder and print its table."""
    from dataclasses import asdict

    from mergelab.records import read_run
    from mergelab.report.table import rows, write_report
    from mergelab.report.terminal import render_lines

    finished = read_run(folder)
    paths = write_report(finished, margin)
    if as_json:
        print_json([asdict(row) for row in rows(finished, margin)])
        say(f"table: {paths.csv}")
        return
    for line in render_lines(finished, margin):
        click.echo(line)
