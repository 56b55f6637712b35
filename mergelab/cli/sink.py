"""``mergelab sink``: Sink Strength of one or several models."""

from __future__ import annotations

from pathlib import Path

import click

from mergelab.cli.options import device_option, json_option, sink_options
from mergelab.cli.printing import print_json, print_table, say


@click.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@sink_options("float32")
@device_option
@json_option
def sink(
    models: tuple[str, ...], dtype: str, last_layers: int | None, prompts: str, device: str, as_json: bool
) -> None:
    """Measure Sink Strength S of text models, or of the towers of vision-language models, highest first.

    \b
    Example:
      mergelab sink Qwen/Qwen2.5-7B-Instruct smollm2-135m --json
    """
    from mergelab.cli.noise import silenced

    with silenced():
        from mergelab.sweeps.single import measure_models

        records = measure_models(models, dtype, last_layers, prompts, device, say)
    records.sort(key=lambda record: -float(record["sink_strength"]))
    if as_json:
        print_json(records)
        return
    from rich.table import Table

    table = Table(pad_edge=False)
    for heading in ("model", "S", "interval", "S bf16", "layers", "rows", "tokens", "position 0"):
        table.add_column(heading, overflow="fold", justify="left" if heading == "model" else "right")
    for record in records:
        low, high = record["sink_strength_low"], record["sink_strength_high"]
        interval = "" if low is None or high is None else f"{low:.2f} to {high:.2f}"
        rounded = record["sink_strength_bf16"]
        plain = "" if record["chat_template_sha256"] else " (no chat template: plain text)"
        table.add_row(
            Path(record["model"]).name + plain,
            f"{record['sink_strength']:.3f}",
            interval,
            "infinite" if rounded is None else f"{rounded:.3f}",
            f"{record['last_layers']} of {record['num_layers']}",
            str(record["num_rows"]),
            str(sum(record["token_counts"])),
            f"{record['position0_share']:.1%}",
        )
    print_table(table)
    if len({sum(record["token_counts"]) for record in records}) > 1:
        say("The models were given different numbers of tokens; longer prompts lower S, so compare with care.")
