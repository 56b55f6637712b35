"""``mergelab diagnose``: what happened to the attention sink between a base LLM and its VLM."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import click

from mergelab.cli.options import (
    choose_pair,
    device_option,
    inferred_option,
    json_option,
    pair_options,
    sink_options,
)
from mergelab.cli.printing import WIDTH, print_json, print_table, say

ROLES = ("ancestor", "base", "tower")
KINDS = ("q", "k", "v", "o", "qkv", "gate", "up", "down", "gate_up", "norm", "bias", "embedding", "head", "other")


@click.command()
@pair_options
@sink_options("float32", "Dtype of the forward passes.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="New or empty folder for diagnose.json and its figures (SVG).",
)
@inferred_option
@device_option
@json_option
def diagnose(
    pair: str | None,
    base: str | None,
    vlm: str | None,
    ancestor: str | None,
    dtype: str,
    last_layers: int | None,
    prompts: str,
    out: Path | None,
    accept_inferred: bool,
    device: str,
    as_json: bool,
) -> None:
    """Show what happened to the attention sink of a base LLM in its VLM: S, B_gap, margin, and how weights moved.

    PAIR is a name (mergelab pairs) or the path of a pair file.

    \b
    Examples:
      mergelab diagnose bench --out diagnosis
      mergelab diagnose --base my-llm --vlm my-vlm --json
    """
    from mergelab.checkpoints.output_folder import check_output_folder
    from mergelab.sweeps.models import open_models

    chosen = choose_pair(pair, base, vlm, ancestor)
    if out is not None:
        check_output_folder(out)
    models = open_models(chosen, say, accept_inferred=accept_inferred)

    from mergelab.cli.noise import silenced

    with silenced():
        from mergelab.sweeps.diagnose import Request, diagnose_pair

        record = diagnose_pair(chosen, models, Request(dtype, last_layers, prompts, device), say)
        if out is not None:
            from mergelab.report.diagnosis import write_diagnosis

            write_diagnosis(record, out)
    if as_json:
        print_json(record)
    else:
        _print(record)
    if out is not None:
        say(f"record and figures: {out}")


def _print(record: dict[str, Any]) -> None:
    _print_models(record)
    found, lemma = record["displacement"], record["displacement"]["lemma1"]
    interval = "" if found["b_gap_low"] is None else f" [{found['b_gap_low']:.2f}, {found['b_gap_high']:.2f}]"
    verdict = "holds in every one" if lemma["num_violations"] == 0 else f"FAILS in {lemma['num_violations']}"
    for line in (
        f"B_gap {found['b_gap']:.2f}{interval} nats at the base's sink, margin G - B {found['margin']:+.2f} "
        f"(median G - median B); the tower's row maximum is the base's in {found['same_sink_share']:.1%} of rows.",
        f"Lemma 1 checked on {lemma['num_rows']:,} rows of all layers: {verdict}.",
    ):
        click.echo(textwrap.fill(line, WIDTH, subsequent_indent="  "))
    click.echo()
    for role, drift in record["drift"].items():
        _print_drift("base to tower" if role == "tower" else "ancestor to base", drift)


def _print_models(record: dict[str, Any]) -> None:
    from rich.table import Table

    last = record["last_layers"]
    counts = record["token_counts"]
    table = Table(
        pad_edge=False,
        title=f"{record['pair']['name']}: last {last} layers, {sum(counts)} tokens",
        title_justify="left",
    )
    for heading in ("model", "S", "interval", "S bf16", "position 0", "G > 2", "QK norm"):
        table.add_column(heading, justify="left" if heading in ("model", "QK norm") else "right")
    for role in ROLES:
        model = record["models"].get(role)
        if model is None:
            continue
        low, high, rounded = model["sink_strength_low"], model["sink_strength_high"], model["sink_strength_bf16"]
        table.add_row(
            role,
            f"{model['sink_strength']:.3f}",
            "" if low is None else f"{low:.2f} to {high:.2f}",
            "infinite" if rounded is None else f"{rounded:.3f}",
            f"{model['position0_share']:.1%}",
            f"{model['prevalence']:.1%}",
            model["qk_norm"],
        )
    print_table(table)


def _print_drift(title: str, drift: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(pad_edge=False, title=f"weights, {title}", title_justify="left")
    for heading in ("kind", "tensors", "relative change", "op norm", "op norm of change", "stable rank", "layers read"):
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    for kind in sorted(drift, key=lambda kind: (KINDS.index(kind) if kind in KINDS else len(KINDS), kind)):
        found = drift[kind]
        sampled = f"{len(found['sampled_layers'])}" if found["sampled_layers"] else ""
        cells = [_number(found[name], 2) for name in ("operator_norm", "delta_operator_norm", "stable_rank")]
        table.add_row(kind, str(found["num_tensors"]), _number(found["relative_frobenius"], 4), *cells, sampled)
    print_table(table)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
