"""A config.json that says anything at all: the tower's text config comes out of it, or one message that names it."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from mergelab.checkpoints.headers import open_checkpoint
from mergelab.engine.plan import plan_jobs
from mergelab.errors import MergelabError
from mergelab.sweeps.experiment import text_config
from mergelab.sweeps.models import Models
from mergelab.towers.pairing import pair_checkpoints
from tests.builders import tiny_llava
from tests.checkpoints import mutations


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llava(tmp_path_factory.mktemp("vlm") / "vlm")


def outcome(vlm: Path, config: object) -> str:
    (vlm / "config.json").write_text(json.dumps(config))
    try:
        checkpoints = {role: open_checkpoint(vlm) for role in ("base", "vlm")}
        pairing = pair_checkpoints(checkpoints)
        text_config(Models(checkpoints, pairing), plan_jobs(pairing, checkpoints))
    except MergelabError as error:
        assert str(vlm) in str(error) or "config.json" in str(error)
        assert len(str(error)) < 5000
        return "refused"
    return "read"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", [120, pytest.param(3000, marks=pytest.mark.slow)])
def test_mutated_configs(vlm: Path, count: int) -> None:
    original = (vlm / "config.json").read_text()
    outcomes: Counter[str] = Counter()
    try:
        for seed in range(count):
            config = json.loads(original)
            mutations.change_json(random.Random(seed), config)
            try:
                outcomes[outcome(vlm, config)] += 1
            except Exception as error:
                raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    finally:
        (vlm / "config.json").write_text(original)
    assert min(outcomes["read"], outcomes["refused"]) > count / 10, outcomes


def test_billion_layers_are_not_built(vlm: Path) -> None:
    original = (vlm / "config.json").read_text()
    config = json.loads(original)
    config["text_config"]["num_hidden_layers"] = 10**9
    config["text_config"].pop("layer_types", None)
    try:
        assert outcome(vlm, config) == "refused"
    finally:
        (vlm / "config.json").write_text(original)
