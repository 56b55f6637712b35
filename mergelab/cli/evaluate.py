"""``mergelab eval``: strict and flexible scores of one model."""

from __future__ import annotations

from pathlib import Path

import click

from mergelab.cli.options import device_option, json_option
from mergelab.cli.printing import print_json, print_table, say


@click.command("eval")
@click.argument("model")
@click.option("--protocol", default="paper-instruct-v1", show_default=True, help="Named evaluation settings.")
@click.option("--tasks", metavar="A,B", help="Tasks, comma-separated; default those of the protocol.")
@click.option(
    "--data",
    multiple=True,
    metavar="TASK=FILE.jsonl|DIR",
    help="Local documents of a task; a folder holds TASK.jsonl of each. Repeatable.",
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="At most N documents a task, drawn by seed.")
@click.option("--batch-size", type=click.IntRange(min=1), metavar="N", help="Default that of the protocol.")
@click.option(
    "--backend",
    type=click.Choice(["hf", "vllm"]),
    default="hf",
    show_default=True,
    help="What answers text tasks; vllm is an extra and needs a GPU.",
)
@click.option("--max-gen-toks", multiple=True, metavar="TASK=N", help="New tokens an answer may take. Repeatable.")
@click.option(
    "--samples",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write every answer to DIR/TASK.jsonl.",
)
@click.option(
    "--task-folder",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Tasks of your own: lm-eval YAMLs with a registry.yaml.",
)
@click.option("--allow-code", is_flag=True, help="Run programs that the model writes, and Python in --task-folder.")
@click.option(
    "--write-data",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Grade nothing; write the documents of the tasks to DIR/TASK.jsonl, to be used offline with --data DIR.",
)
@device_option
@json_option
def evaluate(
    model: str,
    protocol: str,
    tasks: str | None,
    data: tuple[str, ...],
    limit: int | None,
    batch_size: int | None,
    backend: str,
    max_gen_toks: tuple[str, ...],
    samples: Path | None,
    task_folder: Path | None,
    allow_code: bool,
    write_data: Path | None,
    device: str,
    as_json: bool,
) -> None:
    """Grade one text model, or one vision-language model on text and pictures.

    \b
    Example:
      mergelab eval smollm2-135m --tasks ifeval --data ifeval=ifeval.jsonl --limit 100
    """
    from mergelab.cli.noise import silenced
    from mergelab.evals.request import EvalRequest

    budgets = {}
    for task, value in assignments(max_gen_toks, "--max-gen-toks").items():
        if not value.isdecimal():
            raise click.UsageError(f"--max-gen-toks {task}={value}: expected a whole number of tokens.")
        budgets[task] = int(value)
    folders = [Path(value) for value in data if "=" not in value]
    if len(folders) > 1:
        raise click.UsageError(f"--data {folders[1]}: one folder can be given, and {folders[0]} is one already.")
    named = assignments(tuple(value for value in data if "=" in value), "--data")
    request = EvalRequest(
        protocol=protocol,
        tasks=tuple(tasks.split(",")) if tasks else None,
        data={task: Path(path) for task, path in named.items()},
        data_folder=folders[0] if folders else None,
        task_folder=task_folder,
        allow_code=allow_code,
        limit=limit,
        batch_size=batch_size,
        max_gen_toks=budgets,
        backend=backend,
    )
    with silenced():
        from mergelab.sweeps.single import evaluate_model, write_documents

        if write_data is not None:
            for path in write_documents(model, request, write_data, say):
                click.echo(path)
            return
        results = evaluate_model(model, request, device, say)
    if samples is not None:
        import json

        from mergelab.atomic import write_text

        for result in results:
            lines = "".join(json.dumps(sample) + "\n" for sample in result.samples)
            write_text(samples / f"{result.metrics['task']}.jsonl", lines)
    if as_json:
        print_json([result.metrics for result in results])
        return
    from rich.table import Table

    asked = {result.metrics["task"]: result.metrics["backend"] for result in results}
    caption = ", ".join(f"{task} answered by {name}" for task, name in asked.items()) if backend != "hf" else None
    table = Table(pad_edge=False, caption=caption)
    for heading in ("task", "protocol", "n", "strict", "flexible", "truncated", "empty", "unparsable", "seconds"):
        table.add_column(heading, overflow="fold", justify="left" if heading in ("task", "protocol") else "right")
    for result in results:
        metrics = result.metrics
        scores = ["" if metrics[key] is None else f"{metrics[key]:.2f}" for key in ("strict", "flexible")]
        counts = [str(metrics[key]) for key in ("truncated", "empty", "unparsable")]
        seconds = f"{metrics['seconds']:.1f}"
        table.add_row(metrics["task"], metrics["protocol"], str(metrics["n"]), *scores, *counts, seconds)
    print_table(table)


def assignments(pairs: tuple[str, ...], option: str) -> dict[str, str]:
    """Return the TASK=VALUE options of a command by task."""
    found = {}
    for pair in pairs:
        task, equals, value = pair.partition("=")
        if not (task and equals and value):
            raise click.UsageError(f"{option} {pair}: write TASK=VALUE.")
        found[task] = value
    return found
