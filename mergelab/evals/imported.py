"""Result files of other harnesses -> our samples: which field is the score, and the hashes that documents pair by."""

from __future__ import annotations

import hashlib
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from mergelab.errors import RecipeError, problem_list
from mergelab.evals.loaded import sha256_text
from mergelab.evals.result_files import VLMEVALKIT, Line, ResultFile, read_result_file
from mergelab.evals.samples import Sample
from mergelab.evals.tasks import TASKS, task_path

_SHOWN = 8
_TABLE_SCORES = ("hit", "eval_score", "score", "verifier_match")
"""VLMEvalKit's score columns in the order in which they are looked for."""

_MISSING = object()


@dataclass(frozen=True)
class Keys:
    """Which fields of a file to read; ``a|b`` takes whichever a line has, ``a.b`` goes into an object.

    Args:
        strict: The score; None finds it, if there is no doubt.
        flexible: A more lenient score, or None.
        cluster: What documents with the same value share (a picture), or None.
    """

    strict: str | None = None
    flexible: str | None = None
    cluster: str | None = None


@dataclass(frozen=True)
class Imported:
    """Samples out of a result file, and where they are from (JSON-able)."""

    samples: list[Sample]
    provenance: dict[str, Any]


def import_file(path: Path, keys: Keys) -> Imported:
    """Read a result file of lmms-eval or VLMEvalKit.

    Raises:
        RecipeError: The file is missing, damaged, of another kind, names documents twice, or has no score in [0, 1]
            on every line. All problems in one message.
    """
    found = read_result_file(path)
    problems = [*found.problems, *_doubled(found)]
    if not found.lines and not problems:
        problems.append("no document in it")
    strict = keys.strict
    if found.lines and strict is None:
        strict, doubt = _find_score(found)
        problems += doubt
    chosen = Keys(strict, keys.flexible, keys.cluster)
    samples: list[Sample] = []
    if strict is not None:
        for line in found.lines:
            sample, faults = _sample(line, chosen)
            problems += [f"{line.place} (document {line.doc_id}): {fault}" for fault in faults]
            samples.append(sample)
    if problems:
        more = [f"{len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise RecipeError(problem_list(f"{path}: cannot be imported.", [*problems[:_SHOWN], *more]))
    provenance = {
        "tool": found.tool,
        **found.told,
        "file": path.name,
        "file_sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "strict_key": chosen.strict,
        "flexible_key": chosen.flexible,
        "cluster_key": chosen.cluster,
    }
    return Imported(
        sorted(samples, key=lambda sample: (isinstance(sample["doc_id"], str), sample["doc_id"])), provenance
    )


def _doubled(found: ResultFile) -> list[str]:
    count = Counter(line.doc_id for line in found.lines)
    doubled = [doc_id for doc_id, times in count.items() if times > 1]
    if not doubled:
        return []
    return [
        f"{len(doubled)} documents stand there more than once, the first is {doubled[0]}: a task with several filters, "
        "or two runs in one file. Keep the lines of one"
    ]


def _find_score(found: ResultFile) -> tuple[str | None, list[str]]:
    """Return the key of the only score that every line has, or why there is doubt."""
    names = list(dict.fromkeys(name for line in found.lines for name in line.fields))
    if found.tool == VLMEVALKIT:
        known = [name for name in _TABLE_SCORES if name in names]
        if known:
            return known[0], []
        return None, [
            f"no column of {', '.join(_TABLE_SCORES)}, found {', '.join(names[:12])}: these are predictions alone. "
            "Give the file that the evaluation writes beside it, or name the column with --strict"
        ]
    scores = {name: [_score(line.fields.get(name, _MISSING)) for line in found.lines] for name in names}
    complete = [name for name in names if all(isinstance(value, int | float) for value in scores[name])]
    if complete and all(scores[name] == scores[complete[0]] for name in complete):
        return complete[0], []
    if complete:
        return None, [f"several scores on every line: {', '.join(complete)}. Choose with --strict"]
    some = [name for name in names if any(isinstance(value, int | float) for value in scores[name])]
    if some and all(
        sum(isinstance(scores[name][n], int | float) for name in some) == 1 for n in range(len(found.lines))
    ):
        return "|".join(sorted(some)), []  # in whatever order the lines stand
    return None, [
        f"no score from 0 to 1 on every line, found {', '.join(names) or 'no metric'}. Name one with --strict"
    ]


def _sample(line: Line, keys: Keys) -> tuple[Sample, list[str]]:
    faults: list[str] = []
    scores: list[int | float | None] = []
    for key in (keys.strict, keys.flexible):
        score = None if key is None else _score(_at(line.fields, key))
        if isinstance(score, str):
            faults.append(f"{key}: {score}")
        scores.append(None if isinstance(score, str) else score)
    cluster = None if keys.cluster is None else _at(line.fields, keys.cluster)
    if cluster is _MISSING:
        faults.append(f"{keys.cluster}: not there (it has {', '.join(line.fields) or 'nothing'})")
    elif cluster is not None and not isinstance(cluster, str):
        cluster = json.dumps(cluster, sort_keys=True)
    strict, flexible = scores
    ungradable = strict is None or (keys.flexible is not None and flexible is None)
    return {
        "doc_id": line.doc_id,
        "doc_hash": sha256_text(json.dumps([line.doc_id, line.question, line.target])),
        "prompt_hash": sha256_text(line.question),
        "target_hash": sha256_text(line.target),
        "response": line.response,
        "strict": None if ungradable else strict,
        "flexible": None if ungradable else flexible,
        # The files do not tell how an answer ended, nor whether their grader could read it.
        "truncated": None,
        "empty": not line.response.strip(),
        "unparsable": None,
        "ungradable": ungradable,
        "num_tokens": line.num_tokens,
        "cluster": None if cluster is _MISSING else cluster,
    }, faults


def _at(fields: Mapping[str, Any], key: str) -> Any:
    """Return the value under ``a|b`` (whichever is there) or ``a.b`` (inside an object)."""
    for name in key.split("|"):
        value: Any = fields.get(name, _MISSING)
        if value is _MISSING and "." in name:
            value = fields
            for part in name.split("."):
                value = value.get(part, _MISSING) if isinstance(value, Mapping) else _MISSING
        if value is not _MISSING:
            return value
    return _MISSING


def _score(value: Any) -> int | float | str | None:
    """Return a score in [0, 1], None where the grader left an empty cell, or a text that says what is wrong."""
    if isinstance(value, Mapping):
        inner = next((value[name] for name in ("score", "true_false", "is_correct") if name in value), _MISSING)
        if inner is _MISSING and {"parsed_pred", "answer", "question_type"} <= value.keys():
            return _mmmu_score(value)
        return _score(inner)
    if value is _MISSING or isinstance(value, list):
        return "no score there"
    if value is None or value == "" or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        value = value.strip().lower() == "true"
    try:
        number = float(value)
    except ValueError:
        return f"expected a score, found {value[:40]!r}"
    if not 0 <= number <= 1:
        return f"expected a score from 0 to 1, found {number:g}"
    return int(number) if number.is_integer() else number


def _mmmu_score(value: Mapping[str, Any]) -> int:
    """Return what lmms-eval's aggregation makes of one MMMU document, with the graders both harnesses took over."""
    graders = _mmmu_graders()
    grade = graders.eval_multi_choice if value["question_type"] == "multiple-choice" else graders.eval_open
    parsed = value["parsed_pred"] if isinstance(value["parsed_pred"], list) else [value["parsed_pred"]]
    if value["question_type"] != "multiple-choice" and not all(isinstance(one, list) for one in parsed):
        parsed = [parsed]  # the candidates of one answer, not one answer each
    return int(any(grade(value["answer"], one) for one in parsed))


def _mmmu_graders() -> Any:
    """Load the graders beside lm-eval's MMMU task; lm-eval itself is not imported."""
    name = "mergelab_mmmu_graders"
    if name not in sys.modules:
        spec = spec_from_file_location(name, task_path(TASKS["mmmu_val"]) / "utils.py")
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        state = random.getstate()  # the module seeds the global generator when it is read
        spec.loader.exec_module(module)
        random.setstate(state)
        sys.modules[name] = module
    return sys.modules[name]


def first_difference(samples: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the first document on which two points were not asked the same, in words, or None."""
    here, there = ({str(sample["doc_id"]): sample for sample in side} for side in (samples, others))
    for doc_id, sample in here.items():
        if doc_id not in there:
            return f"document {doc_id} is not among its {len(there)} documents (here are {len(here)})"
        for name in ("prompt_hash", "target_hash", "doc_hash"):
            if sample[name] != there[doc_id][name]:
                what = {"prompt_hash": "question", "target_hash": "target"}.get(name, "content")
                hashes = f"{name} {there[doc_id][name][:12]}, here {sample[name][:12]}"
                return f"document {doc_id} has another {what} there ({hashes})"
    lacking = next((doc_id for doc_id in there if doc_id not in here), None)
    return (
        None if lacking is None else f"its document {lacking} is missing here ({len(here)} of {len(there)} documents)"
    )
