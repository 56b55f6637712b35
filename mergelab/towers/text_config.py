"""The causal-LM config that a family file derives from a vlm's config: fields alone, no model class is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mergelab.towers.layouts import text_config_of
from mergelab.towers.rules import Family, holds

NOT_THE_MODELS = ("architectures", "auto_map", "_name_or_path", "transformers_version", "_attn_implementation")
"""What a config says of its origin and code; the derived one says its own."""

PICTURES = ("mm_", "vision_", "image_", "audio_")
"""Prefixes of fields that custom code put beside those of the text model."""


def derived_config(config: Mapping[str, Any], family: Family | None) -> dict[str, Any] | None:
    """Return the fields of the causal-LM config, ``model_type`` among them, or None if the family derives none.

    Args:
        config: The vlm's ``config.json``.
        family: Its family. Its first ``export`` entry whose ``when`` holds is followed.
    """
    section = text_config_of(config, family)
    rule = next((rule for rule in (family.export if family is not None else ()) if holds(rule.when, section)), None)
    if rule is None:
        return None
    fields = own_fields(section, rule.drop, PICTURES if section is config else ())
    for own, other in rule.fields.items():
        if other in fields:
            fields[own] = fields.pop(other)
    for key in rule.halve:
        if isinstance(fields.get(key), int):
            fields[key] //= 2
    return {**fields, **rule.set, "model_type": rule.model_type or section.get("model_type", "")}


def nested_config(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the fields of the text config that custom code keeps inside its own; None if there is none."""
    section = text_config_of(config)
    return own_fields(section) if section is not config and "model_type" in section else None


def own_fields(
    section: Mapping[str, Any], dropped: Sequence[str] = (), prefixes: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return a config without its origin, the ``dropped`` fields, and those that begin with one of ``prefixes``."""
    return {
        key: value
        for key, value in section.items()
        if key not in (*NOT_THE_MODELS, *dropped) and not key.startswith(prefixes)
    }
