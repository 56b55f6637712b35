"""``mergelab check``: do the models of a pair fit, and do they come from one another."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from mergelab.cli.inferred import keep_rule, print_inferred
from mergelab.cli.options import choose_pair, inferred_option, json_option, pair_options
from mergelab.cli.printing import WIDTH, print_json, print_table, say

SHOWN_TOKENS = 12
SHOWN_EXPLAINED = 8
PROJECTIONS = ("q", "k", "v", "qkv", "o", "gate", "up", "gate_up", "down")


@click.command()
@pair_options
@inferred_option
@click.option(
    "--save-rule", type=click.Path(path_type=Path), metavar="FILE", help="Keep an inferred family as a new YAML file."
)
@click.option("--no-digest", is_flag=True, help="Compare headers alone; of models on the hub fetch no weights at all.")
@json_option
def check(accept_inferred: bool, save_rule: Path | None, no_digest: bool, as_json: bool, **pair: str | None) -> None:
    """Say whether the models of a pair fit each other, from headers and 64 sampled rows of some tensors.

    Shown are layouts, which tensors pair, differences of config and vocabulary, and whether the vlm's tower comes
    from base and ancestor. PAIR is a name (mergelab pairs) or the path of a pair file. Exit code 4: it does not fit.
    Of models on the hub only small files, headers and the sampled rows are fetched.
    A vlm of no known family is mapped by inference; the report says how sure that is, and ends with the rule as YAML.

    \b
    Examples:
      mergelab check bench
      mergelab check --base my-llm --vlm my-vlm --ancestor my-pretrained --json
    """
    from mergelab.errors import PairingError
    from mergelab.sweeps.check import check_record
    from mergelab.sweeps.models import open_models
    from mergelab.towers.confidence import UncertainPairing

    chosen = choose_pair(**pair)
    try:
        models = open_models(chosen, say, accept_inferred=accept_inferred, headers_only=True)
    except PairingError as error:
        inferred = error.report.record() if isinstance(error, UncertainPairing) else None
        if as_json:
            print_json({"pair": chosen.name, "fits": False, "problem": str(error), "inferred": inferred})
        elif inferred is not None:
            print_inferred(inferred, _line)
        if inferred is not None and save_rule is not None:
            keep_rule(save_rule, inferred["rule"])
        raise
    record = check_record(models)
    if not as_json:
        _print_headers(chosen.name, record)
        if record["inferred"] is not None:
            print_inferred(record["inferred"], _line)
    if save_rule is not None:
        if record["inferred"] is None:
            say(f"--save-rule: nothing was inferred, so {save_rule} is not written.")
        else:
            keep_rule(save_rule, record["inferred"]["rule"])

    if no_digest:
        if as_json:
            print_json({"pair": chosen.name, **record, "ancestry": None})
        return

    from mergelab.cli.noise import silenced

    with silenced():
        from mergelab.engine.ancestry import ancestry_digest

        digest = ancestry_digest(models.pairing, models.checkpoints)
    if as_json:
        print_json({"pair": chosen.name, **record, "fits": not digest.stops, "ancestry": digest.record()})
    else:
        _print_ancestry(digest.record())
    if digest.stops:
        say(f"Error: {digest.verdict}: a merge of these models means nothing. Pick the models the vlm was made from.")
        sys.exit(PairingError.exit_code)


def _print_headers(name: str, record: Mapping[str, Any]) -> None:
    from rich.table import Table

    table = Table(pad_edge=False, title=name, title_justify="left")
    for heading in ("model", "type", "layout", "dtypes", "tensors", "GB"):
        table.add_column(heading, overflow="fold", justify="right" if heading == "GB" else "left")
    for role, model in record["models"].items():
        counts = (", ".join(f"{what} {count}" for what, count in model[key].items()) for key in ("dtypes", "parts"))
        table.add_row(role, str(model["model_type"]), model["layout"], *counts, f"{model['gigabytes']:.3f}")
    print_table(table)
    for role, model in record["models"].items():
        _print_family(role, model)
    for role, counts in record["coverage"].items():
        _line(f"{role}: " + ", ".join(f"{what} {count}" for what, count in counts.items()))
    _line(
        f"vlm: {record['merged']} tensors merge ({record['merged_entries']:,} entries), {record['copied']} are copied"
    )
    for number, (stored, reason) in enumerate(record["explained"].items()):
        if number == SHOWN_EXPLAINED:
            _line(f"({len(record['explained']) - SHOWN_EXPLAINED} more explained)")
            break
        _line(f"{stored}: {reason}")
    for note in dict.fromkeys((*(record["config"] or ["config: no difference that matters"]), *record["notes"])):
        _line(note)
    _print_tokens(record["tokens"])


def _print_family(role: str, model: Mapping[str, Any]) -> None:
    apart = model["taken_apart"]
    said = []
    if model["family"] is not None:
        said.append(f"family {model['family']} (checked: {model['checked']})")
    if apart["tensors"]:
        said.append(f"{apart['tensors']} fused tensors are taken apart into {apart['weights']} weights")
    if said:
        _line(f"{role}: {'; '.join(said)}")


def _print_tokens(tokens: Mapping[str, Any] | None) -> None:
    if tokens is None:
        _line("tokens: base or vlm has no readable tokenizer files")
        return
    _line(f"tokens: {tokens['num_shared']} shared, {len(tokens['moved'])} of them in another row")
    for side in ("base", "vlm"):
        only = tokens[f"only_{side}"]
        if only:
            shown = ", ".join(f"{token!r} {row}" for token, row in [*only.items()][:SHOWN_TOKENS])
            more = f" ({len(only) - SHOWN_TOKENS} more)" if len(only) > SHOWN_TOKENS else ""
            _line(f"only in {side}: {shown}{more}")
    for what, (base, vlm) in tokens["special"].items():
        _line(f"{what}: base {base!r}, vlm {vlm!r}")
    if not tokens["same_template"]:
        _line("chat templates differ")


def _print_ancestry(ancestry: Mapping[str, Any]) -> None:
    from rich.table import Table

    found = {kind for one in ancestry["relations"].values() for kind in one["by_projection"]}
    kinds = [*(kind for kind in PROJECTIONS if kind in found), *sorted(found.difference(PROJECTIONS))]
    table = Table(pad_edge=False, title="relative norm of the tower's change, sampled rows", title_justify="left")
    for heading in ("from", "cosine", "all", *kinds):
        table.add_column(heading, overflow="fold", justify="left" if heading == "from" else "right")
    for role, one in ancestry["relations"].items():
        by_kind = (f"{one['by_projection'].get(kind, float('nan')):.3f}" for kind in kinds)
        table.add_row(role, f"{one['cosine']:.3f}", f"{one['relative_norm']:.3f}", *by_kind)
    if ancestry["relations"]:
        print_table(table)
    for role, one in ancestry["relations"].items():
        layers = ", ".join(f"{layer}: {value:.3f}" for layer, value in one["by_layer"].items())
        _line(f"from {role}, by layer: {layers}")
    _line(f"verdict: {ancestry['verdict']}: {ancestry['reason']}")


def _line(text: str) -> None:
    click.echo(textwrap.fill(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))
