"""Picture tasks through a real processor: equal to lm-eval's hf-multimodal, pictures by content, faults named."""

import base64
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, Features, Image, List, Value
from lm_eval import simple_evaluate
from lm_eval.api.task import ConfigurableTask
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from transformers import AutoProcessor

from mergelab.checkpoints.headers import open_checkpoint
from mergelab.errors import DamagedFileError, MachineError, RecipeError
from mergelab.evals import loading, resources
from mergelab.evals.guessing import tell_guesses
from mergelab.evals.pictures import Picture, attach
from mergelab.evals.quiet import quiet_harness
from mergelab.evals.request import EvalRequest
from mergelab.evals.suite import TaskResult, load_suite
from mergelab.evals.tasks import TASKS, task_path
from mergelab.sweeps.processor import load_processor
from mergelab.sweeps.single import evaluate_model, write_documents
from tests.evals.picture_models import (
    PICTURE_TEMPLATE,
    chart_documents,
    mmmu_documents,
    mmmu_row,
    picture,
    seeing_llava,
    seeing_qwen,
    tiny_base,
    write_processor,
)

BUDGET, BATCH = 8, 4


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return seeing_llava(tmp_path_factory.mktemp("seeing") / "vlm", seed=6)


def ask(vlm: Path, task: str, data: Path, protocol: str = "paper-instruct-v1") -> TaskResult:
    request = EvalRequest(protocol, tasks=(task,), data={task: data}, max_gen_toks={task: BUDGET}, batch_size=BATCH)
    return evaluate_model(str(vlm), request, "cpu")[0]


def plain(vlm: Path, yaml: Path, rows: list[dict[str, Any]], features: Features, chat: bool = True) -> dict[str, Any]:
    """Return what lm-eval itself says of a model folder: its own model class, processor, task and decoded pictures."""
    config = {key: value for key, value in load_yaml(yaml).items() if key not in ("dataset_path", "dataset_name")}
    split = config.get("test_split") or config["validation_split"]
    documents = Dataset.from_list(rows, features=features)
    config["custom_dataset"] = lambda **_: {split: documents}
    config["generation_kwargs"]["max_gen_toks"] = BUDGET
    with quiet_harness():
        return simple_evaluate(
            model="hf-multimodal",
            model_args=f"pretrained={vlm},device=cpu",
            tasks=[ConfigurableTask(config=config)],
            task_manager=TaskManager(include_defaults=False),
            batch_size=BATCH,
            apply_chat_template=chat,
            bootstrap_iters=0,
            log_samples=True,
        )


def chart_rows(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{**row, "image": {"bytes": (path.parent / row["image"]).read_bytes(), "path": None}} for row in rows]


CHART = Features({"query": Value("string"), "label": List(Value("string")), "image": Image()})


@pytest.mark.parametrize(("protocol", "chat"), [("paper-instruct-v1", True), ("paper-default-v1", False)])
def test_chartqa_equals_plain_hf_multimodal(vlm: Path, tmp_path: Path, protocol: str, chat: bool) -> None:
    data = chart_documents(tmp_path)
    ours = ask(vlm, "chartqa", data, protocol)
    theirs = plain(vlm, task_path(TASKS["chartqa"]), chart_rows(data), CHART, chat)
    rows = sorted(theirs["samples"]["chartqa"], key=lambda row: row["doc_id"])
    assert [sample["response"] for sample in ours.samples] == [row["resps"][0][0] for row in rows]
    assert [sample["prompt_hash"] for sample in ours.samples] == [row["prompt_hash"] for row in rows]
    assert [sample["strict"] for sample in ours.samples] == [row["exact_match"] for row in rows]
    assert [sample["flexible"] for sample in ours.samples] == [row["relaxed_accuracy"] for row in rows]
    numbers = theirs["results"]["chartqa"]
    for metric in ("exact_match,none", "relaxed_accuracy,none", "anywhere_accuracy,none"):
        assert ours.metrics["lm_eval"]["results"]["chartqa"][metric] == numbers[metric]
    assert len({row["doc_hash"] for row in rows}) == len(rows)
    if chat:
        assert 0 < ours.metrics["strict"] < 100, "the toy must be neither blind nor perfect for this to say anything"
        assert len({sample["response"] for sample in ours.samples}) > 1
        assert ours.metrics["first_prompt"].startswith("user : <image> what is")
    else:
        assert ours.metrics["first_prompt"].startswith("<image>what is")


@pytest.mark.skipif(find_spec("torchvision") is None, reason="Qwen2-VL's processor needs torchvision (extra vision)")
def test_pictures_of_any_size_equal_plain_hf_multimodal(tmp_path: Path) -> None:
    qwen, data = seeing_qwen(tmp_path / "qwen"), chart_documents(tmp_path)
    ours = ask(qwen, "chartqa", data)
    theirs = plain(qwen, task_path(TASKS["chartqa"]), chart_rows(data), CHART)
    rows = sorted(theirs["samples"]["chartqa"], key=lambda row: row["doc_id"])
    assert [sample["response"] for sample in ours.samples] == [row["resps"][0][0] for row in rows]
    assert len({sample["response"] for sample in ours.samples}) > 1


