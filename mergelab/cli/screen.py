"""``mergelab screen``: the paper's evidence on Sink Strength, and where a model falls on it."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mergelab.cli.options import device_option, json_option, sink_options
from mergelab.cli.printing import WIDTH, print_json, print_table, say

if TYPE_CHECKING:
    from mergelab.report.panel import Entry


@click.command()
@click.argument("models", nargs=-1, metavar="[MODEL...]")
@click.option("--verify", is_flag=True, help="Recompute the paper's figures from the table; exit 5 on a mismatch.")
@click.option(
    "--add",
    "runs",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="Add a run folder that graded IFEval to the panel. Repeatable.",
)
@sink_options("bfloat16", "Dtype of the forward pass; the panel's was bfloat16.")
@device_option
@json_option
def screen(
    models: tuple[str, ...],
    verify: bool,
    runs: tuple[Path, ...],
    dtype: str,
    last_layers: int | None,
    prompts: str,
    device: str,
    as_json: bool,
) -> None:
    """Show the published pairs by Sink Strength, and what loss on IFEval they suggest for a VLM made from MODEL.

    Without a model the panel alone is shown and nothing is measured.

    \b
    Examples:
      mergelab screen
      mergelab screen Qwen/Qwen2.5-3B-Instruct --add runs/mine
      mergelab screen --verify --json
    """
    from mergelab.report.panel import load_panel, run_entry

    if verify:
        if models or runs:
            raise click.UsageError("--verify checks the shipped table alone; leave out models and --add.")
        _print_checks(as_json)
        return
    panel = [*load_panel(), *(run_entry(folder) for folder in runs)]
    records: list[dict[str, Any]] = []
    if models:
        from mergelab.cli.noise import silenced

        with silenced():
            from mergelab.sweeps.single import measure_models

            records = measure_models(models, dtype, last_layers, prompts, device, say)
    placed = [_placed(record, panel) for record in records]
    if as_json:
        print_json({"panel": [asdict(entry) for entry in panel], "models": placed, "notes": _notes(panel, placed)})
        return
    _print_panel(panel, placed)
    for line in [*(_sentence(model) for model in placed), *_notes(panel, placed)]:
        click.echo(textwrap.fill(line, WIDTH, subsequent_indent="  "))


def _placed(record: dict[str, Any], panel: list[Entry]) -> dict[str, Any]:
    from mergelab.report.prediction import predict

    # A median of saturated rows has no bfloat16 read-out; the float32 one is always finite.
    rounded = record["sink_strength_bf16"]
    strength = record["sink_strength"] if rounded is None else rounded
    return {**record, "prediction": asdict(predict(panel, strength))}


def _sentence(model: dict[str, Any]) -> str:
    found = model["prediction"]
    flag = " S lies outside the panel: this is extrapolation." if found["is_extrapolation"] else ""
    which = "bf16 read-out" if model["sink_strength_bf16"] is not None else "float32 read-out, the bf16 one is infinite"
    return (
        f"{Path(model['model']).name}: S {found['sink_strength']:.2f} ({which}), below {found['rank']} of "
        f"{found['num_pairs']} pairs. The line through them expects {found['delta']:+.1f} IFEval points "
        f"[{found['low']:+.1f}, {found['high']:+.1f}], {found['level']:.0%} by leaving out one of "
        f"{found['num_bases']} bases at a time.{flag}"
    )


def _notes(panel: list[Entry], placed: list[dict[str, Any]]) -> list[str]:
    from mergelab.report.panel import PAPER, num_distinct, subset

    six, all_of_it = subset(panel, 6), subset(panel, 17)
    notes = [
        "S in nats; IFEval is prompt-level strict, vlm minus base in points.",
        f"Evidence: {PAPER}. Its {_word(len(six))} main pairs have {_word(num_distinct(six))} distinct S, its "
        f"{len(all_of_it)} pairs {num_distinct(all_of_it)}: pairs that share a base are not independent.",
    ]
    if placed:
        counts = ", ".join(str(sum(model["token_counts"])) for model in placed)
        notes.append(
            "The panel was measured on prompts of the paper's own, which are not published, in bfloat16; here "
            f"{placed[0]['prompts']['name']} gave {counts} tokens. Longer prompts lower S, so compare with care."
        )
    return notes


def _word(count: int) -> str:
    return {4: "four", 6: "six"}.get(count, str(count))


def _print_panel(panel: list[Entry], placed: list[dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table(pad_edge=False)
    for heading in ("S", "IFEval", "vlm", "base", "source"):
        table.add_column(heading, overflow="fold", justify="right" if heading in ("S", "IFEval") else "left")
    lines = [
        (entry.sink_strength, f"{entry.deltas['ifeval']:+.1f}", entry.vlm, entry.base, _short(entry)) for entry in panel
    ]
    for model in placed:
        found = model["prediction"]
        expected = f"({found['delta']:+.1f})"
        lines.append((found["sink_strength"], expected, "(expected)", Path(model["model"]).name, "measured now"))
    for strength, *cells in sorted(lines, key=lambda line: -line[0]):
        table.add_row(f"{strength:.2f}", *cells)
    print_table(table)


def _short(entry: Entry) -> str:
    if entry.panel is None:
        return f"{entry.source}; {', '.join(entry.notes)}"
    return {6: "paper, main", 9: "paper, nine"}.get(entry.panel, "paper, wider")


def _print_checks(as_json: bool) -> None:
    from mergelab.errors import DamagedFileError
    from mergelab.report.evidence import verify

    checks = verify()
    if as_json:
        print_json([check.record() for check in checks])
    else:
        from rich.table import Table

        table = Table(pad_edge=False)
        for heading in ("quantity", "paper", "recomputed", "ok"):
            table.add_column(heading, overflow="fold", justify="left" if heading == "quantity" else "right")
        for check in checks:
            table.add_row(check.quantity, f"{check.paper:g}", f"{check.recomputed:.4f}", "yes" if check.ok else "NO")
        print_table(table)
    wrong = [check.quantity for check in checks if not check.ok]
    if wrong:
        sys.stdout.flush()
        raise DamagedFileError(
            f"panel.csv: {len(wrong)} of {len(checks)} figures of the paper do not follow from it: {'; '.join(wrong)}. "
            "Install the package again."
        )
    say(f"All {len(checks)} figures follow from the table.")
