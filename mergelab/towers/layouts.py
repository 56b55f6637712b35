"""Find the text tower of one checkpoint: canonical names for its tensors, a role for every other one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from mergelab.errors import PairingError, problem_list
from mergelab.towers.generic import (
    BUFFER,
    HEAD_LEAF,
    HEAD_ROOTS,
    HEADLESS,
    REFUSED,
    REPAIRS,
    ROLES,
    STRIPPED,
    TEXT_CONFIG_KEYS,
    TOWER_LEAF,
    TOWER_ROOTS,
)

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


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

    @property
    def sees_pictures(self) -> bool:
        """True if the checkpoint has more than a text tower."""
        return any(part in ("vision", "projector") for part in self.roles.values())


def text_config_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the nested text config of a multimodal config, or the config itself."""
    for key in TEXT_CONFIG_KEYS:
        if isinstance(config.get(key), Mapping):
            nested: Mapping[str, Any] = config[key]
            return nested
    return config


def tie_flags(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return the ``tie_word_embeddings`` flags that a config states, outer before nested."""
    sections = (config, text_config_of(config)) if text_config_of(config) is not config else (config,)
    flags = (section.get("tie_word_embeddings") for section in sections)
    return tuple(flag for flag in flags if isinstance(flag, bool))


def locate_tower(tensors: Mapping[str, TensorLike], config: Mapping[str, Any], known: Collection[str] = ()) -> Tower:
    """Find the tower by its names.

    Args:
        tensors: Stored name -> header.
        config: The checkpoint's ``config.json``.
        known: Further canonical names that belong to a tower, for example those of the base.

    Raises:
        PairingError: No tower or two, a family that needs more than a prefix, tensors of unknown role, a
            tower without embedding, no head although the config says untied. All such tensors in one
            message.
    """
    refuse_families(tensors)
    stored: dict[str, str] = {}
    roles: dict[str, str] = {}
    roots: Counter[str] = Counter()
    problems: list[str] = []
    for name in tensors:
        root, canonical = canonical_name(name, known)
        if not canonical:
            role = role_of(name)
            if not role:
                problems.append(f"{name}: {tensors[name].dtype} {tensors[name].shape}, unknown role")
            roles[name] = role
        elif BUFFER.search(canonical):
            roles[name] = "extra"
        else:
            if root:
                roots[root] += 1
            if canonical in stored:
                problems.append(f"{name}: means {canonical}, and so does {stored[canonical]}")
            stored[canonical] = name
            roles[name] = "tower"
    if not roots:
        raise PairingError(no_tower(tensors))
    if len(roots) > 1:
        counts = ", ".join(f"{root}* ({count} tensors)" for root, count in roots.most_common())
        problems.insert(0, f"two text towers: {counts}")
    if EMBEDDING not in stored:
        problems.append(f"{EMBEDDING}: the tower has no embedding")
    flags = tie_flags(config)
    if HEAD not in stored and flags and not any(flags):
        problems.append(f"{HEAD}: not stored although the config says tie_word_embeddings false")
    if problems:
        heading = f"names that cannot be placed: {len(problems)}."
        advice = "This layout is not known; nothing is guessed."
        raise PairingError(problem_list(heading, first(problems), advice))
    return Tower(roots.most_common(1)[0][0], stored, roles, text_config_of(config), HEAD in stored)


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


def refuse_families(tensors: Mapping[str, TensorLike]) -> None:
    """Raise PairingError, by name, for a family whose tower needs more than a prefix."""
    for family, pattern, special in REFUSED:
        found = next((name for name in tensors if pattern.search(name)), None)
        if found is not None:
            raise PairingError(f"{found}: this is {family}, which {special}. That is not supported.")


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