def test_a_processor_that_needs_a_missing_library_names_the_extra(vlm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*_: object, **__: object) -> None:
        raise ImportError("\nQwen2VLVideoProcessor requires the Torchvision library but it was not found.\nMore.")

    monkeypatch.setattr(AutoProcessor, "from_pretrained", lacking)
    with pytest.raises(MachineError, match=r"requires the Torchvision library .*mergelab\[vision\]"):
        load_processor(open_checkpoint(vlm))


def test_documents_pair_across_processes_and_cluster_by_picture(vlm: Path, tmp_path: Path) -> None:
    data = chart_documents(tmp_path)
    first, again = (ask(vlm, "chartqa", data).samples for _ in range(2))
    assert first == again
    assert len({sample["doc_hash"] for sample in first}) == 12
    assert len({sample["cluster"] for sample in first}) == 6
    theirs = [
        [
            row["doc_hash"]
            for row in plain(vlm, task_path(TASKS["chartqa"]), chart_rows(data), CHART)["samples"]["chartqa"]
        ]
        for _ in range(2)
    ]
    assert theirs[0] != theirs[1], "lm-eval's own document hashes hold a memory address; ours are needed"


def test_mmmu_equals_plain_where_an_answer_is_read(vlm: Path, tmp_path: Path) -> None:
    data = mmmu_documents(tmp_path)
    ours = ask(vlm, "mmmu_val", data)
    assert ours.metrics["n"] == 5 and len(ours.metrics["lm_eval"]["results"]) == 3
    names = [f"image_{number}" for number in range(1, 8)]
    fields = ("id", "question", "options", "question_type", "answer")
    features = Features({name: Value("string") for name in fields} | {name: Image() for name in names})
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    theirs = []
    for subject in ("Accounting", "Art", "Art_Theory"):
        own = [
            {name: row[name] for name in fields}
            | {name: {"bytes": base64.b64decode(row[name]), "path": None} if name in row else None for name in names}
            for row in rows
            if row["subject"] == subject
        ]
        found = plain(vlm, task_path(TASKS["mmmu_val"]) / f"mmmu_{subject.lower()}.yaml", own, features)
        theirs += sorted(found["samples"][f"mmmu_val_{subject.lower()}"], key=lambda row: row["doc_id"])
    assert [sample["response"] for sample in ours.samples] == [row["resps"][0][0] for row in theirs]
    read = [place for place, sample in enumerate(ours.samples) if not sample["unparsable"]]
    assert [ours.samples[place]["strict"] for place in read] == [theirs[place]["acc"] for place in read]
    assert all(sample["strict"] == 0 for sample in ours.samples if sample["unparsable"])
    assert ours.metrics["flexible"] >= ours.metrics["strict"]


MMMU_ANSWERS = [
    ("(B)", 1, 1, False),
    ("the answer is B .", 1, 1, False),
    ("(A)", 0, 0, False),
    ("I believe that it must be red", 1, 1, False),  # more than five words: the option's text is looked for
    ("red", 0, None, True),  # upstream reads no letter here, and would draw one
    ("", 0, None, True),
]


@pytest.mark.parametrize(("answer", "strict", "flexible", "guessed"), MMMU_ANSWERS)
def test_mmmu_near_misses(answer: str, strict: int, flexible: int | None, guessed: bool) -> None:
    grade = tell_guesses(load_yaml(task_path(TASKS["mmmu_val"]) / "mmmu_art.yaml")["process_results"])
    document = mmmu_row("Art", "<image 1> ?", ["cat", "red", "dog"], "B")
    found = [grade(document, [answer]) for _ in range(3)]
    assert found[0] == found[1] == found[2], "a draw depends on the question, not on what was graded before"
    assert (found[0]["read_acc"], found[0]["guessed"]) == (strict, guessed)
    assert flexible is None or found[0]["acc"] == flexible


def test_mmmu_draws_alike_for_every_model() -> None:
    grade = tell_guesses(load_yaml(task_path(TASKS["mmmu_val"]) / "mmmu_art.yaml")["process_results"])
    documents = [mmmu_row("Art", f"<image 1> {n} ?", ["cat", "red", "dog"], "B") for n in range(60)]
    one = [grade(document, ["what"])["acc"] for document in documents]
    another = [grade(document, ["dunno"])["acc"] for document in reversed(documents)][::-1]
    assert one == another
    assert 8 <= sum(one) <= 32


def test_pictures_from_a_hub_data_set_stay_undecoded() -> None:
    rows = [{"image": {"bytes": picture("red"), "path": None}}, {"image": None}]
    decoded = Dataset.from_list(rows, features=Features({"image": Image()}))
    found = attach(loading._undecoded(decoded, ("image",)), ("image", "image_2"), {})
    assert found == [{"image": Picture(picture("red"))}, {"image": None}]
    assert found[0]["image"].open().size == (12, 12)


