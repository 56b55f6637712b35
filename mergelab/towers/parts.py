"""What a fused tensor of a tower is made of: its weights under canonical names, each as a view of what is stored.

Sizes are read off the shapes beside the tensor (the output projection tells the heads, the embedding the hidden size,
the router the experts), so that sparse configs do as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mergelab.strides import View, rows_of
from mergelab.towers.generic import EXPERTS
from mergelab.towers.rules import Experts, Family, Split

EMBEDDING = "model.embed_tokens.weight"

Shapes = Mapping[str, tuple[int, ...]]


class UnfitError(ValueError):
    """A rule does not fit the shapes it meets; says why."""


@dataclass(frozen=True)
class Part:
    """One weight inside a fused tensor."""

    name: str
    """Canonical."""
    label: str
    """What the part is called beside its tensor, for example ``q_proj`` or ``3.up_proj``."""
    view: View


def find_parts(family: Family | None, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, tuple[Part, ...]]:
    """Return the parts of every fused tensor that a family (None: only the generic table) knows.

    Args:
        family: The rules.
        shapes: Canonical name -> stored shape, of a whole tower.
        config: The text config.

    Raises:
        UnfitError: A tensor that a rule names cannot be cut as the rule says.
    """
    found: dict[str, tuple[Part, ...]] = {}
    for split in family.split if family is not None else ():
        for name in shapes:
            if split.match.search(name):
                found[name] = split_parts(split, name, shapes, config)
    own = family.experts if family is not None else ()
    for rule in own or EXPERTS:
        for name in shapes:
            if rule.match.search(name):
                # Where only the generic rule says how, experts that it cannot cut may still pair as they are.
                with suppress(*() if own else (UnfitError,)):
                    found[name] = expert_parts(rule, name, shapes)
    return found


def split_parts(split: Split, name: str, shapes: Shapes, config: Mapping[str, Any]) -> tuple[Part, ...]:
    """Cut a fused projection (weight or bias) by rows."""
    found = split.match.search(name)
    assert found is not None
    segment = next(piece for piece in found.group().split(".") if piece)
    before, after = name[: found.start()], name[found.start() :]
    names = [before + after.replace(segment, into, 1) for into in split.into]
    shape = shapes[name]
    if not shape:
        raise UnfitError(f"{name}: a single number, expected rows to cut")
    if split.grouped:
        views = grouped_views(name, shape, before, shapes, config)
    else:
        sizes = row_sizes(split, name, before, shapes)
        starts = [sum(sizes[:place]) for place in range(len(sizes))]
        views = [rows_of(shape, first, count) for first, count in zip(starts, sizes, strict=True)]
    return tuple(Part(*entry) for entry in zip(names, split.into, views, strict=True))


def row_sizes(split: Split, name: str, before: str, shapes: Shapes) -> list[int]:
    """Return how many rows each part has."""
    rows, count = shapes[name][0], len(split.into)
    if split.sizes == "even":
        if rows % count:
            raise UnfitError(f"{name}: {rows} rows do not make {count} equal parts")
        return [rows // count] * count
    query = query_rows(name, before, shapes) if "q" in split.sizes else 0
    left = rows - sum(query if isinstance(size, str) else size for size in split.sizes if size != "kv")
    num_kv = split.sizes.count("kv")
    if left < 0 or left % max(1, num_kv) or (left and not num_kv):
        raise UnfitError(f"{name}: {rows} rows cannot be cut into {list(split.sizes)} with {query} query rows")
    known = {"q": query, "kv": left // max(1, num_kv)}
    return [known[size] if isinstance(size, str) else size for size in split.sizes]


def query_rows(name: str, before: str, shapes: Shapes) -> int:
    """Return heads x head size: what the output projection beside a fused tensor takes in."""
    output = shapes.get(f"{before}.o_proj.weight")
    if output is None or len(output) != 2:
        raise UnfitError(f"{name}: no {before}.o_proj.weight beside it that tells the number of query rows")
    return output[1]


def grouped_views(
    name: str, shape: tuple[int, ...], before: str, shapes: Shapes, config: Mapping[str, Any]
) -> list[View]:
    """Cut [kv heads, queries per kv head + 2, head size, ...]: per group its query heads, a key and a value head."""
    heads, query = config.get("num_attention_heads"), query_rows(name, before, shapes)
    if not isinstance(heads, int) or heads < 1 or query < 1 or query % heads:
        raise UnfitError(f"{name}: num_attention_heads {heads} of the config does not divide {query} query rows")
    size = query // heads
    groups, odd = divmod(shape[0] - query, 2 * size)
    if odd or groups < 1 or heads % groups:
        raise UnfitError(f"{name}: {shape[0]} rows are no whole groups of {heads} heads of {size}")
    width = math.prod(shape[1:])
    each, head = heads // groups, size * width
    stride = (each + 2) * head

    def view(slots: int, first: int) -> View:
        return View((groups * slots * size, *shape[1:]), first * head, (groups, slots * head), (stride, 1))

    return [view(each, 0), view(1, each), view(1, each + 1)]


def expert_parts(rule: Experts, name: str, shapes: Shapes) -> tuple[Part, ...]:
    """Cut the experts of one tensor apart."""
    found = rule.match.search(name)
    assert found is not None
    before, shape = name[: found.start()], shapes[name]
    if rule.stacked == "rows":
        views = stacked_rows(rule, name, before, shapes)
    elif len(shape) in (2, 3):
        views = stacked_first(rule, name, shape, len(shape) == 3 and stored_transposed(name, shape, shapes))
    else:
        raise UnfitError(f"{name}: {shape}, expected [experts, rows, columns]")
    leaf = "bias" if len(shape) == 2 and rule.stacked == "first" else "weight"
    return tuple(
        Part(f"{before}.experts.{expert}.{into}.{leaf}", f"{expert}.{into}", view)
        for expert, row in enumerate(views)
        for into, view in zip(rule.into, row, strict=True)
    )


def stored_transposed(name: str, shape: tuple[int, ...], shapes: Shapes) -> bool:
    """Say whether [experts, a, b] holds each expert as columns x rows, as Llama4 and the hub's Qwen3-VL-MoE do.

    The hidden size is where an expert goes in (gate, up) or comes out (down). Where both sizes of a tensor equal it,
    the other tensors of the module tell; all of one module are stored alike.
    """
    hidden = shapes[EMBEDDING][1] if EMBEDDING in shapes else 0
    module = name.rpartition(".")[0] + "."
    votes = set()
    for other, (_, first, second) in [(name, shape), *((n, s) for n, s in shapes.items() if len(s) == 3)]:
        if other.startswith(module) and (first == hidden) != (second == hidden):
            votes.add((first == hidden) != ("down" in other.removeprefix(module)))
            if other == name:
                break
    if len(votes) != 1:
        raise UnfitError(f"{name}: {shape} does not tell which way its experts lie (hidden size {hidden})")
    return votes.pop()


def stacked_first(rule: Experts, name: str, shape: tuple[int, ...], transposed: bool) -> list[list[View]]:
    """Cut [experts, rows, columns], its transpose, or biases [experts, rows]."""
    count = len(rule.into)
    rows = shape[2] if transposed else shape[1]
    columns = shape[1:2] if transposed else shape[2:]
    each, odd = divmod(rows, count)
    if odd:
        raise UnfitError(f"{name}: {rows} rows do not make {count} equal parts")
    step = 1 if transposed else math.prod(columns)
    across = tuple(shape[2] for _ in columns) if transposed else tuple(1 for _ in columns)
    first, stride = (step, count * step) if rule.interleaved else (each * step, step)
    size = math.prod(shape[1:])
    return [
        [
            View((each, *columns), expert * size + place * first, (each, *columns), (stride, *across))
            for place in range(count)
        ]
        for expert in range(shape[0])
    ]


def stacked_rows(rule: Experts, name: str, before: str, shapes: Shapes) -> list[list[View]]:
    """Cut experts that lie below each other in one matrix; the router's rows tell how many."""
    router, shape = shapes.get(f"{before}.gate.weight"), shapes[name]
    if not router or not router[0] or len(shape) != 2 or len(rule.into) != 1 or shape[0] % router[0]:
        raise UnfitError(f"{name}: {shape} cannot be cut into experts; the router is {router}")
    each, width = shape[0] // router[0], shape[1]
    sizes, strides = ((width, each), (1, width)) if rule.transposed else ((each, width), (width, 1))
    return [[View(sizes, expert * each * width, sizes, strides)] for expert in range(router[0])]
