"""The class matrix: real classes of transformers, tiny, in every layout on disk, from the files to the live model.

The truth comes from the models in memory (``tests.families``): which numbers are the tower's, what the plain text class
makes of them, what the vlm's own class answers.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from mergelab.checkpoints.fingerprint import fingerprint_checkpoint
from mergelab.checkpoints.headers import open_checkpoint
from mergelab.config import Pair, Recipe
from mergelab.engine.inputs import Inputs
from mergelab.engine.plan import operation, plan_jobs
from mergelab.engine.stream import stream
from mergelab.engine.targets import LiveTarget, hash_live
from mergelab.errors import PairingError
from mergelab.live.configs import tower_config
from mergelab.live.model import LiveModel, build_tower
from mergelab.sweeps.loading import tower_of
from mergelab.sweeps.models import Models, open_models
from mergelab.sweeps.writing import write_merge, write_tower
from tests.families.catalogue import FAMILIES
from tests.families.checkpoints import Build, Built, load, logits, stored, text_state
from tests.families.family import IMAGE, Family, Layout
from tests.families.further import FURTHER

CASES = [
    pytest.param(family, layout, id=f"{family.id}-{layout}", marks=marks)
    for families, marks in ((FAMILIES, ()), (FURTHER, pytest.mark.slow))
    for family in families
    for layout in family.layouts
]
matrix = pytest.mark.parametrize(("family", "layout"), CASES)
State = dict[str, torch.Tensor]


def pair_of(built: Built, layout: Layout) -> tuple[Pair, Models]:
    pair = Pair(name="matrix", base=str(built.base), vlm=str(built.folder(layout)))
    return pair, open_models(pair)


def merged(built: Built, layout: Layout, scale: float, out: Path, kind: str = "vlm") -> Path:
    """Write base plus ``scale`` times the vlm's change."""
    pair, models = pair_of(built, layout)
    recipe = Recipe(name="matrix", pair="matrix", method="task_arithmetic", parameters={"lambda": scale})
    write_merge(recipe, pair, models, out, kind, None, "cpu")
    return out


def load_vlm(family: Family, folder: Path) -> PreTrainedModel:
    return load(AutoModelForImageTextToText if family.sees_pictures else AutoModelForCausalLM, folder)


def equal_states(found: State, expected: State) -> None:
    """Demand the same tensors, bit for bit; rows beyond the expected are the vlm's own."""
    assert found.keys() == expected.keys()
    different = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
    assert not different


def shared_rows(family: Family, base: State, vlm: State) -> State:
    """Return base's state with the vlm's rows for the tokens that base lacks."""
    rows = {"model.embed_tokens.weight", "lm_head.weight"}
    return {
        name: torch.cat([tensor[:IMAGE], vlm[name][IMAGE:]]) if name in rows else tensor
        for name, tensor in base.items()
    }


@matrix
def test_pairing_is_total_and_its_tower_is_the_true_one(built: Build, family: Family, layout: Layout) -> None:
    known = built(family)
    _, models = pair_of(known, layout)
    tensors = stored(known.folder(layout))
    true = {name for name, tensor in tensors.items() if known.is_tower(tensor)}
    roles = models.pairing.towers["vlm"].roles
    assert {name for name, role in roles.items() if role == "tower"} == true
    assert roles.keys() == tensors.keys()
    assert set(roles.values()) <= {"tower", "vision", "projector", "extra"}
    assert set(models.pairing.copied) == tensors.keys() - true


@matrix
def test_exported_tower_loads_whole_and_answers_as_the_vlm(
    built: Build, family: Family, layout: Layout, tmp_path: Path
) -> None:
    known = built(family)
    pair, models = pair_of(known, layout)
    write_tower(pair, models, tmp_path / "tower")
    exported = load(AutoModelForCausalLM, tmp_path / "tower")
    assert type(exported) is type(known.tower)
    equal_states(exported.state_dict(), known.tower.state_dict())
    answers, rows = logits(exported), exported.config.vocab_size
    assert torch.equal(answers, logits(known.tower)), "its config is not the one of the plain text class"
    error = (known.vlm_logits[..., :rows] - family.factor * answers).abs().max()
    assert float(error) <= family.tolerance


@matrix
def test_ends_are_the_parents_bit_for_bit_and_load_in_the_vlms_class(
    built: Build, family: Family, layout: Layout, tmp_path: Path
) -> None:
    known = built(family)
    before = stored(known.folder("native" if layout == "repeated" else layout))  # no class loads the corrupted names
    vlm = stored(merged(known, layout, 1.0, tmp_path / "one"))
    assert vlm.keys() == before.keys()
    assert all(torch.equal(vlm[name], tensor) for name, tensor in before.items())
    after = stored(merged(known, layout, 0.0, tmp_path / "zero"))
    assert {n: (t.shape, t.dtype) for n, t in after.items()} == {n: (t.shape, t.dtype) for n, t in before.items()}
    assert all(torch.equal(after[name], t) for name, t in before.items() if not known.is_tower(t))
    loaded = load_vlm(family, tmp_path / "zero")
    expected = shared_rows(family, known.base_model.state_dict(), known.tower.state_dict())
    equal_states(text_state(family, loaded), expected)


@matrix
def test_live_model_is_the_exported_folder(built: Build, family: Family, layout: Layout, tmp_path: Path) -> None:
    known = built(family)
    _, models = pair_of(known, layout)
    folder = merged(known, layout, 0.5, tmp_path / "half", "text")
    checkpoint, tower = models.checkpoints["vlm"], models.pairing.towers["vlm"]
    lives = {"whole": tower_of(checkpoint, tower, "cpu", torch.float32)}
    if family.sees_pictures:
        lives["bare"] = build_tower(tower_config(checkpoint.folder, tower.has_head, tower.family), "cpu", torch.float32)
    equal_states(lives["whole"].text.state_dict(), known.tower.state_dict())
    jobs = plan_jobs(models.pairing, models.checkpoints)
    for live in lives.values():
        target = LiveTarget(live.tensors())
        target.check(jobs)
        stream(jobs, operation("task_arithmetic", {"lambda": 0.5}, "base"), Inputs(models.checkpoints), target)
        assert hash_live(live.tensors()) == fingerprint_checkpoint(open_checkpoint(folder))
        exported = load(AutoModelForCausalLM, folder, live.text.config._attn_implementation)
        assert torch.equal(logits(live.text), logits(exported))
    views_agree(family, lives["whole"])


def views_agree(family: Family, live: LiveModel) -> None:
    """Demand that the vlm answers text with what the merge wrote into the text view."""
    fast = logits(live.text)
    live.text.set_attn_implementation("eager")
    answers = logits(live.text)
    assert torch.allclose(fast, answers, atol=1e-3), "the fast attention looks ahead"
    assert (live.vlm is not None) is family.sees_pictures
    if live.vlm is not None:
        live.vlm.set_attn_implementation("eager")
        error = (logits(live.vlm)[..., : answers.shape[-1]] - family.factor * answers).abs().max()
        assert float(error) <= family.tolerance


def test_embedding_that_a_class_saved_in_halves_is_refused_not_merged_by_half(built: Build, tmp_path: Path) -> None:
    known = built(next(family for family in FAMILIES if family.id == "molmo2"))
    known.vlm.save_pretrained(tmp_path / "vlm")
    with pytest.raises(PairingError, match=r"18 rows, lm_head.weight 32.*save_original_format=False"):
        open_models(Pair(name="halves", base=str(known.base), vlm=str(tmp_path / "vlm")))
