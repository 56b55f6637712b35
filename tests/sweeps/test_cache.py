"""Parents are graded once for all recipes on the same models, and never for others."""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from mergelab.cli import main
from mergelab.records import PointFolder, read_run
from mergelab.sweeps import worker
from mergelab.sweeps.cache import Cached, CacheKey, ResultCache, hash_tokenizers
from tests.builders import tiny_llama, tiny_llava

KEY = CacheKey("w", "c", "t", {"stage": "sink"}, "cpu")
RESULT = Cached("h", {"strict": 50.0, "samples": [{"response": "é"}]})


@dataclasses.dataclass
class Lab:
    root: Path
    graded: list[str] = dataclasses.field(default_factory=list)

    def run(self, out: str, *more: str, recipe: str = "one") -> Result:
        self.graded.clear()
        parents = [part for role in ("base", "vlm", "ancestor") for part in (f"--{role}", str(self.root / role))]
        arguments = ["run", str(self.root / f"{recipe}.yaml"), *parents, "--out", str(self.root / out)]
        result = CliRunner().invoke(main, [*arguments, "--device", "cpu", *more])
        assert result.exit_code == 0, (result.output, result.exception)
        return result

    def parents(self, out: str) -> dict[str, PointFolder]:
        points = read_run(self.root / out).points
        return {point.role: point for point in points if point.role in ("ancestor", "base", "vlm")}

    def cached(self, out: str) -> set[str]:
        found = set()
        for role, point in self.parents(out).items():
            marks = {(point.sink or {}).get("from_cache"), point.tasks["ifeval"].metrics.get("from_cache")}
            assert len(marks) == 1
            found |= {role} if marks == {True} else set()
        return found


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    monkeypatch.setenv("MERGELAB_CACHE_DIR", str(tmp_path / "cache"))
    ancestor = tiny_llama(tmp_path / "ancestor", seed=0)
    base = tiny_llama(tmp_path / "base", seed=1, start=ancestor, noise=1.0)
    tiny_llava(tmp_path / "vlm", seed=2, start=base, noise=1.0)
    row = {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    lines = [{"key": n, "prompt": prompt, **row} for n, prompt in enumerate(["a cat ?", "red blue"])]
    (tmp_path / "ifeval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, method in (("one", "task_arithmetic"), ("two", "ties")):
        (tmp_path / f"{name}.yaml").write_text(
            f"name: {name}\npair: bench\ncontrols: []\nmethod: {method}\n"
            "evals: {tasks: [ifeval], data: {ifeval: ifeval.jsonl}, max_gen_toks: {ifeval: 6}, batch_size: 2}\n"
        )
    made = Lab(tmp_path)
    real = worker.Worker._grade

    def grade(self: worker.Worker, point: Any, live: Any, task: Any) -> Any:
        made.graded.append(point.spec.role)
        return real(self, point, live, task)

    monkeypatch.setattr(worker.Worker, "_grade", grade)
    yield made


def plain(point: PointFolder) -> dict[str, Any]:
    stages = {"sink": dict(point.sink or {}), "metrics": dict(point.tasks["ifeval"].metrics)}
    for stage in stages.values():
        stage.pop("from_cache", None)
    return {"point": point.point, "samples": point.tasks["ifeval"].samples, **stages}


def test_second_recipe_grades_no_parent_and_has_equal_records(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.run("first")
    assert sorted(lab.graded) == ["ancestor", "base", "merge", "vlm"]
    assert lab.cached("first") == set()
    monkeypatch.setattr(worker, "load_text_parent", None)  # not even loaded
    result = lab.run("second", recipe="two")
    assert lab.graded == ["merge"]
    assert "6 results of parents are those of an earlier run" in result.stderr
    assert lab.cached("second") == {"ancestor", "base", "vlm"}
    first, second = lab.parents("first"), lab.parents("second")
    assert {role: plain(point) for role, point in first.items()} == {
        role: plain(point) for role, point in second.items()
    }


def test_no_cache_neither_reads_nor_writes(lab: Lab) -> None:
    lab.run("first", "--no-cache")
    assert not (lab.root / "cache" / "results").exists()
    lab.run("second")
    lab.run("third", "--no-cache")
    assert sorted(lab.graded) == ["ancestor", "base", "merge", "vlm"]
    assert lab.cached("third") == set()


def test_other_weights_configs_tokenizers_and_budgets_share_nothing(lab: Lab) -> None:
    lab.run("first")
    moved = tiny_llama(lab.root / "moved", seed=7, start=lab.root / "base", noise=0.2)
    shutil.rmtree(lab.root / "base")
    moved.rename(lab.root / "base")
    lab.run("weights")
    assert lab.cached("weights") == {"ancestor", "vlm"}
    first, other = lab.parents("first")["base"], lab.parents("weights")["base"]
    assert first.point["weights_hash"] != other.point["weights_hash"]
    assert first.tasks["ifeval"].samples != other.tasks["ifeval"].samples

    config = lab.root / "base" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "rms_norm_eps": 0.5}))
    lab.run("config")
    assert lab.cached("config") == {"ancestor", "vlm"}

    budget = lab.run("budget", "--set", "evals.max_gen_toks.ifeval=3")
    assert "base" in lab.graded and "3 results of parents" in budget.stderr, "the sinks alone are the same"

    tokenizer = lab.root / "base" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    lab.run("tokenizer")
    assert lab.cached("tokenizer") == set()


