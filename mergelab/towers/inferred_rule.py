"""An inferred tower as a family: the rules that say in YAML what ``mergelab.towers.inference`` found."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from mergelab.towers.inference import Inference
from mergelab.towers.modules import KINDS, Operation, Option, tail
from mergelab.towers.rules import Family, parse_family
from mergelab.towers.stacks import BASE_STACK, template

NAME = "inferred"
ROLE_OF = {"vision": "vision", "projector": "projector", "extra": "extra", "other": "extra", "unknown": "extra"}
"""Role in the family of every role in the report: whatever is not understood is copied."""

EXPERT_WORDS = {
    **{"gate_proj": "gate", "up_proj": "up", "down_proj": "down"},
    **{"w1": "gate", "w3": "up", "w2": "down"},
}
"""What the modules of experts are for; the name of a stack tells which side is the hidden size."""


@dataclass(frozen=True)
class Setting:
    """What is written around the renames: where the text config is, what the others are, whom it was made for."""

    roles: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """As ``role_rules`` gives them."""
    text_config: str = ""
    """Dotted path in the config; empty where it is found without being told."""
    model_type: str = ""
    """Of the causal LM, where the text config does not name it."""
    covers: str = ""
    vlm_type: str = ""
    """``model_type`` of the vlm."""
    base: Family | None = None
    """Base's, where it keeps fused tensors that the vlm has under the same names: they are made of the same parts."""


def family_of(inference: Inference, operations: Option, outside: Mapping[str, str], setting: Setting) -> Family:
    """Return the family that places a tower as inferred.

    Args:
        inference: What names and shapes say.
        operations: One option of every choice, and what is settled.
        outside: Canonical name -> stored name of what lies beside the layers.
        setting: The rest of the document.
    """
    own = {} if setting.base is None else setting.base.model_dump(mode="json", exclude_defaults=True)
    document: dict[str, Any] = {
        "family": NAME,
        "covers": setting.covers,
        "detect": {
            "keys_all": keys(inference, operations),
            **({"model_type": [setting.vlm_type]} if setting.vlm_type else {}),
        },
        "roles": {role: list(patterns) for role, patterns in setting.roles.items()},
        "rename": [
            *([f"^{re.escape(stored)}$", name] for name, stored in outside.items() if stored != name),
            *stack_renames(inference.prefix),
            *leaf_renames(operations),
        ],
        "split": own.get("split", [])
        + [split_rule(operation) for operation in operations if operation.how in ("rows", "grouped")],
        "experts": own.get("experts", [])
        + [expert_rule(operation) for operation in operations if operation.how in ("stacked", "transposed")],
        "text_config": [setting.text_config] if setting.text_config else [],
        "export": {"model_type": setting.model_type} if setting.model_type else {},
        "checked": "inferred",
    }
    if inference.dropped:
        numbers = "|".join(map(str, inference.dropped))
        document["layers"] = {"drop": "", "own": f"^{re.escape(BASE_STACK)}\\.(?:{numbers})\\."}
    return parse_family({key: value for key, value in document.items() if value}, "the inferred family")


def keys(inference: Inference, operations: Iterable[Operation]) -> list[str]:
    """Return what tells such a checkpoint from others: its layers, and in them what the base calls otherwise."""
    stack = f"^{re.escape(inference.prefix)}\\.\\d+\\."
    named = [
        re.escape(op.source.name).replace(r"\*", r"\d+") + (r"\." if all(op.source.kinds) else "$")
        for op in operations
        if op.source.name != op.parts[0].name
    ]
    return [stack + name for name in named] or [stack]


def stack_renames(prefix: str) -> list[list[str]]:
    """Return the rename of the layers' prefix, if it is another."""
    return [] if prefix == BASE_STACK else [[f"^{re.escape(prefix)}\\.(\\d+)\\.", f"{BASE_STACK}.\\1."]]


def leaf_renames(operations: Iterable[Operation]) -> list[list[str]]:
    """Return the renames inside the layers, in an order in which none renames the result of another."""
    wanted: dict[str, str] = {}
    for operation in operations:
        module, name = operation.source, canonical_source(operation)
        if module.kinds == operation.parts[0].kinds or operation.how in ("stacked", "transposed"):
            end = "." if all(module.kinds) else ""
            wanted[module.name + end] = name + end
        else:  # other names of the tensors too
            for kind in module.kinds:
                wanted[f"{module.name}.{kind}".removesuffix(".")] = f"{name}.{KINDS.get(kind, kind)}"
    wanted = {source: target for source, target in wanted.items() if source != target}
    rules: list[list[str]] = []
    aside: dict[str, str] = {}
    while wanted:
        free = [source for source, target in wanted.items() if target not in wanted]
        if not free:  # a ring, two names swapped: one of them steps aside
            source = next(iter(wanted))
            parent = source.rstrip(".").rpartition(".")[0]
            place = f"{parent}.inferred_{len(aside)}".lstrip(".") + ("." if source.endswith(".") else "")
            rules.append(leaf_rename(source, place))
            aside[place] = wanted.pop(source)
        for source in free:
            rules.append(leaf_rename(source, wanted.pop(source)))
    return rules + [leaf_rename(source, target) for source, target in aside.items()]


