"""Find the text tower of one checkpoint: canonical names for its tensors, a role for every other one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from mergelab.errors import PairingError, problem_list
from mergelab.towers.detection import choose_family
from mergelab.towers.generic import (
    ADAPTERS,
    BUFFER,
    HEAD_LEAF,
    HEAD_ROOTS,
    HEADLESS,
    PACKED,
    REPAIRS,
    ROLES,
    STRIPPED,
    TEXT_CONFIG_KEYS,
    TOWER_LEAF,
    TOWER_ROOTS,
)
from mergelab.towers.parts import EMBEDDING, Part, UnfitError, find_parts
from mergelab.towers.rules import Family, Layers, holds

HEAD = "lm_head.weight"
LAYER = re.compile(r"model\.layers\.(\d+)\.")


class TensorLike(Protocol):
    """What is asked of a tensor here; ``checkpoints.TensorHeader`` fits."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes."""

    @property
    def dtype(self) -> str:
        """Code of the safetensors format."""


@dataclass(frozen=True)
class Tower:
    """The text tower of one checkpoint."""

    layout: str
    """Prefix of the tower's names, ``model.`` for a plain text checkpoint."""
    stored: Mapping[str, str]
    """Canonical name -> stored name, head included."""
    roles: Mapping[str, str]
    """Stored name of every tensor -> tower, vision, projector or extra (buffers, multi-token prediction)."""
    text_config: Mapping[str, Any]
    """The part of the config that describes the tower; may be sparse."""
    has_head: bool
    """Whether a head is stored. A stored head beats any flag; without one the head is the embedding."""
    family: Family | None = None
    """The family file that was applied; None: the generic prefix table was enough."""
    parts: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)
    """Canonical name of a fused tensor -> the weights it is made of. Fused tensors stand in ``stored``."""

    @property
    def sees_pictures(self) -> bool:
        """True if the checkpoint has more than a text tower."""
        return any(part in ("vision", "projector") for part in self.roles.values())


def text_config_of(config: Mapping[str, Any], family: Family | None = None) -> Mapping[str, Any]:
    """Return the nested text config of a multimodal config, or the config itself; a family may say where it is."""
    for path in (*(family.text_config if family is not None else ()), *TEXT_CONFIG_KEYS):
        section: Any = config
        for key in path.split(".") if path else ():
            section = section.get(key) if isinstance(section, Mapping) else None
        if isinstance(section, Mapping):
            return section
    return config


def tie_flags(config: Mapping[str, Any], family: Family | None = None) -> tuple[bool, ...]:
    """Return the ``tie_word_embeddings`` flags that a config states, outer before nested."""
    nested = text_config_of(config, family)
    sections = (config, nested) if nested is not config else (config,)
    flags = (section.get("tie_word_embeddings") for section in sections)
    return tuple(flag for flag in flags if isinstance(flag, bool))


def locate_tower(
    tensors: Mapping[str, TensorLike],
    config: Mapping[str, Any],
    known: Collection[str] = (),
    family: Family | None = None,
) -> Tower:
    """Find the tower by its names.

    Args:
        tensors: Stored name -> header.
        config: The checkpoint's ``config.json``.
        known: Further canonical names that belong to a tower, for example those of the base.
        family: What to apply besides the generic table; None asks the shipped family files.

    Raises:
        PairingError: No tower or two, quantised weights, tensors of unknown role, fused tensors that cannot be cut, a
            tower without embedding, no head although the config says untied. All such tensors in one message.
    """
    refuse_packed(tensors)
    if family is None:
        family = choose_family(tensors, config)
    if family is None or family.lora is None:
        refuse_adapters(tensors)
    text_config = text_config_of(config, family)
    naming = Naming(family, text_config, known)
    stored: dict[str, str] = {}
    roles: dict[str, str] = {}
    roots: Counter[str] = Counter()
    problems: list[str] = []
    for name in tensors:
        role, root, canonical = naming.place(name)
        roles[name] = role
        if not role:
            problems.append(f"{name}: {tensors[name].dtype} {tensors[name].shape}, unknown role")
        elif role == "tower":
            if root:
                roots[root] += 1
            if canonical in stored:
                problems.append(f"{name}: means {canonical}, and so does {stored[canonical]}")
            stored[canonical] = name
    if not roots:
        raise PairingError(no_tower(tensors))
    if len(roots) > 1:
        counts = ", ".join(f"{root}* ({count} tensors)" for root, count in roots.most_common())
        problems.insert(0, f"two text towers: {counts}")
    if family is not None and family.layers is not None:
        stored = without_inserted(stored, roles, family.layers, text_config, problems)
    if EMBEDDING not in stored:
        problems.append(f"{EMBEDDING}: the tower has no embedding")
    flags = tie_flags(config, family)
    if HEAD not in stored and flags and not any(flags):
        problems.append(f"{HEAD}: not stored although the config says tie_word_embeddings false")
    shapes = {name: tuple(tensors[own].shape) for name, own in stored.items()}
    problems += odd_tables(stored, shapes)
    parts: dict[str, tuple[Part, ...]] = {}
    if not problems:  # sizes are read off the shapes
        try:
            parts = find_parts(family, shapes, text_config)
        except UnfitError as error:
            problems.append(str(error))
    if problems:
        heading = f"names that cannot be placed: {len(problems)}."
        advice = "This layout is not known; nothing is guessed."
        if family is not None:
            advice = f"Read as family {family.family}, which this checkpoint does not fit."
        raise PairingError(problem_list(heading, first(problems), advice))
    return Tower(roots.most_common(1)[0][0], stored, roles, text_config, HEAD in stored, family, parts)