def test_lost_stage_is_filled_from_the_cache_beside_a_fresh_one(lab: Lab) -> None:
    lab.run("first")
    base = lab.parents("first")["base"]
    folder = lab.root / "first" / "points" / base.point_id
    (folder / "sink.json").unlink()
    lab.run("first", "--set", "evals.max_gen_toks.ifeval=3")
    again = lab.parents("first")["base"]
    assert again.sink is not None and again.sink.pop("from_cache") is True
    assert again.sink == base.sink
    assert "from_cache" not in again.tasks["ifeval"].metrics


@pytest.mark.parametrize("harm", ["torn", "edited", "another key"])
def test_entry_that_is_not_what_was_written_counts_as_absent(tmp_path: Path, harm: str) -> None:
    cache = ResultCache(tmp_path)
    assert cache.read(KEY) is None
    cache.write(KEY, RESULT)
    assert cache.read(KEY) == RESULT
    (path,) = tmp_path.rglob("*.json")
    text = path.read_text()
    if harm == "torn":
        path.write_text(text[: len(text) // 2])
    elif harm == "edited":
        path.write_text(text.replace("50.0", "51.0"))
    else:
        other = dataclasses.replace(KEY, weights="other")
        target = tmp_path / other.digest()[:2] / f"{other.digest()}.json"
        target.parent.mkdir(exist_ok=True)
        target.write_text(text)
        assert cache.read(other) is None
        return
    assert cache.read(KEY) is None
    cache.write(KEY, RESULT)
    assert cache.read(KEY) == RESULT


def test_every_part_is_in_the_key_and_none_may_be_empty() -> None:
    for name in ("weights", "config", "tokenizer", "machine"):
        assert dataclasses.replace(KEY, **{name: "other"}).digest() != KEY.digest()
        with pytest.raises(ValueError, match=name):
            dataclasses.replace(KEY, **{name: ""})
    assert dataclasses.replace(KEY, stage={"stage": "other"}).digest() != KEY.digest()
    with pytest.raises(ValueError, match="stage"):
        dataclasses.replace(KEY, stage={})


def test_cache_that_cannot_be_written_costs_only_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = ResultCache(tmp_path / "file")
    cache.write(KEY, RESULT)
    assert cache.read(KEY) is None


def test_tokenizer_files_are_told_apart_by_content_and_folder(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder, text in ((one, "a"), (two, "b")):
        folder.mkdir()
        (folder / "merges.txt").write_text(text)
        (folder / "README.md").write_text(text)
    hashes = {hash_tokenizers([one, two]), hash_tokenizers([two, one]), hash_tokenizers([one]), hash_tokenizers([two])}
    assert len(hashes) == 4
    before = hash_tokenizers([one])
    (one / "README.md").write_text("c")
    assert hash_tokenizers([one]) == before