def canonical_source(operation: Operation) -> str:
    """Return what a module is called before it is split: beside the base's modules, experts in the usual words."""
    if operation.how == "rename":
        return operation.parts[0].name
    parent, parts = operation.parts[0].name.rpartition(".")[0], operation.parts
    if operation.how in ("rows", "grouped"):
        return f"{parent}.{operation.source.name.rpartition('.')[2]}"
    return f"{parent.removesuffix('.*')}.{'_'.join(EXPERT_WORDS[tail(part)] for part in parts)}_proj"


def leaf_rename(source: str, target: str) -> list[str]:
    """Return one rename inside the layers; the numbers of experts stay. A full stop at the end stands for more."""
    numbers = count(2)
    pattern = re.escape(source).replace(r"\*", r"(\d+)") + ("" if source.endswith(".") else "$")
    replacement = re.sub(r"\*", lambda _: f"\\{next(numbers)}", target)
    return [f"^({re.escape(BASE_STACK)}\\.\\d+)\\.{pattern}", f"\\1.{replacement}"]


def split_rule(operation: Operation) -> dict[str, Any]:
    """Return the rule for projections that were fused along rows."""
    last = [tail(part) for part in operation.parts]
    parent = operation.parts[0].name.rpartition(".")[0].rpartition(".")[2]
    match = f"(?<=\\.{re.escape(parent)})\\.{re.escape(operation.source.name.rpartition('.')[2])}\\."
    rows = [part.tensors[0][1][0] for part in operation.parts]
    rule: dict[str, Any] = {"match": match, "into": last}
    if operation.how == "grouped":
        return {**rule, "grouped": True}
    named = {"q_proj": "q", "k_proj": "kv", "v_proj": "kv"}
    if set(last) == set(named):
        rule["sizes"] = [named[name] for name in last]
    elif len(set(rows)) > 1:
        rule["sizes"] = rows
    return rule


def expert_rule(operation: Operation) -> dict[str, Any]:
    """Return the rule for experts that were stacked into one tensor."""
    name = canonical_source(operation).rpartition(".")[2]
    kind, shape, _ = operation.source.tensors[0]
    rule: dict[str, Any] = {
        "match": f"\\.experts\\.{re.escape(name)}" + (f"\\.{kind}$" if kind else "$"),
        "into": [tail(part) for part in operation.parts],
    }
    if operation.interleaved:
        rule["interleaved"] = True
    if len(shape) == 2:
        rule |= {"stacked": "rows", "transposed": operation.how == "transposed"}
    return rule


def role_rules(inference: Inference, tensors: Collection[str], roles: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the fewest patterns that give every tensor outside the tower its role and none of the tower's."""
    words = {name: ROLE_OF[role] for name, role in roles.items() if not in_dropped_layer(name, inference)}
    found: dict[tuple[str, ...], set[str]] = {}
    for name in tensors:
        parts = tuple(template(name).split("."))
        for length in range(1, len(parts) + 1):
            found.setdefault(parts[:length], set()).add(words.get(name, "tower"))
    rules: dict[str, list[str]] = {}
    for name, role in words.items():
        parts = tuple(template(name).split("."))
        length = next((n for n in range(1, len(parts) + 1) if found[parts[:n]] == {role}), len(parts))
        pattern = "^" + r"\.".join(r"\d+" if part == "*" else re.escape(part) for part in parts[:length])
        pattern += "$" if length == len(parts) else r"\."
        if pattern not in rules.setdefault(role, []):
            rules[role].append(pattern)
    return rules


def in_dropped_layer(name: str, inference: Inference) -> bool:
    """Say whether a tensor lies in a layer that the base lacks."""
    inside = name.removeprefix(f"{inference.prefix}.") if name.startswith(f"{inference.prefix}.") else ""
    number = inside.partition(".")[0]
    return number.isdecimal() and int(number) in inference.dropped
