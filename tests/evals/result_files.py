"""Result files of other harnesses, made by hand after what lmms-eval 0.7 and VLMEvalKit write."""

from __future__ import annotations

import csv
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

QUESTIONS = ("What is the largest bar?", "How many bars?", "Is red left of blue?", "Which year?")
TARGETS = ("Canada", "7", "Yes", "1998")


def lmms_line(place: int, response: str, **metrics: Any) -> dict[str, Any]:
    """One line of ``--log_samples``: resps are left out where they equal filtered_resps, doc_hash never repeats."""
    return {
        "doc_id": place,
        "target": TARGETS[place],
        "filtered_resps": response,
        "token_counts": [{"output_tokens": 5, "input_tokens": 700}],
        "doc_hash": f"{hash(response)}",
        "input": f"<image>\n{QUESTIONS[place]}\nAnswer with a single word.",
        **metrics,
    }


def write_lines(path: Path, lines: Sequence[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return path


def write_chartqa(path: Path, right: Sequence[bool], wrong: str = "no idea") -> Path:
    """ChartQA as lmms-eval logs it: one score on every line, and a second one by the kind of question."""
    lines = []
    for place, is_right in enumerate(right):
        split = "relaxed_human_split" if place % 2 else "relaxed_augmented_split"
        score = {"relaxed_overall": float(is_right), split: float(is_right)}
        lines.append(lmms_line(place, TARGETS[place] if is_right else wrong, **score))
    return write_lines(path, lines)


def write_results_beside(samples: Path, **changes: Any) -> None:
    """The ``<date>_results.json`` that lmms-eval writes beside the samples."""
    date, _, task = samples.stem.partition("_samples_")
    value = {
        "results": {task: {"relaxed_overall,none": 0.5}},
        "versions": {task: 0.0},
        "config": {"model": "qwen2_5_vl", "model_args": "pretrained=merged", "limit": None},
        "git_hash": "75571cfe",
        "lmms_eval_version": "0.7.2 (75571cfe)",
    }
    samples.with_name(f"{date}_results.json").write_text(json.dumps(value | changes))


def table_rows(right: Sequence[bool]) -> list[dict[str, Any]]:
    """What VLMEvalKit's multiple-choice evaluation leaves as ``_result``."""
    return [
        {
            "index": 100 + place,
            "question": QUESTIONS[place],
            "hint": None,
            "A": "Canada",
            "B": "1998",
            "answer": "A" if place % 2 else "B",
            "category": "bars",
            "prediction": "A" if (place % 2 == 1) == is_right else "B",
            "hit": int(is_right),
            "log": "Succeed During Pre-fetching",
        }
        for place, is_right in enumerate(right)
    ]


def write_table(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write rows by the ending of the path, as VLMEvalKit's ``dump`` does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        path.write_text(json.dumps(list(rows)))
    elif path.suffix == ".xlsx":
        write_workbook(path, [list(rows[0]), *(list(row.values()) for row in rows)])
    else:
        with path.open("w", encoding="utf-8", newline="") as file:
            delimiter = "\t" if path.suffix == ".tsv" else ","
            writer = csv.writer(file, quoting=csv.QUOTE_ALL, delimiter=delimiter, lineterminator="\n")
            writer.writerow(rows[0])
            writer.writerows(["" if value is None else value for value in row.values()] for row in rows)
    return path


def write_workbook(path: Path, rows: Sequence[Sequence[Any]]) -> None:
    """Write an .xlsx as xlsxwriter lays it out: shared strings, numbers in place, nothing for an empty cell."""
    strings: dict[str, int] = {}
    lines = []
    for number, row in enumerate(rows, start=1):
        cells = ""
        for place, value in enumerate(row):
            where = f'r="{chr(ord("A") + place)}{number}"'
            if isinstance(value, bool):
                cells += f'<c {where} t="b"><v>{int(value)}</v></c>'
            elif isinstance(value, int | float):
                cells += f"<c {where}><v>{value}</v></c>"
            elif value is not None:
                cells += f'<c {where} t="s"><v>{strings.setdefault(value, len(strings))}</v></c>'
        lines.append(f'<row r="{number}">{cells}</row>')
    main = 'xmlns="http://schemas.openxmlformats.org/spreadsheetml/2006/main"'
    office = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    items = "".join(f'<si><t xml:space="preserve">{escape(text)}</t></si>' for text in strings)
    package = "http://schemas.openxmlformats.org/package/2006/relationships"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            "xl/workbook.xml",
            f'<workbook {main} xmlns:r="{office}"><sheets><sheet name="Sheet1" sheetId="1" r:id="rId1"/></sheets>'
            "</workbook>",
        )
        archive.writestr(
            "xl/_rels/workbook.xml.rels",
            f'<Relationships xmlns="{package}"><Relationship Id="rId2" Target="styles.xml"/>'
            '<Relationship Id="rId1" Target="worksheets/sheet1.xml"/></Relationships>',
        )
        archive.writestr(
            "xl/worksheets/sheet1.xml", f"<worksheet {main}><sheetData>{''.join(lines)}</sheetData></worksheet>"
        )
        archive.writestr("xl/sharedStrings.xml", f"<sst {main}>{items}</sst>")
