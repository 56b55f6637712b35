"""Thousands of damaged folders: each is refused in one clear message, or read as safetensors itself reads it."""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors
import tokenizers
import torch

from mergelab.checkpoints.headers import Checkpoint, open_checkpoint
from mergelab.checkpoints.reader import TORCH_DTYPES, read_tensor, torch_dtype
from mergelab.engine.inputs import Inputs
from mergelab.engine.plan import operation, plan_jobs
from mergelab.engine.stream import stream
from mergelab.engine.targets import LiveTarget
from mergelab.errors import DamagedFileError, MergelabError
from mergelab.towers.pairing import Pairing, pair_checkpoints
from tests.builders import IMAGE_TOKEN, WORDS, hand_made, text_tensors, write_tokenizer
from tests.checkpoints import mutations

MOST_SECONDS = 10
MOST_MEMORY_GROWTH = 400_000_000
LONGEST_MESSAGE = 20_000
MERGED_EVERY = 4
HALF = operation("linear", {"weights": {"base": 0.5, "vlm": 0.5}}, None)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base in one file, the same one pickled, and a vlm in two shards whose tokenizer has another order."""
    root = tmp_path_factory.mktemp("pristine")
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "rope_theta": 1e4}
    base = text_tensors(num_layers=1, rows=len(WORDS))
    hand_made(root / "base", base, config={"model_type": "qwen3", **sizes}, tokens=WORDS)
    shutil.copytree(root / "base", root / "pickled")
    (root / "pickled" / "model.safetensors").unlink()
    torch.save(base, root / "pickled" / "pytorch_model.bin")
    tower = text_tensors("language_model.model.", "language_model.lm_head.", num_layers=1, rows=len(WORDS) + 4, seed=1)
    items = [*tower.items(), ("vision_tower.patch.weight", torch.randn(4, 4)), ("image_newline", torch.randn(8))]
    settings = {"model_type": "llava", "text_config": {"model_type": "qwen3", **sizes}, "tie_word_embeddings": False}
    hand_made(root / "vlm", dict(items[::2]), dict(items[1::2]), config=settings)
    write_tokenizer(root / "vlm", (IMAGE_TOKEN, *WORDS))
    return root


class TooSlow(BaseException):
    """No error of ours, and none that anything catches."""


@contextmanager
def bounded() -> Iterator[None]:
    """Fail when what is done here hangs or takes a lot of memory."""

    def stop(*_: object) -> None:
        raise TooSlow

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    old = signal.signal(signal.SIGALRM, stop)
    signal.alarm(MOST_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MOST_MEMORY_GROWTH


class Copies:
    """The pristine folders once more, of which one file at a time is damaged and then put back."""

    def __init__(self, pristine: Path, root: Path) -> None:
        self.root = root
        self.content = {
            folder.name: {path.name: path.read_bytes() for path in folder.iterdir()} for folder in pristine.iterdir()
        }
        for folder in pristine.iterdir():
            shutil.copytree(folder, root / folder.name)

    @contextmanager
    def damaged(self, seed: int) -> Iterator[tuple[Path, Path, str]]:
        """Yield base and vlm, one of them damaged, and the place of the file that was hit."""
        rng = random.Random(seed)
        base = "pickled" if rng.random() < 0.05 else "base"
        role = base if base == "pickled" or rng.random() < 0.35 else "vlm"
        mutate = rng.choice(mutations.PICKLED if base == "pickled" else mutations.SAFETENSORS)
        path = self.root / role / mutate(rng, self.root / role)
        try:
            yield self.root / base, self.root / "vlm", path
        finally:
            if path.is_dir() and not path.is_symlink():
                path.rmdir()
            elif path.is_symlink() or not path.is_file():
                path.unlink(missing_ok=True)
            path.write_bytes(self.content[role][path.name])


def as_safetensors_reads(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Return all tensors of the weight files as the format's own library (or torch) reads them."""
    found: dict[str, torch.Tensor] = {}
    for shard in checkpoint.shards:
        if shard.suffix == ".bin":
            found |= torch.load(shard, weights_only=True)
            continue
        for name, entry in safetensors.deserialize(shard.read_bytes()):
            dtype = torch_dtype(entry["dtype"])  # refuses those that torch cannot hold
            flat = torch.frombuffer(entry["data"], dtype=dtype) if entry["data"] else torch.empty(0, dtype=dtype)
            found[name] = flat.reshape(entry["shape"])
    return found


