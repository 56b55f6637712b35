"""The fault cards about files, names, vocabularies, tying, dtypes and interruption, and the tests that close them.

Each card is a small input on which merging tools fail or lie. ``CARDS`` names the tests; those that belong to no room
alone stand below, on the fixtures of the cards: L, a text LLM 8 wide with 12 layers, and V, the vlm around it, in three
shards between which layers are torn.
"""

from __future__ import annotations

import ast
import json
import os
import resource
import signal
import struct
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from mergelab.checkpoints.headers import open_checkpoint
from mergelab.cli import main
from tests.builders import WORDS, hand_made, text_tensors, write_tokenizer

TESTS = Path(__file__).parent.parent
HERE = "cli/test_fault_cards.py"

CARDS = {
    "F11 prefix map": (
        f"{HERE}::test_f11_pair_needs_no_map",
        "cli/test_check.py::test_check_prints_what_fits",
        "towers/test_layouts.py::test_model_saved_without_its_head_class_is_refused",
        "towers/test_layouts.py::test_no_tower_is_refused_with_what_was_tried",
    ),
    "F12 dropped tensor": (
        f"{HERE}::test_f12_tensor_that_one_side_lacks_is_refused",
        "towers/test_pairing.py::test_tensor_that_the_vlm_lacks_is_refused",
        "towers/test_pairing.py::test_tensor_that_the_base_lacks_is_refused",
        "engine/test_export.py::test_vlm_export_has_the_vlms_names_and_equals_the_live_merge",
    ),
    "F13 tied head": (
        f"{HERE}::test_f13_output_ties_as_the_vlm_and_has_its_size",
        "towers/test_pairing.py::test_tied_base_stands_in_with_its_embedding",
        "towers/test_pairing.py::test_stray_head_under_tie_flags_counts_as_untied",
        "towers/test_pairing.py::test_flags_that_disagree_are_noted",
        "engine/test_export.py::test_text_export_loads_alone_with_bases_tokenizer",
    ),
    "F14 vocabulary": (
        f"{HERE}::test_f14_rows_are_paired_by_token",
        f"{HERE}::test_f14_other_rows_without_tokenizers_are_refused",
        "towers/test_vocabulary.py::test_padding_rows_are_copied",
    ),
    "F15 missing or truncated shard": (
        f"{HERE}::test_f15_damaged_shards_are_named_before_any_work",
        "checkpoints/test_fuzz.py::test_damaged_folders_are_refused_or_read_right",
    ),
    "F16 kill mid-run": (
        "engine/test_kill.py::test_kill_at_any_step",
        "checkpoints/test_writer.py::test_killed_writer_leaves_no_result_and_the_same_command_succeeds",
    ),
    "F19 integer and quantized tensors": (
        f"{HERE}::test_f19_integers_are_copied_if_equal",
        f"{HERE}::test_f19_quantised_models_are_refused_with_what_to_use",
        "towers/test_pairing.py::test_packed_tensors_are_refused_by_name",
    ),
    "F20 dtype in config": (
        f"{HERE}::test_f20_file_and_config_have_the_vlms_dtype",
        "engine/test_export.py::test_forced_dtype_is_in_the_files_and_in_every_config",
    ),
    "F21 sidecar files": (f"{HERE}::test_f21_every_side_file_of_the_vlm_is_there",),
    "F22 no space, write error": (
        f"{HERE}::test_f22_disk_that_refuses_in_the_middle_is_named_and_left_clean",
        "checkpoints/test_writer.py::test_disk_space_is_checked_first",
        "checkpoints/test_writer.py::test_disk_that_fills_up_is_named_and_leaves_nothing",
    ),
}

SIZES = {"hidden_size": 8, "num_hidden_layers": 12, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4}
VISION = {"model.visual.blocks.0.attn.qkv.weight": (24, 8), "model.visual.merger.linear_fc1.weight": (8, 8)}
Tensors = dict[str, torch.Tensor]


@pytest.mark.parametrize("card", CARDS)
def test_card_is_closed(card: str) -> None:
    for place in CARDS[card]:
        path, _, name = place.partition("::")
        found = {
            node.name for node in ast.walk(ast.parse((TESTS / path).read_text())) if isinstance(node, ast.FunctionDef)
        }
        assert name in found, f"{card}: {place} is gone"


