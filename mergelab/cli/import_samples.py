"""``mergelab import-samples``: picture scores of other harnesses into the table of a run."""

from __future__ import annotations

from pathlib import Path

import click

from mergelab.cli.options import json_option
from mergelab.cli.printing import print_json, say


@click.command("import-samples")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--task", required=True, metavar="NAME", help="What the task is called in the run's table.")
@click.option("--point", required=True, metavar="ID|vlm", help="Whose answers they are: a point id, or vlm.")
@click.option("--strict", metavar="KEY", help="The score; default the only one there is. A|B: whichever a line has.")
@click.option("--flexible", metavar="KEY", help="A more lenient score beside it.")
@click.option("--cluster", metavar="KEY", help="What questions about one picture share, such as mme_score.question_id.")
@click.option("--replace", is_flag=True, help="Take the place of what was imported for this point and task before.")
@json_option
def import_samples(
    run: Path,
    file: Path,
    task: str,
    point: str,
    strict: str | None,
    flexible: str | None,
    cluster: str | None,
    replace: bool,
    as_json: bool,
) -> None:
    """Take per-document results of lmms-eval (JSONL) or VLMEvalKit (xlsx, tsv, csv, json) into a run folder.

    Write the vlm of every point, grade it there, import file by file; `mergelab report` then has the task beside the
    others. Files that were not asked the same questions are refused.

    \b
    Example:
      mergelab merge recipe.yaml --point 0f5c1648a849 --as vlm --out merged
      python -m lmms_eval --model qwen2_5_vl --model_args pretrained=merged --tasks mmmu_val \\
        --batch_size 1 --log_samples --output_path logs
      mergelab import-samples runs/mine logs/merged/*_samples_mmmu_val.jsonl --task mmmu_lmms --point 0f5c1648a849
    """
    from mergelab.evals.imported import Keys
    from mergelab.sweeps.imports import ImportRequest
    from mergelab.sweeps.imports import import_samples as import_results

    request = ImportRequest(file, task, point, Keys(strict, flexible, cluster), replace)
    metrics = import_results(run, request, say)
    if as_json:
        print_json(metrics)
        return
    scores = [
        f"{name} {metrics[name]:.2f} ({metrics[f'{name}_key']})"
        for name in ("strict", "flexible")
        if metrics[name] is not None
    ]
    ungradable = f", {metrics['ungradable']} without a score" if metrics["ungradable"] else ""
    say(f"{metrics['point_id']}: {metrics['n']} documents of {task}, {', '.join(scores)}{ungradable}.")
    say(f"next: mergelab report {run}")