def check_read(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Compare everything that a checkpoint says it holds with the other reader, bit for bit."""
    theirs = as_safetensors_reads(checkpoint)
    assert theirs.keys() == checkpoint.tensors.keys()
    for name, tensor in checkpoint.tensors.items():
        ours = read_tensor(tensor)
        assert ours.dtype == theirs[name].dtype and ours.shape == theirs[name].shape, name
        raw = [one.contiguous().reshape(-1).view(torch.uint8) for one in (ours, theirs[name])]
        assert torch.equal(*raw), name
    return theirs


def check_merge(pairing: Pairing, checkpoints: Mapping[str, Checkpoint], read: Mapping[str, Any]) -> None:
    """Compare a merge with one computed from what the other reader read."""
    jobs = plan_jobs(pairing, checkpoints)
    live = {job.tensor.name: torch.zeros(job.tensor.shape, dtype=TORCH_DTYPES[job.dtype]) for job in jobs}
    stream(jobs, HALF, Inputs(checkpoints), LiveTarget(live))
    for job in jobs:
        base, vlm = (read[role][job.tensor.stored[role]].float() for role in ("base", "vlm"))
        expected = vlm.clone()
        rows = job.tensor.rows
        if rows is None:
            expected = 0.5 * base + 0.5 * vlm
        else:
            check_tokens(checkpoints, rows.rows)
            mine, theirs = list(rows.rows["base"]), list(rows.rows["vlm"])
            expected[theirs] = 0.5 * base[mine] + 0.5 * vlm[theirs]
        assert torch.equal(live[job.tensor.name], expected.to(TORCH_DTYPES[job.dtype])), job.tensor.name


def check_tokens(checkpoints: Mapping[str, Checkpoint], rows: Mapping[str, Sequence[int]]) -> None:
    """Compare the pairing of rows with the tokenizers library, where it takes the files as they are."""
    loaded = {}
    for role, checkpoint in checkpoints.items():
        path = checkpoint.folder / "tokenizer.json"
        try:
            loaded[role] = tokenizers.Tokenizer.from_file(str(path))
        except Exception:  # the library refuses more than we have to
            return
        stated = [(entry["content"], entry["id"]) for entry in json.loads(path.read_bytes()).get("added_tokens") or ()]
        vocabulary = loaded[role].get_vocab()
        if any(vocabulary.get(content) != row for content, row in stated) or len({*vocabulary.values()}) < len(
            vocabulary
        ):
            return  # it gives tokens other rows than the file does, or several tokens one row
    for mine, theirs in zip(rows["base"], rows["vlm"], strict=True):
        assert loaded["base"].id_to_token(mine) == loaded["vlm"].id_to_token(theirs), (mine, theirs)


def trial(copies: Copies, seed: int) -> str:
    """Damage a pair, try to merge it, and return what became of it."""
    stage = "open"
    with copies.damaged(seed) as (base, vlm, hit):
        try:
            with bounded():
                checkpoints = {"base": open_checkpoint(base), "vlm": open_checkpoint(vlm)}
            stage = "read"
            read = {name: check_read(checkpoint) for name, checkpoint in checkpoints.items()}
            stage = "pair"
            with bounded():
                pairing = pair_checkpoints(checkpoints)
            stage = "merge"
            if seed % MERGED_EVERY == 0:
                check_merge(pairing, checkpoints, read)
        except MergelabError as error:
            message = str(error)
            message.encode("utf-8")
            assert len(message) < LONGEST_MESSAGE
            # What is wrong with values alone is named by tensor.
            assert str(hit.parent) in message or hit.name in message or stage in ("read", "merge"), message
            assert stage != "open" or isinstance(error, DamagedFileError)
            return stage
    return "merged"


def many(pristine: Path, seeds: range) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        copies = Copies(pristine, Path(folder))
        for seed in seeds:
            try:
                outcomes[trial(copies, seed)] += 1
            except BaseException as error:
                raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    return outcomes


def test_damaged_folders_are_refused_or_read_right(pristine: Path) -> None:
    outcomes = many(pristine, range(2000))
    assert min(outcomes[what] for what in ("open", "pair", "merged")) > 200, outcomes


@pytest.mark.slow
def test_many_more_damaged_folders(pristine: Path) -> None:
    outcomes = many(pristine, range(10_000, 60_000))
    assert outcomes["open"] > 500, outcomes


def test_undamaged_folders_merge(pristine: Path, tmp_path: Path) -> None:
    checkpoints = {role: open_checkpoint(pristine / role) for role in ("base", "vlm")}
    read = {name: check_read(checkpoint) for name, checkpoint in checkpoints.items()}
    pairing = pair_checkpoints(checkpoints)
    assert pairing.tensors[0].rows is not None
    check_merge(pairing, checkpoints, read)