def in_three(tensors: Tensors) -> list[Tensors]:
    """Three shards with every layer in all of them."""
    items = list(tensors.items())
    return [dict(items[start::3]) for start in range(3)]


def text_model(folder: Path, *, tokens: tuple[str, ...] | None = None, **changes: Any) -> Path:
    """L; ``changes`` go to ``text_tensors``, tensors under their names to the model."""
    extra = {name: changes.pop(name) for name in list(changes) if "." in name}
    config = {"model_type": "qwen3", "dtype": "bfloat16", **SIZES, **changes.pop("config", {})}
    return hand_made(folder, *in_three(text_tensors(num_layers=12, **changes) | extra), config=config, tokens=tokens)


def vision_model(folder: Path, *, tokens: tuple[str, ...] | None = None, **changes: Any) -> Path:
    """V."""
    extra = {name: changes.pop(name) for name in list(changes) if "." in name}
    dtype = changes.get("dtype", torch.bfloat16)
    tower = text_tensors("model.language_model.", num_layers=12, **{"seed": 1, **changes})
    vision = {name: torch.randn(shape).to(dtype) for name, shape in VISION.items()}
    code = str(dtype).removeprefix("torch.")
    config = {"model_type": "qwen3_vl", "dtype": code, "text_config": {"dtype": code, **SIZES}}
    return hand_made(folder, *in_three(tower | vision | extra), config=config, tokens=tokens)


def merge(root: Path, *options: object) -> Result:
    """Merge ``root/base`` and ``root/vlm`` half and half into ``root/out``."""
    recipe = root / "recipe.yaml"
    recipe.write_text("{name: r, pair: bench, method: linear, parameters: {weights: {base: 0.5, vlm: 0.5}}}")
    models = ("--base", root / "base", "--vlm", root / "vlm", "--out", root / "out", "--accept-unrelated")
    return CliRunner().invoke(main, [str(part) for part in ("merge", recipe, *models, *options)])


def stored(folder: Path) -> Tensors:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def half(base: torch.Tensor, vlm: torch.Tensor) -> torch.Tensor:
    return (0.5 * base.float() + 0.5 * vlm.float()).to(vlm.dtype)


def refused(root: Path, code: int, *words: str) -> None:
    done = merge(root)
    assert done.exit_code == code, done.output
    assert all(word in done.stderr for word in words), done.stderr
    assert not (root / "out").exists() and not (root / ".out.partial").exists()


def test_f11_pair_needs_no_map(tmp_path: Path) -> None:
    text_model(tmp_path / "base")
    vision_model(tmp_path / "vlm")
    done = merge(tmp_path)
    assert done.exit_code == 0, done.output
    base, vlm, merged = (stored(tmp_path / name) for name in ("base", "vlm", "out"))
    assert merged.keys() == vlm.keys()
    for name, tensor in merged.items():
        partner = base.get(name.replace("model.language_model.", "model."))
        assert torch.equal(tensor, vlm[name] if partner is None else half(partner, vlm[name])), name


@pytest.mark.parametrize(
    "name", ["model.layers.0.extra.bias", "model.layers.1.linear_attn.A_log", "model.layers.3.self_attn.r_norm.weight"]
)
@pytest.mark.parametrize("role", ["base", "vlm"])
def test_f12_tensor_that_one_side_lacks_is_refused(tmp_path: Path, role: str, name: str) -> None:
    in_vlm = name.replace("model.", "model.language_model.", 1)
    text_model(tmp_path / "base", **({name: torch.ones(4)} if role == "base" else {}))
    vision_model(tmp_path / "vlm", **({in_vlm: torch.ones(4)} if role == "vlm" else {}))
    refused(tmp_path, 4, name)


@pytest.mark.parametrize("base_head", [None, "lm_head."], ids=["tied-base", "untied-base"])
def test_f13_output_ties_as_the_vlm_and_has_its_size(tmp_path: Path, base_head: str | None) -> None:
    text_model(tmp_path / "base", head=base_head, config={"tie_word_embeddings": base_head is None})
    vision_model(tmp_path / "vlm")
    done = merge(tmp_path)
    assert done.exit_code == 0, done.output
    base, vlm, merged = (stored(tmp_path / name) for name in ("base", "vlm", "out"))
    assert {n: t.shape for n, t in merged.items()} == {n: t.shape for n, t in vlm.items()}
    head = base.get("lm_head.weight", base["model.embed_tokens.weight"])
    assert torch.equal(merged["lm_head.weight"], half(head, vlm["lm_head.weight"]))
    assert json.loads((tmp_path / "out/config.json").read_text()) == json.loads(
        (tmp_path / "vlm/config.json").read_text()
    )


