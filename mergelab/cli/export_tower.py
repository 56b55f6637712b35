"""``mergelab export-tower``: the text tower of a vlm as a text checkpoint."""

from __future__ import annotations

from pathlib import Path

import click

from mergelab.cli.options import inferred_option, json_option
from mergelab.cli.printing import print_json, say


@click.command("export-tower")
@click.argument("vlm", metavar="VLM")
@click.option("--base", required=True, metavar="DIR|ID", help="The LLM whose tokenizer and chat template it gets.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The folder to write; new or empty.")
@inferred_option
@json_option
def export_tower(vlm: str, base: str, out: Path, accept_inferred: bool, as_json: bool) -> None:
    """Write the text tower of VLM, bit for bit, as a checkpoint that loads as an ordinary causal LM.

    VLM is a folder or hub id. Names are those of a text model, tokenizer and template base's, dtype the vlm's.

    \b
    Example:
      mergelab export-tower my-vlm --base my-llm --out my-vlm-text
    """
    from mergelab import config
    from mergelab.checkpoints.output_folder import check_output_folder
    from mergelab.cli.noise import silenced
    from mergelab.sweeps.models import open_models

    pair = config.pair_from_folders(base, vlm)
    check_output_folder(out)
    models = open_models(pair, say, accept_inferred=accept_inferred)
    with silenced():
        from mergelab.sweeps.writing import write_tower

        record = write_tower(pair, models, out)
    if as_json:
        print_json(record)
        return
    say(f"{record['tensors']} tensors in {record['seconds']:.1f} s")
    click.echo(str(out))
