"""Local documents: every fault named with file and line, all at once."""

import pytest

from mergelab.errors import RecipeError
from mergelab.evals.documents import read_documents, read_splits

FIELDS = {"question": str, "answer": str}
GOOD = '{"question": "q", "answer": "a"}'


def read(tmp_path, text):
    path = tmp_path / "documents.jsonl"
    path.write_text(text, encoding="utf-8")
    return read_documents("gsm8k", path, FIELDS)


def test_read_documents_keeps_order_and_further_fields(tmp_path):
    assert [d["answer"] for d in read(tmp_path, f'{GOOD}\n\n{{"question": "q", "answer": "b", "x": 1}}\n')] == [
        "a",
        "b",
    ]


def test_read_documents_keeps_line_separators_inside_strings(tmp_path):
    (document,) = read(tmp_path, '{"question": "a\u2028b", "answer": "c"}\n')
    assert document["question"] == "a\u2028b"


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"question": "q", ', "line 2: not JSON"),
        ('["q", "a"]', "line 2: expected a JSON object, found list"),
        ('{"question": "q"}', "line 2: fields missing: answer (found question)"),
        ('{"question": "q", "answer": 3}', "line 2: field answer: expected str, found int"),
    ],
    ids=["torn", "list", "missing", "type"],
)
def test_read_documents_names_file_and_line(tmp_path, line, fault):
    with pytest.raises(RecipeError) as caught:
        read(tmp_path, f"{GOOD}\n{line}\n")
    assert fault in str(caught.value)
    assert "documents.jsonl" in str(caught.value)


def test_read_documents_counts_all_faults_and_shows_the_first(tmp_path):
    with pytest.raises(RecipeError, match="9 lines are not") as caught:
        read(tmp_path, "x\n" * 9)
    assert "line 5" in str(caught.value)
    assert "4 more lines" in str(caught.value)


@pytest.mark.parametrize("text", ["", "\n \n"], ids=["nothing", "blank"])
def test_read_documents_refuses_an_empty_file(tmp_path, text):
    with pytest.raises(RecipeError, match="is empty"):
        read(tmp_path, text)


def test_read_documents_refuses_bytes_that_are_not_text(tmp_path):
    path = tmp_path / "documents.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="UTF-8"):
        read_documents("gsm8k", path, FIELDS)


def test_read_documents_refuses_a_missing_file(tmp_path):
    with pytest.raises(RecipeError, match="found none"):
        read_documents("gsm8k", tmp_path / "no.jsonl", FIELDS)


def test_read_splits_takes_a_folder_and_demands_the_graded_split(tmp_path):
    (tmp_path / "train.jsonl").write_text(GOOD)
    with pytest.raises(RecipeError, match=r"expected test\.jsonl .* found train"):
        read_splits("gsm8k", tmp_path, FIELDS, "test")
    (tmp_path / "test.jsonl").write_text(GOOD)
    assert set(read_splits("gsm8k", tmp_path, FIELDS, "test")) == {"test", "train"}