def odd_tables(stored: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """Return what is wrong with the shapes of embedding and head, whose rows are tokens."""
    problems = []
    for name, rank in ((EMBEDDING, 2), (HEAD, 2), ("lm_head.bias", 1)):
        shape = shapes.get(name)
        if shape is not None and (len(shape) != rank or 0 in shape):
            expected = "rows and columns" if rank == 2 else "one number for every row"
            problems.append(f"{stored[name]}: shape {shape}, expected {expected}")
    return problems


@dataclass(frozen=True)
class Naming:
    """What a stored name means in one checkpoint."""

    family: Family | None
    text_config: Mapping[str, Any]
    known: Collection[str] = ()

    def place(self, name: str) -> tuple[str, str, str]:
        """Return role ("" if unknown), tower root and canonical name; the last two are empty outside the tower."""
        family, inner = self.family, name
        if family is not None:
            for role in ("vision", "projector", "extra"):
                if any(pattern.search(name) for pattern in getattr(family.roles, role)):
                    return role, "", ""
            if family.lora is not None:
                if family.lora.adapters.search(name):
                    return "extra", "", ""
                inner = family.lora.wrapped.sub(".", inner)
            for rename in family.rename:
                if holds(rename.when, self.text_config):
                    inner = rename.pattern.sub(rename.replacement, inner)
        root, canonical = canonical_name(inner, self.known)
        if not canonical:
            return role_of(inner), "", ""
        return ("extra", "", "") if BUFFER.search(canonical) else ("tower", root, canonical)


def without_inserted(
    stored: Mapping[str, str],
    roles: dict[str, str],
    layers: Layers,
    text_config: Mapping[str, Any],
    problems: list[str],
) -> dict[str, str]:
    """Take inserted layers out of a tower and count the others anew; their role becomes extra."""
    owning = {int(found[1]) for name in stored if layers.own.search(name) and (found := LAYER.match(name))}
    listed = text_config.get(layers.drop)
    if isinstance(listed, list) and set(listed) != owning:
        problems.append(f"config {layers.drop} {listed}: the layers that differ from the others are {sorted(owning)}")
    kept: dict[str, str] = {}
    for name, own in stored.items():
        layer = LAYER.match(name)
        if layer is None:
            kept[name] = own
        elif int(layer[1]) in owning:
            roles[own] = "extra"
        else:
            number = int(layer[1]) - sum(inserted < int(layer[1]) for inserted in owning)
            kept[f"model.layers.{number}.{name[layer.end() :]}"] = own
    return kept


def canonical_name(name: str, known: Collection[str] = ()) -> tuple[str, str]:
    """Return layout ("" for a head) and canonical name of a tower tensor, ("", "") for any other."""
    for pattern in HEAD_ROOTS:
        match = pattern.match(name)
        if match and HEAD_LEAF.fullmatch(name[match.end() :]):
            return "", "lm_head." + name[match.end() :]
    for root, pattern in TOWER_ROOTS:
        match = pattern.match(name)
        if match:
            rest = name[match.end() :]
            if TOWER_LEAF.fullmatch(rest) or "model." + rest in known:
                return root, "model." + rest
    return "", ""


def repaired(name: str) -> str:
    """Return a stored name as it was before transformers 5.4 or 5.5 corrupted it; any other name as it is."""
    for pattern, replacement in REPAIRS.items():
        name = re.sub(pattern, replacement, name)
    return name


def role_of(name: str) -> str:
    """Return vision, projector or extra for a tensor outside the tower, empty if unknown."""
    match = STRIPPED.match(name)
    rest = name[match.end() :] if match else name
    return next((role for role, pattern in ROLES if pattern.match(rest)), "")


def refuse_packed(tensors: Mapping[str, TensorLike]) -> None:
    """Raise PairingError for quantised weights, whatever their family."""
    found = next((name for name in tensors if PACKED.search(name)), None)
    if found is not None:
        raise PairingError(
            f"{found}: these are quantised weights, which store packed numbers. Use the unquantised checkpoint."
        )


def refuse_adapters(tensors: Mapping[str, TensorLike]) -> None:
    """Raise PairingError for adapters that no family speaks of: they are part of what the model computes."""
    found = next((name for name in tensors if ADAPTERS.search(name)), None)
    if found is not None:
        raise PairingError(f"{found}: LoRA adapters lie beside the weights. Fold them in first.")


def no_tower(tensors: Mapping[str, TensorLike]) -> str:
    """Word the refusal of a checkpoint without a tower."""
    headless = next((name for name in tensors if HEADLESS.match(name)), None)
    if headless:
        return (
            f"{headless}: no text tower; the names have no prefix, as when a model is saved without its "
            "causal-LM class. Save it again from AutoModelForCausalLM."
        )
    tried = ", ".join(f"{root}layers.0.*" for root, _ in TOWER_ROOTS)
    found = ", ".join(list(tensors)[:3])
    return f"no text tower among {len(tensors)} tensors: expected {tried}; found {found}."


def first(problems: list[str], limit: int = 8) -> list[str]:
    """Return the first problems, and how many more there are."""
    more = len(problems) - limit
    return problems if more <= 0 else [*problems[:limit], f"... ({more} more)"]
