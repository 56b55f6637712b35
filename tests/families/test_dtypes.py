"""Half precision, as released weights are: live model and exported folder still are the same numbers and answers."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from mergelab.checkpoints.fingerprint import fingerprint_checkpoint
from mergelab.checkpoints.headers import open_checkpoint
from mergelab.config import Pair
from mergelab.engine.plan import plan_jobs
from mergelab.engine.targets import LiveTarget
from mergelab.errors import PairingError
from mergelab.live.configs import tower_config
from mergelab.live.model import load_text_model
from mergelab.sweeps.experiment import check_live_dtypes, live_dtype
from mergelab.sweeps.loading import tower_of
from mergelab.sweeps.models import Models, open_models
from mergelab.sweeps.writing import write_tower
from tests.builders import write_tokenizer
from tests.families.catalogue import FAMILIES
from tests.families.checkpoints import TOKENS, Build, logits, stored

NAMES = ["llava", "qwen3_vl_moe", "gemma3", "gemma4", "glm4v_moe"]


def halved(built: Build, name: str, root: Path) -> tuple[Pair, Models]:
    """Write base and vlm in bfloat16 as their classes do, and open them."""
    known = built(next(family for family in FAMILIES if family.id == name))
    for auto, folder, tokens in (
        (AutoModelForCausalLM, known.base, TOKENS),
        (AutoModelForImageTextToText, known.folder("native"), (*TOKENS, "<image>")),
    ):
        out = root / ("base" if folder == known.base else "vlm")
        auto.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(out, save_original_format=False)
        write_tokenizer(out, tokens)
    pair = Pair(name="half", base=str(root / "base"), vlm=str(root / "vlm"))
    return pair, open_models(pair)


@pytest.mark.parametrize("name", NAMES)
def test_live_tower_in_half_precision_is_the_exported_one(built: Build, name: str, tmp_path: Path) -> None:
    pair, models = halved(built, name, tmp_path)
    jobs = plan_jobs(models.pairing, models.checkpoints)
    assert live_dtype(jobs) == torch.bfloat16
    check_live_dtypes(jobs, tower_config(tmp_path / "vlm", models.pairing.towers["vlm"].has_head))
    write_tower(pair, models, tmp_path / "tower")
    live = tower_of(models.checkpoints["vlm"], models.pairing.towers["vlm"], "cpu", torch.bfloat16)
    target = LiveTarget(live.tensors())
    target.check(jobs)
    assert target.hash(jobs) == fingerprint_checkpoint(open_checkpoint(tmp_path / "tower"))
    alone = load_text_model(tmp_path / "tower", "cpu", torch.bfloat16)
    assert torch.equal(logits(live.text), logits(alone.text))


def test_router_that_is_live_in_float32_takes_what_a_file_holds_in_bfloat16(built: Build, tmp_path: Path) -> None:
    _, models = halved(built, "glm4v_moe", tmp_path)
    vlm = tmp_path / "vlm"
    tensors = {name: t.to(torch.bfloat16) for name, t in stored(vlm).items()}
    save_file(tensors, vlm / "model.safetensors", metadata={"format": "pt"})
    pair = Pair(name="half", base=str(tmp_path / "base"), vlm=str(vlm))
    models = open_models(pair)
    jobs = plan_jobs(models.pairing, models.checkpoints)
    assert {job.dtype for job in jobs} == {"BF16"}
    write_tower(pair, models, tmp_path / "tower")
    live = tower_of(models.checkpoints["vlm"], models.pairing.towers["vlm"], "cpu", torch.bfloat16)
    target = LiveTarget(live.tensors())
    target.check(jobs)
    assert target.hash(jobs) == fingerprint_checkpoint(open_checkpoint(tmp_path / "tower"))


def test_tensor_that_the_class_would_round_is_refused_by_name(built: Build, tmp_path: Path) -> None:
    halved(built, "llava", tmp_path)
    vlm = tmp_path / "vlm"
    name = "model.language_model.layers.1.mlp.up_proj.weight"
    save_file({n: t.float() if n == name else t for n, t in stored(vlm).items()}, vlm / "model.safetensors")
    models = open_models(Pair(name="half", base=str(tmp_path / "base"), vlm=str(vlm)))
    jobs = plan_jobs(models.pairing, models.checkpoints)
    with pytest.raises(PairingError, match=r"model\.layers\.1\.mlp\.up_proj\.weight: .* F32 to write, live .*bfloat16"):
        check_live_dtypes(jobs, tower_config(vlm, has_head=True))
