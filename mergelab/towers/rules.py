"""Families as data: what one family of checkpoints needs beyond the generic prefix table, read from YAML.

A family file has no code, only regular expressions, names and config fields. It is applied to one checkpoint in
this order: its roles and adapters take tensors out, its renames turn the others into names that the generic table
(``mergelab.towers.generic``) reads, and fused tensors are described as parts that can be taken out of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BeforeValidator, Field, field_validator, model_validator

from mergelab.config.document import Document, read_document
from mergelab.config.problems import did_you_mean, validate
from mergelab.errors import RecipeError, problem_list

FOLDER = Path(__file__).parent / "families"

ItemT = TypeVar("ItemT")
Items = Annotated[tuple[ItemT, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)]
Regex = re.Pattern[str]
When = dict[str, Any]
"""Fields of the text config with the value, or one of a list of values, that they must have; absent counts as false."""


class Detection(Document):
    """How a checkpoint is recognised. Keys decide; ``model_type`` only breaks ties or stands where keys say nothing."""

    keys_all: Items[Regex] = ()
    """Each must be found in some stored name."""
    keys_none: Items[Regex] = ()
    """None may be found in any stored name."""
    model_type: Items[str] = ()
    """``model_type`` at the top of the config."""

    @model_validator(mode="after")
    def _says_something(self) -> Detection:
        if not self.keys_all and not self.model_type:
            raise ValueError("needs keys_all or model_type, or no checkpoint is ever recognised")
        return self


class Roles(Document):
    """Stored names of tensors that are not the tower's; asked in this order before the generic roles, first match."""

    vision: Items[Regex] = ()
    projector: Items[Regex] = ()
    extra: Items[Regex] = ()
    """What lies beside or inside the tower and has no counterpart in a text model: copied."""


class Rename(Document):
    """``[pattern, replacement]`` as ``re.sub`` takes them, applied to stored names of the tower in order."""

    pattern: Regex
    replacement: str
    when: When = Field(default_factory=dict)


class Split(Document):
    r"""A fused projection. The first name segment in what ``match`` finds is replaced by each name of ``into``.

    ``match: \.att_proj\.`` with ``into: [q_proj, k_proj]`` makes ``a.att_proj.weight`` of ``a.q_proj.weight`` above
    ``a.k_proj.weight``. ``match`` sees names after the renames.
    """

    match: Regex
    into: Annotated[Items[str], Field(min_length=2)]
    """In stored order."""
    sizes: Literal["even"] | Items[str | int] = "even"
    """Rows of each: ``even``, or a list of numbers, ``q`` (heads x head size), ``kv`` (key-value heads x head size)."""
    grouped: bool = False
    """InternLM2's order: for every key-value head its query heads, then one key head, then one value head."""

    @model_validator(mode="after")
    def _sizes_fit(self) -> Split:
        if self.grouped and len(self.into) != 3:
            raise ValueError("grouped: needs three names in into: query, key, value")
        if self.sizes == "even":
            return self
        if len(self.sizes) != len(self.into):
            raise ValueError(f"sizes: {len(self.sizes)} for {len(self.into)} names in into")
        if odd := [size for size in self.sizes if isinstance(size, str) and size not in ("q", "kv")]:
            raise ValueError(f"sizes: expected q, kv or a number, found {', '.join(odd)}")
        return self


class Experts(Document):
    """Experts stored in one tensor. What ``match`` finds becomes ``.experts.N.NAME.weight`` (``.bias`` for vectors).

    With ``stacked: first`` the tensor is [experts, rows, columns] or its transpose per expert, told by the hidden
    size; biases are [experts, rows]. With ``stacked: rows`` the experts lie below each other in one matrix.
    """

    match: Regex
    into: Annotated[Items[str], Field(min_length=1)]
    """``[gate_proj, up_proj]`` or ``[down_proj]``, in stored order."""
    stacked: Literal["first", "rows"] = "first"
    transposed: bool = False
    """Of ``stacked: rows``: every expert's block is stored transposed."""
    interleaved: bool = False
    """The rows of the names of ``into`` alternate instead of following each other."""


class Layers(Document):
    """Layers of the vlm that its base does not have."""

    drop: str
    """Field of the text config that lists them."""
    own: Regex
    """A tensor that only such a layer has; it must agree with the list."""


class Lora(Document):
    """Linear layers that carry adapters; the tower is what they wrap, the adapters are copied."""

    wrapped: Regex
    """Taken out of stored names."""
    adapters: Regex


class Export(Document):
    """How the config of a plain causal LM is made from the text config; the first entry whose ``when`` holds."""

    when: When = Field(default_factory=dict)
    model_type: str = ""
    """Empty: the text config's own."""
    drop: Items[str] = ()
    fields: dict[str, str] = Field(default_factory=dict)
    """Field of the causal LM -> field of the text config under another name."""
    halve: Items[str] = ()
    """Fields that count gate and up together."""
    set: dict[str, Any] = Field(default_factory=dict)