FAULTS = [
    ("no-such.png", "test document 2, field image: no file"),
    (7, "field image: expected str, found int"),
    ("data:image/png;base64,QUJD", "its base64 is no picture"),
    ("broken.png", "no picture at"),
    ("cut.png", "no picture at"),
]


@pytest.mark.parametrize(("value", "said"), FAULTS)
def test_unreadable_pictures_are_named(tmp_path: Path, value: object, said: str) -> None:
    data = chart_documents(tmp_path, 3)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    (tmp_path / "broken.png").write_bytes(b"not a picture")
    whole = (tmp_path / rows[0]["image"]).read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    rows[1]["image"] = value
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(RecipeError, match="chartqa") as error:
        load_suite(EvalRequest("paper-instruct-v1", tasks=("chartqa",), data={"chartqa": data}))
    assert said in str(error.value)


def test_a_picture_that_is_shown_but_missing_is_named(tmp_path: Path) -> None:
    rows = [
        mmmu_row("Art", "<image 1> or <image 2> ?", ["a", "b"], "A", red=1),
        mmmu_row("Art", "no picture", None, "a"),
    ]
    data = tmp_path / "mmmu.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(RecipeError) as error:
        load_suite(EvalRequest("paper-instruct-v1", tasks=("mmmu_val",), data={"mmmu_val": data}))
    assert "document 0 lacks picture 2 of the 2" in str(error.value) and "document 1 shows no picture" in str(
        error.value
    )


def test_an_unknown_subject_is_named_and_not_dropped(tmp_path: Path) -> None:
    data = tmp_path / "mmmu.jsonl"
    rows = [mmmu_row(subject, "<image 1> ?", ["a", "b"], "A", red=1) for subject in ("Art", "Cooking")]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(RecipeError, match="Cooking"):
        load_suite(EvalRequest("paper-instruct-v1", tasks=("mmmu_val",), data={"mmmu_val": data}))


def test_budgets_and_stop_strings_are_upstreams(tmp_path: Path) -> None:
    data = {"chartqa": chart_documents(tmp_path), "mmmu_val": mmmu_documents(tmp_path)}
    suite = load_suite(EvalRequest("paper-instruct-v1", tasks=("mmmu_val", "chartqa"), data=data))
    for task, yaml in zip(suite.tasks, ("mmmu_art.yaml", ""), strict=True):
        upstream = load_yaml(task_path(TASKS[task.name]) / yaml)["generation_kwargs"]
        assert task.stage["generation_kwargs"] == upstream
        assert task.max_gen_toks == 512 and task.needs_processor and "pillow" in task.stage["versions"]


def test_written_documents_can_be_read_again_as_the_same(vlm: Path, tmp_path: Path) -> None:
    data = {"chartqa": chart_documents(tmp_path), "mmmu_val": mmmu_documents(tmp_path)}
    first = EvalRequest("paper-instruct-v1", tasks=("mmmu_val", "chartqa"), data=data)
    write_documents(str(vlm), first, tmp_path / "written")
    again = EvalRequest("paper-instruct-v1", tasks=("mmmu_val", "chartqa"), data_folder=tmp_path / "written")
    for old, new in zip(load_suite(first).tasks, load_suite(again).tasks, strict=True):
        assert [part.loaded.task.eval_docs for part in new.parts] == [part.loaded.task.eval_docs for part in old.parts]
        assert new.stage["data_sha256"] == old.stage["data_sha256"]


def test_a_context_too_short_for_the_pictures_is_refused(vlm: Path, tmp_path: Path) -> None:
    data = chart_documents(tmp_path)
    request = EvalRequest(
        "paper-instruct-v1", tasks=("chartqa",), data={"chartqa": data}, max_gen_toks={"chartqa": 1000}
    )
    with pytest.raises(RecipeError, match="do not fit the model's context of 1024"):
        evaluate_model(str(vlm), request, "cpu")


def test_a_vlm_without_processor_files_is_refused(vlm: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in vlm.iterdir():
        if "processor" not in file.name:
            (bare / file.name).write_bytes(file.read_bytes())
    with pytest.raises(DamagedFileError, match="its processor cannot be loaded"):
        ask(bare, "chartqa", chart_documents(tmp_path))


def test_a_template_that_drops_pictures_is_refused(vlm: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in vlm.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    write_processor(other, PICTURE_TEMPLATE.replace("<image> ", ""))
    with pytest.raises(RecipeError, match="shows no picture: expected <image>"):
        ask(other, "chartqa", chart_documents(tmp_path))


def test_without_pillow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "find_spec", lambda name: None)
    with pytest.raises(MachineError, match=r"mergelab\[vision\]"):
        load_suite(EvalRequest("paper-instruct-v1", tasks=("chartqa",), data={"chartqa": chart_documents(tmp_path)}))


def test_bytes_that_are_no_picture_are_named_when_they_are_shown() -> None:
    with pytest.raises(RecipeError, match="cannot be decoded"):
        Picture(b"no picture").open()


def test_a_text_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot see the pictures of chartqa"):
        ask(tiny_base(tmp_path / "base"), "chartqa", chart_documents(tmp_path))
