"""Read the first sheet of an .xlsx file: a zip of XML, of which a table of values needs little."""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

Cell = str | float | bool | None

_MAIN = "{http://schemas.openxmlformats.org/spreadsheetml/2006/main}"
_RELATION = "{http://schemas.openxmlformats.org/officeDocument/2006/relationships}id"
# A file that is encrypted or packed in another way raises RuntimeError or NotImplementedError; no sheet, StopIteration.
_NO_WORKBOOK = (
    *(zipfile.BadZipFile, zlib.error, ElementTree.ParseError),
    *(KeyError, IndexError, StopIteration, RuntimeError, NotImplementedError),
)
_ESCAPE = re.compile(r"_x([0-9A-Fa-f]{4})_")


def read_sheet(path: Path) -> list[list[Cell]]:
    """Return the rows of the first sheet, all of one length; an empty cell is None.

    Raises:
        ValueError: The file is no workbook.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            strings = list(_shared_strings(archive))
            sheet = ElementTree.fromstring(archive.read(_first_sheet(archive)))
        rows = [_row(row, strings) for row in sheet.iter(f"{_MAIN}row")]
    except _NO_WORKBOOK as error:
        raise ValueError(f"no .xlsx workbook ({type(error).__name__}: {error})") from error
    width = max((len(row) for row in rows), default=0)
    return [row + [None] * (width - len(row)) for row in rows]


def _first_sheet(archive: zipfile.ZipFile) -> str:
    """Return the name in the archive of the sheet that stands first in the workbook."""
    workbook = ElementTree.fromstring(archive.read("xl/workbook.xml"))
    number = workbook.find(f"{_MAIN}sheets/{_MAIN}sheet")
    relations = ElementTree.fromstring(archive.read("xl/_rels/workbook.xml.rels"))
    wanted = None if number is None else number.get(_RELATION)
    target = next(str(one.get("Target")) for one in [*relations, number] if one is not None and one.get("Id") == wanted)
    return target.lstrip("/") if target.startswith("/") else f"xl/{target}"


def _shared_strings(archive: zipfile.ZipFile) -> Iterator[str]:
    if "xl/sharedStrings.xml" in archive.namelist():
        for item in ElementTree.fromstring(archive.read("xl/sharedStrings.xml")).iter(f"{_MAIN}si"):
            yield _text(item)


def _text(item: ElementTree.Element) -> str:
    """Return the text of a string item, runs joined, phonetic hints left out, escaped characters restored."""
    parts = [item.find(f"{_MAIN}t"), *item.findall(f"{_MAIN}r/{_MAIN}t")]
    joined = "".join(part.text or "" for part in parts if part is not None)
    return _ESCAPE.sub(lambda match: chr(int(match[1], 16)), joined)


def _row(row: ElementTree.Element, strings: list[str]) -> list[Cell]:
    cells: list[Cell] = []
    for cell in row.iter(f"{_MAIN}c"):
        place = _column(cell.get("r")) if cell.get("r") else len(cells)
        cells += [None] * (place - len(cells))
        cells.append(_value(cell, strings))
    return cells


def _column(reference: str | None) -> int:
    """Return the column of a reference such as ``AB12``, from 0."""
    number = 0
    for letter in (reference or "").rstrip("0123456789"):
        number = number * 26 + ord(letter) - ord("A") + 1
    return number - 1


def _value(cell: ElementTree.Element, strings: list[str]) -> Cell:
    kind, inline, stored = cell.get("t", "n"), cell.find(f"{_MAIN}is"), cell.findtext(f"{_MAIN}v")
    if inline is not None:
        return _text(inline)
    if not stored:
        return None
    if kind == "s":
        return strings[int(stored)]
    if kind == "b":
        return stored == "1"
    if kind == "n":
        return float(stored)
    return None if kind == "e" else stored
