"""The builder: a shortened pair through the same code, refused outputs, gates."""

import json
from itertools import pairwise

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, LlavaForConditionalGeneration

from mergelab.bench import build
from mergelab.bench.build import ROLES, build_pair
from mergelab.bench.gates import Gates
from mergelab.bench.models import new_text_model, new_vision_tower
from mergelab.bench.stages import Steps
from mergelab.errors import DamagedFileError, OutputFolderError

SHORT = Steps(ancestor=2, base=2, vision=2, vlm=2)
GOOD = Gates(base_strict=95, base_flexible=96, vlm_strict=40, vlm_flexible=82, image_strict=90, image_flexible=99)


@pytest.fixture(scope="module")
def short_pair(tmp_path_factory):
    out = tmp_path_factory.mktemp("bench") / "pair"
    lines: list[str] = []
    report = build_pair(out, seed=3, steps=SHORT, progress=lines.append)
    return out, report, lines


def test_a_short_build_writes_three_loadable_folders(short_pair):
    out, report, lines = short_pair
    assert sorted(path.name for path in out.iterdir()) == ["BUILD.json", *ROLES]
    assert [stage.name for stage in report.stages] == ["ancestor", "base", "vision", "vlm"]
    assert lines[0].startswith("ancestor: step 1 of 2")
    for role in ROLES:
        names = {path.name for path in (out / role).iterdir()}
        assert names >= {
            "config.json",
            "generation_config.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
        }
        assert {path.stat().st_mode & 0o777 for path in (out / role).iterdir()} == {0o644}
    assert json.loads((out / "BUILD.json").read_text())["seed"] == 3


def test_the_stages_follow_from_each_other(short_pair):
    out, _, _ = short_pair
    ancestor, base = (LlamaForCausalLM.from_pretrained(out / role) for role in ("ancestor", "base"))
    vlm = LlavaForConditionalGeneration.from_pretrained(out / "vlm")
    name = "layers.0.mlp.up_proj.weight"
    towers = [model.base_model.state_dict()[name] for model in (ancestor, base)]
    towers.append(vlm.model.language_model.state_dict()[name])
    steps = [float((later - earlier).norm()) for earlier, later in pairwise(towers)]
    assert 0 < steps[0] < 5
    assert 0 < steps[1] < 5


def test_the_same_seed_builds_the_same_weights(short_pair, tmp_path):
    out, _, _ = short_pair
    build_pair(tmp_path / "again", seed=3, steps=SHORT, progress=lambda line: None)
    for role in ROLES:
        first = (out / role / "model.safetensors").read_bytes()
        assert first == (tmp_path / "again" / role / "model.safetensors").read_bytes(), role
    assert (out / "base" / "tokenizer.json").read_bytes() == (
        tmp_path / "again" / "base" / "tokenizer.json"
    ).read_bytes()


def test_parameter_counts_are_the_recipes():
    assert new_text_model().num_parameters() == 968_320
    assert new_vision_tower().num_parameters() == 95_552


def test_a_used_folder_is_refused_before_any_work(tmp_path):
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(OutputFolderError, match="expected a new or empty folder"):
        build_pair(tmp_path, steps=SHORT, progress=lambda line: pytest.fail("work was done"))
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_strict": 89.0}, "base strict 89.0, expected at least 90"),
        ({"vlm_strict": 76.0, "vlm_flexible": 90.0}, "is 19.0 below base, expected at least 20"),
        ({"vlm_flexible": 41.0}, "flexible loss 55.0, expected less than the strict loss 55.0"),
        ({"image_flexible": 69.0}, "pictures 69.0, expected at least 70"),
    ],
)
def test_every_gate_names_its_number(change, message):
    assert GOOD.problems() == []
    problems = Gates(**{**vars(GOOD), **change}).problems()
    assert len(problems) == 1
    assert message in problems[0]


def test_a_full_build_that_misses_a_gate_writes_nothing(tmp_path, monkeypatch):
    """Two steps a stage declared to be the full build: real training, real generation, gates that fail."""
    monkeypatch.setattr(build, "Steps", lambda: SHORT)
    with pytest.raises(DamagedFileError, match=r"misses its gates(.|\n)*base strict 0\.0(.|\n)*pictures 0\.0"):
        build_pair(tmp_path / "pair", progress=lambda line: None)
    assert list(tmp_path.iterdir()) == []


def test_the_global_generator_is_left_alone(tmp_path):
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    build_pair(tmp_path / "pair", steps=Steps(1, 1, 1, 1), progress=lambda line: None)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.slow
def test_a_full_build_meets_its_gates(tmp_path):
    report = build_pair(tmp_path / "pair", progress=lambda line: None)
    assert report.gates.problems() == []
    assert AutoTokenizer.from_pretrained(tmp_path / "pair" / "vlm").chat_template
