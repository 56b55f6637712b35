"""lm-eval's sample rows -> our one line a document, and the scores recomputed from those lines.

Pure functions over plain values; no torch, no lm-eval.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mergelab.errors import MergelabError, RecipeError
from mergelab.evals.entry import TaskEntry
from mergelab.evals.guessing import GUESSED

FLAGS = ("truncated", "empty", "unparsable", "ungradable")
"""What is counted per task."""

_ROUNDING = 1e-9
"""A share that is summed from likelihoods may come out as 1.0000000000000002."""

INVALID = "[invalid]"
"""What lm-eval's extracting filters leave when they found no answer."""

Sample = dict[str, Any]


def build_samples(
    entry: TaskEntry,
    rows: Iterable[Mapping[str, Any]],
    endings: Sequence[tuple[int, bool]] | None,
    first_doc_id: int = 0,
) -> list[Sample]:
    """Join lm-eval's rows (one per document and filter) into one sample a document, in document order.

    Args:
        entry: The task: which metric and filter are strict and flexible, what counts as unparsable.
        rows: ``samples`` of lm-eval for one task object, with ``log_samples``.
        endings: (tokens, ended) for each document in order; None for log-likelihood tasks, which write no
            text.
        first_doc_id: Added to lm-eval's document ids, so that ids are unique in a family of subtasks.

    Returns:
        Samples with the keys of the run folder. ``strict`` and ``flexible`` are 0, 1 or a fraction; null when
        the grader could not run (``ungradable``) and, for ``flexible``, when the task has no lenient twin.
        0 stands for ``entry.lowest`` points and 1 for 100. Where ``lowest`` is not 0, ``points`` holds what the strict
        grader gave, which may lie outside of these (a model that rates emotions beyond the scale).
    """
    by_document: dict[int, dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for row in rows:
        by_document[int(row["doc_id"])][row["filter"]] = row
    if endings is not None and len(endings) != len(by_document):
        raise MergelabError(
            f"task {entry.name}: {len(by_document)} documents were graded, {len(endings)} answers noted; "
            "they cannot be told apart."
        )
    samples = []
    for place, doc_id in enumerate(sorted(by_document)):
        ending = None if endings is None else endings[place]
        samples.append(_sample(entry, by_document[doc_id], first_doc_id + doc_id, ending))
    return samples


def _sample(
    entry: TaskEntry, rows: Mapping[str, Mapping[str, Any]], doc_id: int, ending: tuple[int, bool] | None
) -> Sample:
    strict, flexible = _score(entry, rows, entry.strict), _score(entry, rows, entry.flexible)
    ungradable = strict is None or (entry.flexible is not None and flexible is None)
    row = rows[_split(entry.strict)[1]]
    response = _response(row)
    empty = ending is not None and not response.strip()
    return {
        "doc_id": doc_id,
        "doc_hash": row["doc_hash"],
        "prompt_hash": row["prompt_hash"],
        "target_hash": row["target_hash"],
        "response": response,
        "strict": None if ungradable else strict,
        "flexible": None if ungradable else flexible,
        **({"points": None if ungradable else entry.unit * _value(rows, entry.strict)} if entry.lowest else {}),
        "truncated": ending is not None and not ending[1],
        "empty": empty,
        "unparsable": _is_unparsable(entry, rows, empty),
        "ungradable": ungradable,
        "num_tokens": 0 if ending is None else ending[0],
        "cluster": row["doc"].get(entry.cluster) if entry.cluster else None,
    }


def _split(key: str) -> tuple[str, str]:
    """Return metric and filter of a result key ``metric,filter``."""
    metric, _, name = key.rpartition(",")
    return metric, name


def _value(rows: Mapping[str, Mapping[str, Any]], key: str | None) -> float:
    """Return lm-eval's value of a document under a result key; not a number if the grader left none."""
    metric, name = _split(key or ",")
    value = rows.get(name, {}).get(metric)
    return math.nan if value is None else float(value)


def _score(entry: TaskEntry, rows: Mapping[str, Mapping[str, Any]], key: str | None) -> int | float | None:
    """Return the document's score under a result key, or None if the grader left none."""
    value = _value(rows, key)
    if not math.isfinite(value):
        return None
    if entry.unit == 100:
        score = min(value, 1.0)
        if not 0 <= value < 1 + _ROUNDING:
            kind = RecipeError if entry.home == "folder" else MergelabError
            raise kind(
                f"task {entry.name}: expected {key} in [0, 1], found {value}. A metric that comes in points needs "
                "unit: 1 in registry.yaml."
            )
    else:
        lowest = entry.lowest if key == entry.strict else 0.0
        score = (entry.unit * value - lowest) / (100 - lowest)
        if entry.home == "folder" and not -_ROUNDING < score < 1 + _ROUNDING:
            raise RecipeError(
                f"task {entry.name}: expected {key} from {lowest:g} to 100 points, found {entry.unit * value:g}. "
                "Correct unit or lowest in registry.yaml (lowest is of the strict key alone)."
            )
        score = min(max(score, 0.0), 1.0)
    return int(score) if score.is_integer() else score


def _response(row: Mapping[str, Any]) -> str:
    """Return the text written, or for log-likelihood tasks the continuation that scored highest."""
    answers = [attempts[0] for attempts in row["resps"]]
    if isinstance(answers[0], str):
        return answers[0]
    best = max(range(len(answers)), key=lambda choice: answers[choice][0])
    return str(row["arguments"][best][1]).strip()


def _is_unparsable(entry: TaskEntry, rows: Mapping[str, Mapping[str, Any]], empty: bool) -> bool:
    """Return whether no grader could read an answer out of the text at all."""
    if entry.unparsable == "never":
        return False
    if entry.unparsable == "empty":
        return empty
    if entry.unparsable == "guessed":
        return bool(rows[_split(entry.strict)[1]].get(GUESSED))
    if entry.unparsable == "flexible":
        return not _value(rows, entry.flexible) > 0
    keys = [key for key in (entry.strict, entry.flexible) if key is not None]
    return all(rows[_split(key)[1]]["filtered_resps"][0] == INVALID for key in keys)


def score_points(samples: Sequence[Sample], grader: str, lowest: float = 0.0) -> float | None:
    """Return the mean of a grader over the gradable samples in points; None without any.

    Args:
        samples: The samples.
        grader: "strict" or "flexible".
        lowest: Points of the score 0 under the strict grader; a score of 1 is 100 points.
    """
    values = [sample[grader] for sample in samples if sample[grader] is not None]
    if not values:
        return None
    least = lowest if grader == "strict" else 0.0
    return least + (100.0 - least) * math.fsum(values) / len(values)


def scored(entry: TaskEntry, samples: Sequence[Sample]) -> dict[str, Any]:
    """Return what the verdicts of a task come to, as metrics.json says it.

    ``strict`` and ``flexible`` in points, and how many samples carry which flag. Where answers can cost points, also
    what the worst one costs (``lowest``) and how many were graded outside of that and count as the worst or the best.
    """
    found: dict[str, Any] = {grader: score_points(samples, grader, entry.lowest) for grader in ("strict", "flexible")}
    found |= {flag: count(samples, flag) for flag in FLAGS}
    if entry.lowest:
        given = [sample["points"] for sample in samples if sample["points"] is not None]
        beyond = sum(not entry.lowest <= points <= 100 for points in given)
        found |= {"lowest": entry.lowest, "beyond_scale": beyond}
    return found


def check_scores(entry: TaskEntry, samples: Sequence[Sample], theirs: Mapping[str, Any]) -> None:
    """Refuse samples whose mean is not the score that lm-eval computed from the same answers.

    Args:
        entry: The task.
        samples: Its samples.
        theirs: ``harness_scores``.

    Raises:
        MergelabError: They differ by more than 1e-9 points, or only one of them exists.
    """
    for grader in ("strict", "flexible"):
        ours = score_points(samples, grader)
        if grader == "strict" and entry.lowest:
            given = [sample["points"] for sample in samples if sample["points"] is not None]
            ours = math.fsum(given) / len(given) if given else None
        check_against_harness(entry.name, grader, ours, theirs[grader])


def count(samples: Sequence[Sample], flag: str) -> int:
    """Return how many samples carry a true ``flag``."""
    return sum(bool(sample[flag]) for sample in samples)


def harness_scores(task: Any, results: Any, samples: Sequence[Sample]) -> dict[str, Any]:
    """Return lm-eval's own scores in points, parts weighted by gradable documents, and all its numbers."""
    scores: dict[str, Any] = {}
    for grader, key in (("strict", task.strict_key), ("flexible", task.flexible_key)):
        total = graded = 0.0
        for part in task.parts:
            end = part.first_doc_id + part.loaded.num_documents
            own = [sample for sample in samples if part.first_doc_id <= sample["doc_id"] < end]
            size = sum(sample[grader] is not None for sample in own)
            value = results["results"][part.loaded.name].get(key)
            if value is not None:
                total, graded = total + task.entry.unit * float(value) * size, graded + size
        scores[grader] = total / graded if graded else None
    scores["results"] = {
        part.loaded.name: {
            key: float(value)
            for key, value in results["results"][part.loaded.name].items()
            if "," in key and isinstance(value, int | float)
        }
        for part in task.parts
    }
    return scores


def check_against_harness(name: str, grader: str, ours: float | None, theirs: float | None) -> None:
    """Refuse a score that lm-eval computed differently from the same answers.

    Raises:
        MergelabError: They differ by more than 1e-9 points, or only one of them exists.
    """
    if ours is None and theirs is None:
        return
    if ours is None or theirs is None or abs(ours - theirs) > 1e-9:
        raise MergelabError(
            f"task {name}: {grader} is {ours!r} by our samples and {theirs!r} by lm-eval over the same "
            "answers. This is a fault in the grading, not in the model; nothing was recorded."
        )