def test_f14_rows_are_paired_by_token(tmp_path: Path) -> None:
    """Base 22 rows; the vlm has one new token in front, one behind, and is padded to 32 rows."""
    tokens = ("<image>", *WORDS, "<video>")
    text_model(tmp_path / "base", rows=len(WORDS), tokens=WORDS)
    vision_model(tmp_path / "vlm", rows=32, tokens=tokens)
    done = merge(tmp_path)
    assert done.exit_code == 0, done.output
    base, vlm, merged = (stored(tmp_path / name) for name in ("base", "vlm", "out"))
    for ours, theirs in (
        ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight"),
        ("lm_head.weight",) * 2,
    ):
        expected = vlm[theirs].clone()
        expected[1:23] = half(base[ours], vlm[theirs][1:23])
        assert torch.equal(merged[theirs], expected), theirs
    said = json.loads(
        CliRunner().invoke(main, ["check", "--base", f"{tmp_path}/base", "--vlm", f"{tmp_path}/vlm", "--json"]).stdout
    )
    counts = {"by": "token", "shared": 22, "vlm_only": 2, "base_only": 0, "padding": 8}
    assert said["rows"]["lm_head.weight"] == counts


def test_f14_other_rows_without_tokenizers_are_refused(tmp_path: Path) -> None:
    text_model(tmp_path / "base", rows=16)
    vision_model(tmp_path / "vlm", rows=18)
    refused(tmp_path, 4, "row counts differ (base 16, vlm 18)")


def lost(folder: Path) -> str:
    (folder / "model-00003-of-00003.safetensors").unlink()
    return "model-00003-of-00003.safetensors: missing"


def cut(folder: Path) -> str:
    path = folder / "model-00002-of-00003.safetensors"
    os.truncate(path, path.stat().st_size - 7)
    return "model-00002-of-00003.safetensors: is 7 bytes too short"


def misplaced(folder: Path) -> str:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = next(name for name, file in index["weight_map"].items() if "00001" in file)
    index["weight_map"][name] = "model-00002-of-00003.safetensors"
    path.write_text(json.dumps(index))
    return f"{name}: the index says model-00002-of-00003.safetensors, which does not hold it"


def doubled(folder: Path) -> str:
    first, second = (folder / f"model-0000{number}-of-00003.safetensors" for number in (1, 2))
    second.write_bytes(first.read_bytes())
    return "lies in model-00001-of-00003.safetensors and in model-00002-of-00003.safetensors"


def emptied(folder: Path) -> str:
    path = folder / "model-00001-of-00003.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[: 8 + struct.unpack("<Q", raw[:8])[0]])
    return "too short: the header describes"


@pytest.mark.parametrize("harm", [lost, cut, misplaced, doubled, emptied])
@pytest.mark.parametrize("role", ["base", "vlm"])
def test_f15_damaged_shards_are_named_before_any_work(tmp_path: Path, role: str, harm: Callable[[Path], str]) -> None:
    text_model(tmp_path / "base")
    vision_model(tmp_path / "vlm")
    words = harm(tmp_path / role)
    refused(tmp_path, 5, str(tmp_path / role), words)


@pytest.mark.parametrize("equal", [True, False])
def test_f19_integers_are_copied_if_equal(tmp_path: Path, equal: bool) -> None:
    name, stored_as = "model.layers.0.self_attn.table", "model.language_model.layers.0.self_attn.table"
    text_model(tmp_path / "base", **{name: torch.arange(8) + (0 if equal else 1)})
    vision_model(tmp_path / "vlm", **{stored_as: torch.arange(8)})
    if not equal:
        refused(tmp_path, 4, stored_as, "integers cannot be merged")
        return
    done = merge(tmp_path)
    assert done.exit_code == 0, done.output
    assert torch.equal(stored(tmp_path / "out")[stored_as], torch.arange(8))