class Family(Document):
    """One family of checkpoints."""

    family: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")]
    covers: str = ""
    """Which models, for people."""
    detect: Detection
    roles: Roles = Roles()
    rename: Items[Rename] = ()
    """In YAML also ``[pattern, replacement]`` and ``{when: ..., rename: [[pattern, replacement], ...]}``."""
    split: Items[Split] = ()
    experts: Items[Experts] = ()
    layers: Layers | None = None
    lora: Lora | None = None
    text_config: Items[str] = ()
    """Where the config keeps the text config: dotted paths, the first that exists; ``''`` is the top level."""
    export: Items[Export] = ()
    notes: Items[str] = ()
    """What a user must know; ``mergelab check`` prints them."""
    checked: Literal["tiny class", "hand-made names", "inferred", "not checked"] = "not checked"
    """How far the file was checked: against a tiny random model of the real class, or names written by hand."""

    @field_validator("rename", mode="before")
    @classmethod
    def _flatten(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        flat: list[Any] = []
        for entry in value:
            inner = entry.get("rename") if isinstance(entry, dict) else None
            if isinstance(inner, list) and set(entry) <= {"when", "rename"}:
                flat += [_as_rename(pair, entry.get("when", {})) for pair in inner]
            else:
                flat.append(_as_rename(entry, {}))
        return flat

    @field_validator("export", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        return [value] if isinstance(value, dict) else value

    def to_yaml(self) -> str:
        """Return the family as a YAML document that ``parse_family`` reads back."""
        content = self.model_dump(mode="json", exclude_defaults=True)
        if "rename" in content:
            content["rename"] = [
                [entry["pattern"], entry["replacement"]] if "when" not in entry else entry
                for entry in content["rename"]
            ]
        return yaml.safe_dump(content, default_flow_style=None, sort_keys=False, allow_unicode=True, width=110)


def _as_rename(entry: Any, when: Any) -> Any:
    if isinstance(entry, list) and len(entry) == 2:
        return {"pattern": entry[0], "replacement": entry[1], "when": when}
    return {**entry, "when": {**when, **entry.get("when", {})}} if isinstance(entry, dict) and when else entry


def holds(when: Mapping[str, Any], text_config: Mapping[str, Any]) -> bool:
    """Say whether a text config has the values that ``when`` asks for; an absent field counts as false."""
    return all(
        (text_config.get(key) or False) in (value if isinstance(value, list) else [value or False])
        for key, value in when.items()
    )


def parse_family(document: Mapping[str, Any], where: str) -> Family:
    """Return the family that a document describes.

    Args:
        document: As YAML reads it.
        where: Names the document in errors.

    Raises:
        RecipeError: With everything that is wrong with it.
    """
    family, problems = validate(Family, document, _unknown_key, {"family": "unnamed", "detect": {"model_type": ["?"]}})
    if problems or family is None:
        advice = f"The keys of a family are {', '.join(Family.model_fields)}."
        raise RecipeError(problem_list(f"{where}: this family is not valid:", problems, advice))
    if problems := [f"{name}: {text}" for name, text in _replacements(family)]:
        raise RecipeError(problem_list(f"{where}: this family is not valid:", problems))
    return family


def read_family(path: Path) -> Family:
    """Return the family of a YAML file.

    Raises:
        RecipeError: The file cannot be read, or is no family; all problems at once.
    """
    return parse_family(read_document(path), str(path))


@cache
def shipped_families() -> tuple[Family, ...]:
    """Return the families that come with mergelab, by name.

    Raises:
        RecipeError: A file is damaged.
    """
    return tuple(read_family(path) for path in sorted(FOLDER.glob("*.yaml")))


def find_family(name_or_path: str, families: Sequence[Family] | None = None) -> Family:
    """Return a family by its name, or from a YAML file.

    Raises:
        RecipeError: There is none, or the file is not a family.
    """
    if "/" in name_or_path or name_or_path.endswith((".yaml", ".yml")):
        return read_family(Path(name_or_path))
    known = {family.family: family for family in (shipped_families() if families is None else families)}
    if name_or_path in known:
        return known[name_or_path]
    raise RecipeError(
        f"family {name_or_path}: no family has this name{did_you_mean(name_or_path, known)}. "
        f"Known are {', '.join(known)}; or give the path of a family file."
    )


def _replacements(family: Family) -> list[tuple[str, str]]:
    """Return what is wrong with the replacements, which only ``re`` can tell."""
    problems = []
    for number, rename in enumerate(family.rename):
        try:
            re.sub(rename.pattern.pattern + "|", rename.replacement, "")
        except (re.error, IndexError) as error:
            problems.append((f"rename.{number}", f"replacement {rename.replacement!r}: {error}"))
    return problems


def _unknown_key(path: tuple[str | int, ...], value: object) -> str:
    del value
    model: Any = Family
    for part in path[:-1]:
        if isinstance(part, str):
            model = _BLOCKS.get(part, model)
    return f"{'.'.join(map(str, path))}: unknown key{did_you_mean(str(path[-1]), model.model_fields)}"


_BLOCKS: dict[str, type[Document]] = {
    "detect": Detection,
    "roles": Roles,
    "rename": Rename,
    "split": Split,
    "experts": Experts,
    "layers": Layers,
    "lora": Lora,
    "export": Export,
}
