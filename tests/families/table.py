"""Writes the list of families by how far each is checked, from the tests themselves.

python -m tests.families.table > mergelab/towers/families/TESTED.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from mergelab.live.configs import PLAIN_TYPES
from mergelab.live.model import quiet_transformers
from mergelab.towers.rules import shipped_families
from tests.families.catalogue import FAMILIES
from tests.families.family import Family
from tests.families.further import FURTHER

BY_FUNCTION = {*PLAIN_TYPES, "molmo2_text"}
"""Towers that a plain class of another name computes."""

LAYOUTS = {
    ("native",): "one",
    ("hub", "native"): "hub, native",
    ("native", "repeated"): "one, and corrupted (repeated prefix)",
    ("transposed", "native"): "hub (experts transposed), native",
}

HEAD = """# Families, by how far each is checked

Written from the tests (`python -m tests.families.table`), which hold it to them. Nothing here was checked on released
weights: `mergelab check` does that on yours.

## Against the real class

Tiny random models of transformers' own classes. For every row and layout: the pairing is total and finds exactly the
true tower; the exported tower loads in the text class without a missing or unexpected key, holds the tower's bits and
answers text as the vlm's class does; a merge with lambda 0 and lambda 1 gives base's and the vlm's tower bit for bit
under the vlm's names, and loads in the vlm's class; the live model, with and without its picture view, is the exported
folder by hash and by logits. *native* are the names that transformers 5 has in memory, *hub* those that it saves by
default; *one*: the same. Logits are float32 with eager attention, the vlm's over the text class's.

| class | tower as | layouts on disk | logits on text |
|---|---|---|---|
"""

SLOW = """
The same in the slow suite:

| class | tower as | layouts on disk | logits on text |
|---|---|---|---|
"""

CUSTOM = """
## Against names and shapes written by hand

Layouts of custom code, for which transformers has no class: a known tower stored as the family stores it, read back,
merged and written in place, bit for bit.

| family file | covers |
|---|---|
"""

REFUSED = """
## Refused as text

These classes have a text model that no causal-LM class of transformers computes. `run`, `export-tower` and `merge --as
text` refuse them by the name of that model; `merge --as vlm` needs none and is possible where the names fit.

"""

REST = """
Quantised weights are refused whatever the family; so are LoRA adapters beside the weights, unless a family file says
what they mean.

## Not checked

Any other layout. Its names are read by the prefix table or inferred, and whatever cannot be placed is refused.
"""


def table() -> str:
    """Return the whole document."""
    custom = [f"| {one.family} | {one.covers} |\n" for one in shipped_families() if one.checked == "hand-made names"]
    return "".join(
        [HEAD, *rows(FAMILIES), SLOW, *rows(FURTHER), CUSTOM, *custom, REFUSED, ", ".join(refused()) + ".\n", REST]
    )


def rows(families: Iterable[Family]) -> Iterable[str]:
    """Yield one line of the table for each family."""
    for family in families:
        kind = {**family.text, **family.base}["model_type"]
        name = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(family.model_type) if family.sees_pictures else None
        text = causal_class(kind)
        yield f"| {name or 'a text model as vlm'} | {text} | {LAYOUTS[family.layouts]} | {answers(family)} |\n"


def answers(family: Family) -> str:
    """Return how the vlm's logits compare."""
    if not family.sees_pictures:
        return "equal"
    if family.model_type == "llama4":
        return "equal (of its language model: its own class fails on text alone)"
    if family.factor != 1:
        return f"equal times {family.factor:g} (its class leaves the scale out)"
    return f"within {family.tolerance:g}" if family.tolerance else "equal"


def causal_class(model_type: str) -> str:
    """Return the name of a causal-LM class."""
    found = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    return found if isinstance(found, str) else found[0]


def refused() -> list[str]:
    """Return the registered vlm classes whose text model has no causal-LM class."""
    names = set()
    with quiet_transformers():
        for model_type, name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.items():
            text = CONFIG_MAPPING[model_type]().get_text_config(decoder=True).model_type
            if text not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and text not in BY_FUNCTION:
                names.add(name)
    return sorted(names)


if __name__ == "__main__":
    sys.stdout.write(table())
