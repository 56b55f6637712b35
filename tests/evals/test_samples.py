"""From lm-eval's rows to our lines and scores, on rows written by hand."""

import pytest

from mergelab.errors import MergelabError
from mergelab.evals.samples import INVALID, build_samples, check_against_harness, count, score_points
from mergelab.evals.tasks import TASKS

GSM8K = TASKS["gsm8k"]


def row(doc_id, kind, response, extracted, score=None):
    metrics = {} if score is None else {"exact_match": score}
    return {
        "doc_id": doc_id,
        "filter": kind,
        "doc": {"question": "q"},
        "doc_hash": f"d{doc_id}",
        "prompt_hash": f"p{doc_id}",
        "target_hash": f"t{doc_id}",
        "resps": [[response]],
        "filtered_resps": [extracted],
        "arguments": [("prompt", {})],
        **metrics,
    }


def both(doc_id, response, strict, flexible):
    return [
        row(doc_id, "strict-match", response, *strict),
        row(doc_id, "flexible-extract", response, *flexible),
    ]


ROWS = [
    *both(0, "#### 4", ("4", 1.0), ("4", 1.0)),
    *both(1, "it is 4", (INVALID, 0.0), ("4", 1.0)),
    *both(2, "dunno", (INVALID, 0.0), (INVALID, 0.0)),
    *both(3, " ", (INVALID, 0.0), (INVALID, 0.0)),
    *both(4, "broken", ("4", None), ("4", 1.0)),
]
ENDINGS = [(6, True), (7, False), (5, True), (0, True), (6, True)]


def test_build_samples_joins_filters_and_endings():
    samples = build_samples(GSM8K, ROWS, ENDINGS, first_doc_id=10)
    assert [s["doc_id"] for s in samples] == [10, 11, 12, 13, 14]
    assert [s["strict"] for s in samples] == [1, 0, 0, 0, None]
    assert [s["flexible"] for s in samples] == [1, 1, 0, 0, None]
    assert [s["truncated"] for s in samples] == [False, True, False, False, False]
    assert [s["empty"] for s in samples] == [False, False, False, True, False]
    assert [s["unparsable"] for s in samples] == [False, False, True, True, False]
    assert [s["ungradable"] for s in samples] == [False, False, False, False, True]
    assert [s["num_tokens"] for s in samples] == [6, 7, 5, 0, 6]


def test_score_points_leaves_ungradable_documents_out():
    samples = build_samples(GSM8K, ROWS, ENDINGS)
    assert score_points(samples, "strict") == 25.0
    assert score_points(samples, "flexible") == 50.0
    assert count(samples, "ungradable") == 1
    assert score_points(samples[4:], "strict") is None


def test_build_samples_refuses_answers_that_cannot_be_told_apart():
    with pytest.raises(MergelabError, match="5 documents were graded, 4 answers"):
        build_samples(GSM8K, ROWS, ENDINGS[:4])


def test_build_samples_reads_the_best_choice_of_a_log_likelihood_task():
    answers = [row(0, "none", None, None) | {"acc": 1.0, "filtered_resps": [(-2.0, False), (-1.0, True)]}]
    answers[0] |= {
        "resps": [[(-2.0, False)], [(-1.0, True)]],
        "arguments": [("p", " no"), ("p", " yes")],
    }
    (sample,) = build_samples(TASKS["boolq"], answers, None)
    assert (sample["response"], sample["strict"], sample["flexible"], sample["truncated"]) == (
        "yes",
        1,
        None,
        False,
    )
    assert not sample["ungradable"]


@pytest.mark.parametrize(("ours", "theirs"), [(50.0, 50.0 + 1e-8), (50.0, None), (None, 0.0)])
def test_check_against_harness_names_both_numbers(ours, theirs):
    with pytest.raises(MergelabError) as caught:
        check_against_harness("gsm8k", "strict", ours, theirs)
    assert repr(ours) in str(caught.value)
    assert repr(theirs) in str(caught.value)


@pytest.mark.parametrize(("ours", "theirs"), [(50.0, 50.0 + 1e-12), (None, None)])
def test_check_against_harness_accepts_rounding_and_nothing_gradable(ours, theirs):
    check_against_harness("gsm8k", "strict", ours, theirs)
