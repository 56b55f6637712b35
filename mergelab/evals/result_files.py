"""Per-document result files of other harnesses, read as they are: lmms-eval's JSONL and VLMEvalKit's tables.

**Source** lmms-eval 0.7 writes ``<date>_samples_<task>.jsonl`` with ``--log_samples`` beside ``<date>_results.json``:
doc_id, input, target, filtered_resps (and resps where they differ), doc_hash and the task's metrics, which may be
numbers or objects. Its doc_hash is over whatever the data set decoded and does not pair between runs; it is not read.
VLMEvalKit writes one row a document: index, question, options, answer, prediction, and ``hit``, ``eval_score`` or
``score`` in the file that its evaluation leaves (``_result``, ``_results``, ``_auxmatch``), as xlsx, tsv or json.
"""

from __future__ import annotations

import csv
import json
import math
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mergelab.evals.workbook import read_sheet

LMMS_EVAL, VLMEVALKIT = "lmms-eval", "VLMEvalKit"

_NOT_METRICS = (
    *("doc_id", "doc", "target", "arguments", "input", "input_media", "resps", "filtered_resps", "token_counts"),
    *("doc_hash", "prompt_hash", "target_hash", "filter", "metrics"),
)
_QUESTION_COLUMNS = ("question", "hint", *string.ascii_uppercase)
_TARGET_COLUMNS = ("answer", "GT", "gt_answer")
_EVALUATION_ID = re.compile(r"T(\d+)_G([0-9a-f]+)$")


@dataclass(frozen=True)
class Line:
    """One document of a result file."""

    place: str
    """Where it stands, for messages."""
    doc_id: int | str
    question: str
    target: str
    response: str
    fields: Mapping[str, Any]
    """What may be a score or say what the document belongs to."""
    num_tokens: int | None = None


@dataclass(frozen=True)
class ResultFile:
    """A result file, whole."""

    tool: str
    lines: Sequence[Line]
    problems: Sequence[str]
    """Everything wrong with it."""
    told: Mapping[str, Any] = field(default_factory=dict)
    """What the file, its name or the file beside it say about how it was made: version, model, task, ..."""


def read_result_file(path: Path) -> ResultFile:
    """Read a result file by its ending: .jsonl is lmms-eval's, .xlsx, .tsv, .csv and .json are VLMEvalKit's."""
    if not path.is_file():
        return ResultFile("", (), (f"expected a file of results at {path}, found none",))
    try:
        return _read_lmms(path) if path.suffix == ".jsonl" else _read_table(path)
    except (OSError, ValueError, csv.Error) as error:
        return ResultFile("", (), (f"{path}: {error}",))


def _read_lmms(path: Path) -> ResultFile:
    lines: list[Line] = []
    problems: list[str] = []
    for number, text in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not text.strip():
            continue
        place = f"line {number}"
        try:
            row = json.loads(text)
        except json.JSONDecodeError as error:
            problems.append(f"{place}: not JSON: {error.msg} at column {error.colno}")
            continue
        missing = [] if isinstance(row, dict) else ["a JSON object"]
        if isinstance(row, dict):
            missing = [name for name in ("doc_id", "target", "filtered_resps") if name not in row]
            missing += [] if "input" in row or "arguments" in row else ["input"]
        if missing:
            problems.append(f"{place}: lacks {', '.join(missing)}")
            continue
        if isinstance(row["doc_id"], bool) or not isinstance(row["doc_id"], int | str):
            problems.append(f"{place}: doc_id: expected a whole number or a text, found {type(row['doc_id']).__name__}")
            continue
        answers = row.get("resps", row["filtered_resps"])
        lines.append(
            Line(
                place,
                row["doc_id"],
                _plain_text(row["input"] if "input" in row else _first_argument(row["arguments"])),
                _plain_text(row["target"]),
                _plain_text(_unwrapped(answers)),
                {key: value for key, value in row.items() if key not in _NOT_METRICS},
                _num_tokens(row.get("token_counts")),
            )
        )
    return ResultFile(LMMS_EVAL, lines, problems, _lmms_told(path))


def _first_argument(arguments: Any) -> Any:
    """Return the prompt of older files: ``{"gen_args_0": {"arg_0": prompt, ...}}``, or a list."""
    while isinstance(arguments, Mapping | list) and arguments:
        arguments = next(iter(arguments.values())) if isinstance(arguments, Mapping) else arguments[0]
    return arguments


