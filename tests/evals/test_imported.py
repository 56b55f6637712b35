"""Result files of lmms-eval and VLMEvalKit: what is read out of them, and every fault in one message."""

import json
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest

from mergelab.errors import RecipeError
from mergelab.evals.imported import Imported, Keys, first_difference, import_file
from mergelab.evals.workbook import read_sheet
from tests.evals.result_files import (
    lmms_line,
    table_rows,
    write_chartqa,
    write_lines,
    write_results_beside,
    write_table,
    write_workbook,
)

RIGHT = [True, False, True, True]
NAME = "20260806_102223_samples_chartqa.jsonl"


def fault(path: Path, keys: Keys | None = None) -> str:
    with pytest.raises(RecipeError) as error:
        import_file(path, keys or Keys())
    return str(error.value)


def strict(found: Imported) -> list[Any]:
    return [sample["strict"] for sample in found.samples]


def test_lmms_lines_become_samples(tmp_path: Path) -> None:
    path = write_chartqa(tmp_path / NAME, RIGHT)
    write_results_beside(path)
    found = import_file(path, Keys())
    assert strict(found) == [1, 0, 1, 1]
    first = found.samples[0]
    assert (first["doc_id"], first["response"], first["num_tokens"], first["truncated"]) == (0, "Canada", 5, None)
    told = {name: found.provenance[name] for name in ("tool", "version", "task", "model_args", "strict_key", "file")}
    assert told == {
        "tool": "lmms-eval",
        "version": "0.7.2 (75571cfe)",
        "task": "chartqa",
        "model_args": "pretrained=merged",
        "strict_key": "relaxed_overall",
        "file": NAME,
    }


def test_the_files_own_document_hash_is_not_read(tmp_path: Path) -> None:
    one, two = (write_chartqa(tmp_path / name / NAME, RIGHT, wrong=name) for name in ("one", "two"))
    samples, others = (import_file(path, Keys()).samples for path in (one, two))
    lines = [json.loads(path.read_text().splitlines()[1])["doc_hash"] for path in (one, two)]
    assert lines[0] != lines[1]
    assert first_difference(samples, others) is None


def test_older_lines_with_nested_answers_and_arguments(tmp_path: Path) -> None:
    new = lmms_line(0, "Canada", exact_match=1.0)
    old = {key: value for key, value in new.items() if key not in ("input", "token_counts")}
    old |= {"arguments": {"gen_args_0": {"arg_0": new["input"], "arg_1": {}}}, "resps": [["Canada"]]}
    old["filtered_resps"] = ["Canada"]
    found = [import_file(write_lines(tmp_path / f"{n}.jsonl", [line]), Keys()) for n, line in enumerate((new, old))]
    assert first_difference(found[0].samples, found[1].samples) is None
    assert [one.samples[0]["response"] for one in found] == ["Canada", "Canada"]


SCORES: list[tuple[list[dict[str, Any]], list[int | float], str]] = [
    (
        [
            {"mme_perception_score": {"question_id": "a.jpg", "category": "color", "score": 1.0}},
            {"mme_cognition_score": {"question_id": "a.jpg", "category": "code", "score": 0.0}},
        ],
        [1, 0],
        "mme_cognition_score|mme_perception_score",
    ),
    (
        [{name: {"question_id": n, "score": n / 2} for name in ("pope_accuracy", "pope_recall")} for n in range(2)],
        [0, 0.5],
        "pope_accuracy",
    ),
    (
        [{"exact_match": n / 2, "submission": {"question_id": n, "answer": "x"}} for n in range(2)],
        [0, 0.5],
        "exact_match",
    ),
    (
        [
            {
                "mmmu_acc": {"question_type": "multiple-choice", "answer": "B", "parsed_pred": ["B"]},
                "submission": {"a": "B"},
            },
            {
                "mmmu_acc": {"question_type": "multiple-choice", "answer": "B", "parsed_pred": ["C"]},
                "submission": {"a": "C"},
            },
        ],
        [1, 0],
        "mmmu_acc",
    ),
    (
        [
            {"mmmu_acc": {"question_type": "open", "answer": "17", "parsed_pred": parsed}}
            for parsed in ([17.0, "x"], [[17.0, "x"]], ["1", "7"], [["1"], ["7"]])
        ],
        [1, 1, 0, 0],
        "mmmu_acc",
    ),
]


@pytest.mark.parametrize(("metrics", "scores", "key"), SCORES)
def test_scores_of_several_shapes(tmp_path: Path, metrics: list[dict[str, Any]], scores: list[float], key: str) -> None:
    state = random.getstate()
    lines = [lmms_line(place, "x", **metric) for place, metric in enumerate(metrics)]
    found = import_file(write_lines(tmp_path / "a.jsonl", lines), Keys())
    assert strict(found) == scores and found.provenance["strict_key"] == key
    assert random.getstate() == state


def test_key_that_is_read_off_the_lines_does_not_depend_on_their_order(tmp_path: Path) -> None:
    lines = [lmms_line(0, "x", b=1.0), lmms_line(1, "x", a=0.0)]
    found = [
        import_file(write_lines(tmp_path / f"{n}.jsonl", some), Keys()) for n, some in enumerate((lines, lines[::-1]))
    ]
    assert [one.provenance["strict_key"] for one in found] == ["a|b", "a|b"]


@pytest.mark.parametrize("doc_id", [None, [1], {"a": 1}, True, 1.5])
def test_a_document_id_is_a_number_or_a_text(tmp_path: Path, doc_id: Any) -> None:
    line = {**lmms_line(0, "x", exact_match=1.0), "doc_id": doc_id}
    assert "line 1: doc_id: expected a whole number or a text" in fault(write_lines(tmp_path / "a.jsonl", [line]))


