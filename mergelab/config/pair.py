"""A pair: base, vlm and maybe ancestor, and the protocol they are graded under.

What is in the checkpoints is not looked at here, nor whether a hub id exists.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_serializer

from mergelab.config.document import Document, read_document
from mergelab.config.packaged import list_pairs, package_folder
from mergelab.config.problems import did_you_mean, shown, validate
from mergelab.errors import RecipeError, problem_list

ProtocolName = Literal["bench-v1", "paper-instruct-v1", "paper-default-v1"]
Role = Literal["ancestor", "base", "vlm"]

BENCH_PAIR = "bench"
BENCH_PROTOCOL = "bench-v1"
ROLES: tuple[Role, ...] = ("ancestor", "base", "vlm")
AUTO = "auto"
PACKAGE_SCHEME = "package:"
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"

Name = Annotated[str, Field(pattern=NAME_PATTERN)]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


class Source(Document):
    """Where a model lies. In YAML a plain text, or a mapping with ``id`` and ``revision``."""

    id: Annotated[str, Field(min_length=1)]
    """A folder, a hub id (``Qwen/Qwen2.5-7B``), or ``package:PATH``, a folder inside the mergelab package."""

    revision: Annotated[str, Field(min_length=1)] | None = None
    """Commit, tag or branch of a hub id; null takes what the local cache or the hub calls main."""

    @model_serializer
    def _as_written(self) -> str | dict[str, str]:
        return self.id if self.revision is None else {"id": self.id, "revision": self.revision}

    @property
    def is_folder(self) -> bool:
        """True for a folder on this machine, False for a hub id."""
        return self.id.startswith(PACKAGE_SCHEME) or Path(self.id).is_absolute()

    @property
    def location(self) -> str:
        """The absolute path of the folder, or the hub id."""
        if self.id.startswith(PACKAGE_SCHEME):
            return str(package_folder() / self.id.removeprefix(PACKAGE_SCHEME))
        return self.id


class Pair(Document):
    """A pair as its YAML says it, with folders made absolute."""

    name: Name
    """How tables and the default run folder call the pair; letters, digits, dot, dash, underscore."""

    base: Source
    """The reference text LLM, whose text scores the merge should get back."""

    vlm: Source
    """The vision-language model (or a plain text checkpoint that stands for its tower)."""

    ancestor: Source | None = None
    """The pretrained checkpoint that base and tower both come from; null if unknown or not to be used."""

    family: Annotated[str, Field(min_length=1)] = AUTO
    """How the vlm's tensor names are mapped: auto reads it off the checkpoints; else a known family's name, or the path
    of a family file."""

    protocol: ProtocolName = "paper-instruct-v1"
    """Tasks, budgets, template and batch size; what ``evals: auto`` means for this pair."""

    @field_validator("base", "vlm", "ancestor", mode="before")
    @classmethod
    def _plain_text_is_an_id(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"id": value}
        if value is None or isinstance(value, (Mapping, Source)):
            return value
        raise ValueError(f"expected a folder, a hub id, or {{id: ..., revision: ...}}, found {shown(value)}")

    @property
    def sources(self) -> dict[Role, Source]:
        """The models that the pair has, by role, in run order: ancestor (if any), base, vlm."""
        ancestor: dict[Role, Source] = {} if self.ancestor is None else {"ancestor": self.ancestor}
        return {**ancestor, "base": self.base, "vlm": self.vlm}

    @property
    def is_bench(self) -> bool:
        """True for the pair that the bench tasks were made for."""
        return self.name == BENCH_PAIR


def load_pair(name_or_path: str | Path, beside: Path | None = None) -> Pair:
    """Return a pair by name or path.

    A path (with a slash or a YAML suffix) is read as it is; a name is looked up as ``pairs/NAME.yaml`` in
    the folder of the recipe, then among the shipped pairs.

    Args:
        name_or_path: For example ``bench``, ``qwen2.5-vl-7b``, ``my/pairs/mine.yaml``.
        beside: The folder of the recipe; relative paths start there. None: the current folder, shipped pairs
        only.

    Raises:
        RecipeError: Not found, or not a valid pair; all problems in one message.
    """
    path = find_pair(name_or_path, beside)
    document = read_document(path)
    if "method" in document or "merges" in document or "pair" in document:
        raise RecipeError(
            f"{path}: this is a recipe; a pair file (name, base, vlm, maybe ancestor) was expected. "
            "Give the recipe as the argument of the command and the pair as its `pair:` or with --pair."
        )
    pair, problems = validate(Pair, document, _unknown_key, {"name": "unnamed", "base": "?", "vlm": "?"})
    if pair is not None:
        given = {role: source for role, source in pair.sources.items() if source.id != "?"}
        anchored: dict[str, Any] = {
            role: _anchored(role, source, path.parent, problems) for role, source in given.items()
        }
        anchored["family"] = _family(pair.family, path.parent, problems)
        pair = pair.model_copy(update=anchored)
        problems += _cross_problems(pair)
    if problems or pair is None:
        advice = "The keys of a pair are name, base, vlm, ancestor, family and protocol."
        raise RecipeError(problem_list(f"{path}: this pair is not valid:", problems, advice))
    return pair


def pair_from_folders(base: str, vlm: str, ancestor: str | None = None, *, name: str | None = None) -> Pair:
    """Return the pair that ``--base``, ``--vlm`` and ``--ancestor`` name, graded under ``paper-instruct-v1``.

    Args:
        base: Folder (relative to the current one) or hub id of the reference text LLM.
        vlm: The same of the vision-language model.
        ancestor: The same of the common pretrained checkpoint, or None.
        name: Of the pair; None makes one from the last parts of vlm and base.

    Raises:
        RecipeError: Two of them are the same model, or one is empty.
    """
    given = {"ancestor": ancestor, "base": base, "vlm": vlm}
    problems = [f"{role}: is empty; give a folder or a hub id" for role, text in given.items() if text == ""]
    if not problems:
        sources = {
            role: _anchored(role, Source(id=text), Path.cwd(), problems)
            for role, text in given.items()
            if text is not None
        }
        pair = Pair(name=name or f"{_last_part(vlm)}-on-{_last_part(base)}", base=sources["base"], vlm=sources["vlm"])
        pair = pair.model_copy(update=sources)
        problems += _cross_problems(pair)
    if problems:
        raise RecipeError(problem_list("These models do not make a pair:", problems))
    return pair


def find_pair(name_or_path: str | Path, beside: Path | None = None) -> Path:
    """Return the file of a pair; see ``load_pair``."""
    if isinstance(name_or_path, Path) or is_path(name_or_path):
        path = absolute(str(name_or_path), beside)
        if path.is_file():
            return path
        raise RecipeError(f"pair {name_or_path}: no such file: {path}. Give the path of a pair file, or a pair's name.")
    pairs = list_pairs(beside)
    if name_or_path in pairs:
        return pairs[name_or_path]
    raise RecipeError(
        f"pair {name_or_path}: no pair has this name{did_you_mean(name_or_path, pairs)}. "
        f"Known are {', '.join(pairs)}; or give the path of a pair file (`mergelab pairs` lists them)."
    )


def is_path(text: str) -> bool:
    """Return True if ``text`` is meant as a path of a YAML file, not as a name."""
    return "/" in text or text.startswith("~") or text.endswith((".yaml", ".yml", ".json"))


def absolute(text: str, folder: Path | None) -> Path:
    """Return the path ``text``, taken relative to ``folder`` (None: the current one), made absolute."""
    try:
        path = Path(text).expanduser()
    except RuntimeError:  # ~name of nobody on this machine: then it is a folder of that name, or missing
        path = Path(text)
    return ((folder or Path.cwd()) / path).resolve()


def _anchored(role: str, source: Source, folder: Path, problems: list[str]) -> Source:
    """Make a folder absolute: anything that looks like a path, or that is a folder seen from ``folder``."""
    if source.id.startswith(PACKAGE_SCHEME):
        inside = Path(source.id.removeprefix(PACKAGE_SCHEME))
        if inside.is_absolute() or ".." in inside.parts or not inside.parts:
            problems.append(f"{role}: {shown(source.id)} must name a folder inside the mergelab package")
        anchored = source
    elif _HUB_ID.fullmatch(source.id) and not absolute(source.id, folder).is_dir():
        return source
    else:
        anchored = source.model_copy(update={"id": str(absolute(source.id, folder))})
    if source.revision is not None:
        problems.append(f"{role}.revision: only a hub id has revisions, and {shown(source.id)} is a folder")
    return anchored


def _family(family: str, folder: Path, problems: list[str]) -> str:
    """Make the path of a family file absolute; names of families are known to whoever reads the checkpoints."""
    if not is_path(family):
        return family
    path = absolute(family, folder)
    if not path.is_file():
        problems.append(f"family: no such file: {path}. Give the path of a family file, a family's name, or auto")
    return str(path)


def _cross_problems(pair: Pair) -> list[str]:
    problems = []
    seen: dict[tuple[str, str | None], str] = {}
    for role, source in pair.sources.items():
        key = (source.id, source.revision)
        if source.id != "?" and key in seen:
            problems.append(f"{role}: is the same model as {seen[key]} ({source.id}); there would be nothing to merge")
        seen.setdefault(key, role)
    if pair.protocol == BENCH_PROTOCOL and not pair.is_bench:
        problems.append(
            f"protocol: {BENCH_PROTOCOL} grades facts that only the bench pair was taught, and this pair is "
            f"{pair.name}; take paper-instruct-v1"
        )
    return problems


def _unknown_key(path: tuple[str | int, ...], value: object) -> str:
    known = Source.model_fields if len(path) > 1 else Pair.model_fields
    key = str(path[-1])
    name = ".".join(str(part) for part in path)
    if key == "revision":
        return f"{name}: belongs to one of the models: base: {{id: ..., revision: {shown(value)}}}"
    return f"{name}: unknown key{did_you_mean(key, known)}"


def _last_part(source: str) -> str:
    part = re.sub(r"[^A-Za-z0-9._-]", "-", absolute(source, None).name)
    return part.lstrip("._-") or "model"


def looks_like_pair(document: Mapping[str, Any]) -> bool:
    """Return True if a document that should be a recipe is a pair."""
    return "vlm" in document and "base" in document and not ({"method", "merges", "pair"} & document.keys())