@pytest.mark.parametrize(
    ("method", "packed", "advice"),
    [
        ("awq", {"qweight": torch.zeros(8, 1, dtype=torch.int32)}, "use the checkpoint that it was quantised from"),
        ("gptq", {"qweight": torch.zeros(1, 8, dtype=torch.int32)}, "use the checkpoint that it was quantised from"),
        (
            "bitsandbytes",
            {"weight": torch.zeros(32, 1, dtype=torch.uint8)},
            "use the checkpoint that it was quantised from",
        ),
        ("fp8", {"weight": torch.zeros(8, 8).to(torch.float8_e4m3fn)}, "use its BF16 repository"),
        ("mxfp4", {"weight_blocks": torch.zeros(8, 4, dtype=torch.uint8)}, "Mxfp4Config(dequantize=True)"),
    ],
)
@pytest.mark.parametrize("named", [True, False], ids=["in-config", "by-tensor"])
def test_f19_quantised_models_are_refused_with_what_to_use(
    tmp_path: Path, method: str, packed: Mapping[str, torch.Tensor], advice: str, named: bool
) -> None:
    vision_model(tmp_path / "vlm")
    ((leaf, tensor),) = packed.items()
    name = f"model.layers.0.mlp.down_proj.{leaf}"
    settings = {"quantization_config": {"quant_method": method}} if named else {}
    tensors = text_tensors(num_layers=12)
    del tensors["model.layers.0.mlp.down_proj.weight"]
    hand_made(tmp_path / "base", tensors | {name: tensor}, config={"model_type": "qwen3", **SIZES, **settings})
    if named:
        refused(tmp_path, 5, str(tmp_path / "base"), f"quantization_config {method!r}", advice)
    else:
        refused(tmp_path, 4, name)


def test_f19_gguf_is_refused_with_what_to_use(tmp_path: Path) -> None:
    vision_model(tmp_path / "vlm")
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text("{}")
    (tmp_path / "base" / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    refused(tmp_path, 5, "model-Q4_K_M.gguf is a GGUF file", "use the original safetensors checkpoint")


def test_f20_file_and_config_have_the_vlms_dtype(tmp_path: Path) -> None:
    text_model(tmp_path / "base")
    vision_model(tmp_path / "vlm", dtype=torch.float32)
    done = merge(tmp_path)
    assert done.exit_code == 0, done.output
    assert {header.dtype for header in open_checkpoint(tmp_path / "out").tensors.values()} == {"F32"}
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["dtype"] == config["text_config"]["dtype"] == "float32"


def test_f21_every_side_file_of_the_vlm_is_there(tmp_path: Path) -> None:
    files = {
        "chat_template.jinja": "{{ messages }}",
        "merges.txt": "#version: 0.2",
        "generation_config.json": '{"eos_token_id": [1, 2]}',
        "preprocessor_config.json": "{}",
        "processor_config.json": "{}",
        "modeling_own.py": "raise SystemExit('never run')",
        "tokenizer.model": "pieces",
        "LICENSE": "terms",
    }
    text_model(tmp_path / "base", tokens=WORDS, rows=len(WORDS))
    vlm = vision_model(tmp_path / "vlm", rows=len(WORDS))
    write_tokenizer(vlm, WORDS)
    for name, text in files.items():
        (vlm / name).write_text(text)
    (tmp_path / "base" / "chat_template.jinja").write_text("base's")
    done = merge(tmp_path)
    assert done.exit_code == 0, done.output
    for name in (*files, "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (vlm / name).read_bytes(), name


def test_f22_disk_that_refuses_in_the_middle_is_named_and_left_clean(tmp_path: Path) -> None:
    """The limit on a file's size stands for a full disk: the kernel itself refuses, in the middle of the merge."""
    text_model(tmp_path / "base")
    vision_model(tmp_path / "vlm")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads; none of them is used here
        child = os.fork()
    if not child:
        code = 99
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (3000, resource.RLIM_INFINITY))
            done = merge(tmp_path)
            code = done.exit_code if "out: cannot be written: File too large" in done.stderr else 98
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 6
    assert not (tmp_path / "out").exists() and not (tmp_path / ".out.partial").exists()
    assert merge(tmp_path).exit_code == 0