def test_a_workbook_without_a_sheet_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.xlsx"
    write_workbook(path, [["index"], [1]])
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content.replace(b'Id="rId1"', b'Id="rId9"'))
    assert "no .xlsx workbook (StopIteration" in fault(path)


def test_keys_choose_flexible_and_cluster(tmp_path: Path) -> None:
    lines = [
        lmms_line(place, "x", hard=0.0, easy={"score": 1, "question_id": f"picture {place // 2}"}) for place in range(4)
    ]
    path = write_lines(tmp_path / "a.jsonl", lines)
    assert "several scores on every line: hard, easy. Choose with --strict" in fault(path)
    found = import_file(path, Keys("hard", "easy", "easy.question_id"))
    assert strict(found) == [0, 0, 0, 0] and [sample["flexible"] for sample in found.samples] == [1, 1, 1, 1]
    assert [sample["cluster"] for sample in found.samples] == ["picture 0", "picture 0", "picture 1", "picture 1"]


@pytest.mark.parametrize("suffix", [".xlsx", ".tsv", ".csv", ".json"])
def test_tables_of_every_kind_are_the_same_documents(tmp_path: Path, suffix: str) -> None:
    folder = tmp_path / "T20260818_Ge8e78f05"
    path = write_table(folder / f"merged_MMBench_exact_matching_result{suffix}", table_rows(RIGHT))
    found = import_file(path, Keys(cluster="category"))
    assert strict(found) == [1, 0, 1, 1]
    assert [sample["doc_id"] for sample in found.samples] == [100, 101, 102, 103]
    assert found.samples[1]["response"] == "B" and found.samples[1]["cluster"] == "bars"
    assert (found.provenance["tool"], found.provenance["version"]) == ("VLMEvalKit", "git e8e78f05")
    other = import_file(write_table(tmp_path / "other.json", table_rows([False] * 4)), Keys())
    assert first_difference(found.samples, other.samples) is None


@pytest.mark.parametrize(("column", "values"), [("eval_score", (1.0, 0.25)), ("score", (True, False))])
def test_score_columns_of_other_evaluations(tmp_path: Path, column: str, values: tuple[Any, Any]) -> None:
    rows = [
        {"index": f"q{place}", "question": "?", "answer": "x", "prediction": "x", column: value}
        for place, value in enumerate(values)
    ]
    for suffix in (".xlsx", ".tsv"):
        found = import_file(write_table(tmp_path / f"a{suffix}", rows), Keys())
        assert strict(found) == [float(value) for value in values]


def test_an_empty_cell_is_a_document_without_a_score(tmp_path: Path) -> None:
    rows = table_rows(RIGHT)
    rows[2]["hit"] = None
    found = import_file(write_table(tmp_path / "a.xlsx", rows), Keys())
    assert strict(found) == [1, 0, None, 1] and found.samples[2]["ungradable"]


def test_workbook_cells_of_every_kind(tmp_path: Path) -> None:
    path = tmp_path / "a.xlsx"
    write_workbook(path, [["a_x000D_b", " two\nlines & <tags> ", None, 3], [True, None, 1.5]])
    assert read_sheet(path) == [["a\rb", " two\nlines & <tags> ", None, 3.0], [True, None, 1.5, None]]


def test_all_faults_come_at_once(tmp_path: Path) -> None:
    good = lmms_line(0, "x", exact_match=1.0)
    lines = [
        good,
        good,
        {**good, "doc_id": 1, "exact_match": 1.5},
        {"doc_id": 2},
        {**good, "doc_id": 3, "exact_match": "?"},
    ]
    path = write_lines(tmp_path / "a.jsonl", lines)
    path.write_text(path.read_text() + "{torn\n")
    said = fault(path, Keys("exact_match"))
    for part in (
        "line 4: lacks target, filtered_resps, input",
        "line 6: not JSON",
        "1 documents stand there more than once, the first is 0",
        "line 3 (document 1): exact_match: expected a score from 0 to 1, found 1.5",
        "line 5 (document 3): exact_match: expected a score, found '?'",
    ):
        assert part in said


def test_wrong_files_are_named(tmp_path: Path) -> None:
    predictions = [{key: value for key, value in row.items() if key not in ("hit", "log")} for row in table_rows(RIGHT)]
    assert "these are predictions alone" in fault(write_table(tmp_path / "a.tsv", predictions))
    assert "expected columns index and prediction" in fault(
        write_table(tmp_path / "acc.csv", [{"split": "x", "Overall": 1}])
    )
    assert "found none" in fault(tmp_path / "nothing.jsonl")
    (tmp_path / "bad.xlsx").write_bytes(b"PK no zip")
    assert "no .xlsx workbook" in fault(tmp_path / "bad.xlsx")
    (tmp_path / "a.pkl").write_bytes(b"x")
    assert "found '.pkl'" in fault(tmp_path / "a.pkl")
    (tmp_path / "empty.jsonl").write_text("")
    assert "no document in it" in fault(tmp_path / "empty.jsonl")
    lines = [lmms_line(0, "x", gpt_eval_score={"index": 0, "prediction": "x"})]
    assert "no score from 0 to 1 on every line, found gpt_eval_score" in fault(write_lines(tmp_path / "g.jsonl", lines))


def test_a_ragged_table_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('"index","prediction","hit"\n"1","x"\n')
    assert "row 2 has another number of cells than the 3 columns" in fault(path)
