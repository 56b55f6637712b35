"""Pictures of documents: read from files or base64, known by their content, opened when they are shown.

lm-eval keeps decoded pictures in its documents, and its document hash then contains a memory address: two runs over
the same data would never pair. Here a picture in a document is the SHA-256 of its bytes.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mergelab.errors import RecipeError, problem_list

if TYPE_CHECKING:
    from PIL.Image import Image

_SHOWN = 5


class Picture(str):
    """One picture; as a text it is the SHA-256 of its bytes, so that it hashes, pairs and clusters by content."""

    content: bytes

    def __new__(cls, content: bytes) -> Picture:
        """Return the picture of an encoded image file (PNG, JPEG, ...)."""
        picture = super().__new__(cls, hashlib.sha256(content).hexdigest())
        picture.content = content
        return picture

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (self.content,)

    def encoded(self) -> str:
        """Return the base64 of its bytes, as ``read_pictures`` takes it."""
        return base64.b64encode(self.content).decode("ascii")

    def open(self) -> Image:
        """Return the decoded picture, turned as its EXIF data say, as a data set of the hub would hand it over.

        Raises:
            RecipeError: Its bytes are no picture.
        """
        try:
            return _decoded(self.content)
        except Exception as error:  # the formats raise kinds of their own
            raise RecipeError(
                f"picture {self[:12]}: cannot be decoded, {_why(error)}. Replace its document."
            ) from error


def _decoded(content: bytes) -> Image:
    from PIL import ExifTags, Image, ImageOps

    image: Image.Image = Image.open(io.BytesIO(content))
    image.load()
    if image.getexif().get(ExifTags.Base.Orientation) is not None:
        image = ImageOps.exif_transpose(image)
    return image


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(' <')[0]}"


def read_pictures(
    task: str, source: Path, fields: Sequence[str], splits: Mapping[str, list[dict[str, Any]]]
) -> dict[str, Picture]:
    """Read the pictures that local documents name, and leave their hashes in the documents.

    Args:
        task: The task they are for, used in messages.
        source: The JSONL file, or the folder of splits; paths are relative to where the JSONL is.
        fields: Fields that may hold a picture: a path, base64, or a ``data:`` URL. A missing one becomes None.
        splits: Split -> documents; changed in place.

    Returns:
        Hash -> picture.

    Raises:
        RecipeError: Pictures are missing or cannot be read; all are counted and the first ones named.
    """
    folder = source if source.is_dir() else source.parent
    pictures: dict[str, Picture] = {}
    problems: list[str] = []
    for split, documents in splits.items():
        for place, document in enumerate(documents, start=1):
            for name in fields:
                value = document.get(name)
                document[name] = None
                if value is None:
                    continue
                found = _read(value, folder)
                if isinstance(found, Picture):
                    document[name] = str.__str__(found)
                    pictures[document[name]] = found
                else:
                    problems.append(f"{split} document {place}, field {name}: {found}")
    if problems:
        raise RecipeError(
            problem_list(
                f"task {task}: {source}: {len(problems)} pictures cannot be read.",
                [*problems[:_SHOWN], *([f"{len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else [])],
                "Write a path relative to the JSONL file, or the file's base64.",
            )
        )
    return pictures


def _read(value: object, folder: Path) -> Picture | str:
    """Return the picture that a field names, or what is wrong with it."""
    if not isinstance(value, str) or not value:
        return f"expected a path or base64, found {type(value).__name__}"
    encoded = value.partition(",")[2] if value.startswith("data:") else value
    content = None
    if not value.startswith("data:"):
        # No such file; a name too long or with a null byte, as base64 may be.
        with contextlib.suppress(OSError, ValueError):
            content = (folder / value).read_bytes()
    if content is None:
        try:
            content = base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            return f"no file {folder / value[:80]}, and no base64"
    fault = _fault(content)
    if fault is None:
        return Picture(content)
    looks_like_a_path = len(value) < 80 and not value.startswith("data:")
    return f"no picture at {folder / value}, {fault}" if looks_like_a_path else f"its base64 is no picture, {fault}"


def _fault(content: bytes) -> str | None:
    """Return why bytes are no picture, decoded to the last row; None if they are one."""
    try:
        _decoded(content)
    except Exception as error:  # the formats raise kinds of their own
        return _why(error)
    return None


def attach(
    documents: Iterable[Mapping[str, Any]], fields: Sequence[str], pictures: Mapping[str, Picture]
) -> list[dict[str, Any]]:
    """Return documents whose picture fields hold ``Picture`` or None.

    Args:
        documents: As a data set gives them undecoded: the hash of a local picture, or the hub's
            ``{"bytes": ..., "path": ...}``.
        fields: Fields that hold pictures.
        pictures: Hash -> local picture.
    """
    return [
        {**document, **{name: _attached(document[name], pictures) for name in fields if name in document}}
        for document in documents
    ]


def _attached(value: Any, pictures: Mapping[str, Picture]) -> Picture | None:
    if isinstance(value, Mapping):
        content = value.get("bytes")
        return Picture(content if content is not None else Path(value["path"]).read_bytes())
    return None if value is None else pictures[value]


def check_shown(task: Any, name: str, documents: Sequence[Mapping[str, Any]]) -> None:
    """Refuse documents that show no picture, or name one that they do not have.

    Raises:
        RecipeError: All of them are counted and the first ones named.
    """
    problems = []
    for place, document in enumerate(documents):
        shown = task.doc_to_image(document)
        lacking = [number for number, picture in enumerate(shown, start=1) if not isinstance(picture, Picture)]
        if not shown:
            problems.append(f"document {place} shows no picture")
        elif lacking:
            problems.append(f"document {place} lacks picture {lacking[0]} of the {len(shown)} that it shows")
    if problems:
        more = [f"{len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        raise RecipeError(problem_list(f"task {name}: pictures are missing.", [*problems[:_SHOWN], *more]))