def _unwrapped(answers: Any) -> Any:
    while isinstance(answers, list) and len(answers) == 1:
        answers = answers[0]
    return answers


def _num_tokens(counts: Any) -> int | None:
    counted = [one.get("output_tokens") for one in counts or () if isinstance(one, Mapping)]
    known = [one for one in counted if isinstance(one, int)]
    return sum(known) if known and len(known) == len(counted) else None


def _lmms_told(path: Path) -> dict[str, Any]:
    """Return what the results file beside the samples says of the harness, the model and the settings."""
    date, _, task = path.stem.partition("_samples_")
    beside = path.with_name(f"{date}_results.json")
    if not task or not beside.is_file():
        return {"task": task or None}
    try:
        results = json.loads(beside.read_text(encoding="utf-8"))
        config = results.get("config") or {}
        return {
            "task": task,
            "version": results.get("lmms_eval_version"),
            "git_hash": results.get("git_hash"),
            "task_version": (results.get("versions") or {}).get(task),
            "model": config.get("model"),
            "model_args": config.get("model_args"),
            "limit": config.get("limit"),
            "results_file": beside.name,
        }
    except (ValueError, AttributeError):
        return {"task": task}


def _read_table(path: Path) -> ResultFile:
    rows = _rows(path)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    missing = [name for name in ("index", "prediction") if name not in columns]
    if missing:
        found = ", ".join(columns[:12]) or "none"
        return ResultFile(VLMEVALKIT, (), (f"{path}: expected columns {' and '.join(missing)}, found {found}",))
    lines = [
        Line(
            f"row {number}",
            _doc_id(row["index"]),
            json.dumps({name: _plain_text(row[name]) for name in _QUESTION_COLUMNS if not _is_empty(row.get(name))}),
            next((_plain_text(row[name]) for name in _TARGET_COLUMNS if not _is_empty(row.get(name))), ""),
            "" if _is_empty(row.get("prediction")) else _plain_text(row["prediction"]),
            {key: value for key, value in row.items() if key not in ("index", "prediction")},
        )
        for number, row in enumerate(rows, start=2 if path.suffix != ".json" else 1)
    ]
    return ResultFile(VLMEVALKIT, lines, (), _table_told(path))


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a table by column; cells of text files are texts."""
    if path.suffix == ".json":
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
            raise ValueError("expected a JSON list of objects, one a document")
        return value
    table: Sequence[Sequence[Any]]
    if path.suffix == ".xlsx":
        table = read_sheet(path)
    elif path.suffix in (".tsv", ".csv"):
        csv.field_size_limit(2**31 - 1)
        with path.open(encoding="utf-8", newline="") as file:
            table = list(csv.reader(file, delimiter="\t" if path.suffix == ".tsv" else ","))
    else:
        raise ValueError(f"expected .jsonl (lmms-eval) or .xlsx, .tsv, .csv, .json (VLMEvalKit), found {path.suffix!r}")
    if not table:
        raise ValueError("it is empty")
    head, *body = table
    names = [str(name) for name in head]
    uneven = [number for number, row in enumerate(body, start=2) if len(row) != len(names)]
    if uneven:
        raise ValueError(f"row {uneven[0]} has another number of cells than the {len(names)} columns")
    return [dict(zip(names, row, strict=True)) for row in body]


def _table_told(path: Path) -> dict[str, Any]:
    """Return the git hash of VLMEvalKit and the date, which the folder of an evaluation is named after."""
    match = _EVALUATION_ID.search(path.resolve().parent.name)
    return {"version": f"git {match[2]}", "date": match[1]} if match else {}


def _doc_id(value: Any) -> int | str:
    """Return an index as one value whatever file it stood in: 7, 7.0 and "7" are one document."""
    text = _plain_text(value)
    return int(text) if re.fullmatch(r"-?\d{1,15}", text) else text


def _plain_text(value: Any) -> str:
    """Return a cell or JSON value as a text that does not depend on the kind of file."""
    if isinstance(value, str):
        return value
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return json.dumps(value, ensure_ascii=False, sort_keys=True) if isinstance(value, list | dict) else str(value)


def _is_empty(value: Any) -> bool:
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))
