"""Written checkpoints load with nothing missing, say what they are, and hold the live model's bits."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig

from mergelab import atomic
from mergelab.checkpoints.fingerprint import fingerprint_checkpoint
from mergelab.checkpoints.headers import open_checkpoint
from mergelab.engine.export import Export, export_text, export_vlm
from mergelab.engine.inputs import Inputs
from mergelab.engine.plan import operation, plan_jobs
from mergelab.engine.stream import stream
from mergelab.engine.targets import LiveTarget, hash_live
from mergelab.errors import DamagedFileError, OutputFolderError
from mergelab.live.configs import tower_config
from mergelab.live.model import build_tower, load_text_model
from mergelab.towers.pairing import pair_checkpoints
from tests.builders import tiny_llama, tiny_llava

WHAT = operation("ties", {"density": 0.4, "lambda": 0.5}, "ancestor")


def make_export(root: Path, output_dtype: str = "auto", native: bool = False, tied: bool = False) -> Export:
    ancestor = tiny_llama(root / "ancestor", seed=0, tie_word_embeddings=tied)
    base = tiny_llama(root / "base", seed=1, start=ancestor, tie_word_embeddings=tied)
    vlm = tiny_llava(root / "vlm", seed=2, start=base, native=native, tie_word_embeddings=tied, max_shard_size="20KB")
    (vlm / "chat_template.jinja").write_text("vlm template")
    (base / "chat_template.jinja").write_text("base template")
    checkpoints = {role: open_checkpoint(root / role) for role in ("ancestor", "base", "vlm")}
    pairing = pair_checkpoints(checkpoints)
    return Export(plan_jobs(pairing, checkpoints, output_dtype), WHAT, Inputs(checkpoints), pairing)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("native", [False, True], ids=["hub-names", "native-names"])
def test_vlm_export_has_the_vlms_names_and_equals_the_live_merge(tmp_path: Path, native: bool, tied: bool) -> None:
    export = make_export(tmp_path, native=native, tied=tied)
    out = tmp_path / "merged"
    export_vlm(export, out, {"point": "abc"})
    before, after = stored(tmp_path / "vlm"), stored(out)
    assert before.keys() == after.keys()
    for name in export.pairing.copied:
        assert torch.equal(before[name], after[name]), name
    assert len(list(out.glob("*.safetensors"))) > 1, "a sharded vlm stays sharded"
    assert (out / "chat_template.jinja").read_text() == "vlm template"
    assert json.loads((out / "config.json").read_text()) == json.loads((tmp_path / "vlm/config.json").read_text())
    assert json.loads((out / "mergelab.json").read_text())["point"] == "abc"

    config = tower_config(out, has_head=not tied)
    loaded = build_tower(config, "cpu", torch.float32, out)  # refuses missing and unexpected weights
    live = build_tower(config, "cpu", torch.float32)
    stream(export.jobs, WHAT, export.inputs, LiveTarget(live.tensors()))
    assert hash_live(loaded.tensors()) == hash_live(live.tensors())
    untouched = build_tower(config, "cpu", torch.float32, tmp_path / "vlm")
    assert hash_live(untouched.tensors()) != hash_live(live.tensors())


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_text_export_loads_alone_with_bases_tokenizer(tmp_path: Path, tied: bool) -> None:
    export = make_export(tmp_path, "bfloat16", tied=tied)
    out = tmp_path / "text"
    export_text(export, out, {}, tower_config(tmp_path / "vlm", has_head=not tied).to_dict())
    live = load_text_model(out, "cpu", torch.bfloat16)
    assert hash_live(live.tensors()) == fingerprint_checkpoint(open_checkpoint(out))
    config = AutoConfig.from_pretrained(out)
    assert config.model_type == "llama"
    assert config.tie_word_embeddings is tied
    assert config.dtype == torch.bfloat16
    assert ("lm_head.weight" in stored(out)) is not tied
    assert (out / "chat_template.jinja").read_text() == "base template"
    assert (out / "tokenizer.json").read_bytes() == (tmp_path / "base/tokenizer.json").read_bytes()


def test_forced_dtype_is_in_the_files_and_in_every_config(tmp_path: Path) -> None:
    export = make_export(tmp_path, "bfloat16")
    out = tmp_path / "merged"
    export.vlm.config["text_config"]["dtype"] = "float32"
    export_vlm(export, out, {}, dtype="bfloat16")
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == config["text_config"]["dtype"] == "bfloat16"
    tower = {job.tensor.stored["vlm"] for job in export.jobs}
    assert {t.dtype for name, t in stored(out).items() if name in tower} == {torch.bfloat16}


def test_folder_that_holds_something_is_refused_and_left_alone(tmp_path: Path) -> None:
    export = make_export(tmp_path)
    out = tmp_path / "merged"
    out.mkdir()
    (out / "thesis.tex").write_text("mine")
    with pytest.raises(OutputFolderError, match=r"thesis\.tex"):
        export_vlm(export, out, {})
    assert [path.name for path in out.iterdir()] == ["thesis.tex"]
    assert not list(tmp_path.glob("*.partial"))


def test_text_export_of_a_float64_tower_says_so(tmp_path: Path) -> None:
    base = tiny_llama(tmp_path / "base")
    tiny_llava(tmp_path / "vlm", start=base, dtype=torch.float64)
    checkpoints = {role: open_checkpoint(tmp_path / role) for role in ("base", "vlm")}
    pairing = pair_checkpoints(checkpoints)
    jobs = plan_jobs(pairing, checkpoints)
    copied = operation("copy", {"of": "vlm"}, None)
    config = tower_config(tmp_path / "vlm", has_head=True).to_dict()
    export_text(Export(jobs, copied, Inputs(checkpoints), pairing), tmp_path / "out", {}, config)
    assert AutoConfig.from_pretrained(tmp_path / "out").dtype == torch.float64


def test_stale_lock_is_not_copied_and_odd_names_are_refused(tmp_path: Path) -> None:
    export = make_export(tmp_path)
    (tmp_path / "vlm" / atomic.LOCK).write_text("process 1 on another machine")
    export_vlm(export, tmp_path / "merged", {})
    assert not (tmp_path / "merged" / atomic.LOCK).exists()
    (tmp_path / "vlm" / "notes\n.txt").write_text("mine")
    with pytest.raises(DamagedFileError, match=r"expected plain file names, found 'notes\\n\.txt'"):
        export_vlm(export, tmp_path / "again", {})
    assert not (tmp_path / "again").exists()
