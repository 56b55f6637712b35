"""`mergelab run` and `merge` under a rule that was inferred and kept: the same weights as under the family file."""

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from mergelab.checkpoints.fingerprint import fingerprint_checkpoint
from mergelab.checkpoints.headers import open_checkpoint
from mergelab.cli import main
from mergelab.errors import PairingError
from mergelab.records import read_run
from mergelab.sweeps.models import infer_models
from tests.families.catalogue import FAMILIES
from tests.families.checkpoints import Build
from tests.families.family import Layout

CHECK = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}


def typed(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.mark.parametrize(("name", "layout"), [("molmo2-olmo3", "hub"), ("mllama", "native")])
def test_kept_rule_makes_the_weights_of_the_family_file(
    built: Build, name: str, layout: Layout, tmp_path: Path
) -> None:
    known = built(next(family for family in FAMILIES if family.id == name))
    models = {"base": known.base, "vlm": known.folder(layout)}
    checkpoints = {role: open_checkpoint(folder) for role, folder in models.items()}
    report = infer_models(checkpoints, PairingError("no family is known"), accept_inferred=False).report
    assert report is not None
    (tmp_path / "rule.yaml").write_text(report.rule)
    pair = {"name": "tiny", **{role: str(folder) for role, folder in models.items()}}
    (tmp_path / "pair.yaml").write_text(yaml.safe_dump({**pair, "family": "rule.yaml"}))
    data = tmp_path / "ifeval.jsonl"
    data.write_text("".join(json.dumps({"key": n, "prompt": f"word{n + 5} word9", **CHECK}) + "\n" for n in range(2)))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "name: tiny\npair: bench\nmethod: task_arithmetic\nparameters: {lambda: 0.5}\nzero_point: base\ncontrols: []\n"
        f"evals: {{tasks: [ifeval], data: {{ifeval: {data}}}, max_gen_toks: {{ifeval: 3}}, batch_size: 2}}\n"
    )
    known_pair = ("--base", known.base, "--vlm", known.folder(layout))
    where = ("--out", tmp_path / "run", "--device", "cpu", "--no-cache")
    done = typed("run", recipe, "--pair", tmp_path / "pair.yaml", *where)
    assert done.exit_code == 0, (done.output, done.exception)
    (merge,) = (point for point in read_run(tmp_path / "run").points if point.role == "merge")
    done = typed("merge", recipe, *known_pair, "--as", "text", "--out", tmp_path / "text", "--device", "cpu")
    assert done.exit_code == 0, (done.output, done.exception)
    assert merge.point["weights_hash"] == fingerprint_checkpoint(open_checkpoint(tmp_path / "text"))
    assert merge.point_id != json.loads((tmp_path / "text" / "mergelab.json").read_text())["point_id"]
    refused = typed("run", recipe, *known_pair, *where)
    assert refused.exit_code != 0 and "family: the folder was made with the rules" in refused.stderr
