"""From the YAML of `mergekit-yaml` to a recipe and a pair; whatever a recipe cannot say is refused, never left out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mergelab.config.document import read_document
from mergelab.config.mergekit_export import DIGITS
from mergelab.config.problems import did_you_mean, shown
from mergelab.errors import RecipeError, problem_list
from merges.mergekit_methods import MERGEKIT, PREFIX, Slot, mergekit_inputs, unknown_method
from merges.parameters import ParameterErrors, build

KNOWN = ("merge_method", "base_model", "models", "parameters", "dtype", "out_dtype")
REFUSED = {
    "slices": "layers put together from several places; a merge here takes every layer from the same models",
    "modules": "parts of a model merged in different ways; a merge here is one for the whole tower",
    "tokenizer_source": "an output has the tokenizer of the vlm (--as vlm) or of base (--as text); rows pair by token",
    "tokenizer": "an output has the tokenizer of the vlm (--as vlm) or of base (--as text); rows pair by token",
    "chat_template": "the template of an output is that of the vlm (--as vlm) or of base (--as text)",
}
"""Keys of mergekit that no recipe can express, with the reason."""

DTYPES = ("float32", "bfloat16", "float16")
VALUE_PARAMETERS = ("int8_mask",)
"""Parameters that change no value; a recipe does not need them."""


@dataclass(frozen=True)
class Imported:
    """A recipe and the pair it runs on, as their YAML says them, and what the user should know."""

    recipe: Mapping[str, Any]
    pair: Mapping[str, Any]
    remarks: tuple[str, ...]

    def recipe_text(self) -> str:
        """Return the YAML of the recipe."""
        return yaml.safe_dump(dict(self.recipe), sort_keys=False, default_flow_style=None, width=100)

    def pair_text(self) -> str:
        """Return the YAML of the pair."""
        return yaml.safe_dump(dict(self.pair), sort_keys=False, width=100)


@dataclass
class _Reading:
    """What has been understood of a file so far."""

    name: str
    slots: dict[str, Slot]
    document: Mapping[str, Any]
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


def import_mergekit(path: Path, vlm: str | None = None) -> Imported:
    """Return a mergekit YAML as a recipe and a pair.

    With a base model and two others the base model is the ancestor, the others are base and vlm; with one other the
    base model is base and the zero point. Methods that we have ourselves and that mean the same become ours under
    ``conventions: mergekit``, all others ``mergekit:NAME``.

    Args:
        path: The YAML.
        vlm: Which of two models is the vlm, as the file names it; None takes the last.

    Raises:
        RecipeError: Everything that cannot be expressed, in one message.
    """
    document = read_document(path)
    method = document.get("merge_method")
    problems = [
        f"{key}: {REFUSED[key]}"
        if key in REFUSED
        else f"{key}: mergekit has no such key and leaves it out{did_you_mean(key, (*KNOWN, *REFUSED))}; take it out"
        for key, value in document.items()
        if key not in KNOWN and value is not None
    ]
    if not isinstance(method, str) or method not in MERGEKIT:
        problems.append("merge_method: missing" if method is None else f"merge_method: {unknown_method(str(method))}")
        raise _refusal(path, problems)
    if MERGEKIT[method].max_inputs == 1:
        problems.append(f"merge_method: {method} takes one model; that is no merge of a base and a vlm")
        raise _refusal(path, problems)
    reading = _Reading(method, {slot.name: slot for slot in MERGEKIT[method].slots}, document, problems)
    models = _models(reading)
    roles, zero_point = _roles(reading, models, vlm)
    output_dtype = _output_dtype(reading)
    if reading.problems or not roles:
        _parameters(reading, models, {})
        raise _refusal(path, reading.problems)
    merged, _ = mergekit_inputs(method, zero_point)
    values = _parameters(reading, models, {role: roles[role] for role in merged})
    if reading.problems:
        raise _refusal(path, reading.problems)
    try:
        build(PREFIX + method, values, merged)
    except ParameterErrors as error:
        reading.problems += [
            problem if problem.startswith("method:") else f"parameters.{problem}" for problem in error.problems
        ]
    if reading.problems:
        raise _refusal(path, reading.problems)
    own = _own(method, values, merged)
    name = re.sub(r"[^A-Za-z0-9._-]", "-", path.stem).lstrip("._-") or "imported"
    recipe: dict[str, Any] = {"name": name, "pair": f"{name}-pair"}
    if zero_point is not None:
        recipe["zero_point"] = zero_point
    if own is not None and own[0] not in ("linear", "task_arithmetic"):
        recipe["conventions"] = "mergekit"
    recipe["method"], recipe["parameters"] = own or (PREFIX + method, values)
    if output_dtype != "auto":
        recipe["output_dtype"] = output_dtype
    if MERGEKIT[method].draws:
        reading.remarks.append("random choices are mergelab's own: they depend on the seed and the tensor's name.")
    reading.remarks.append("roles: " + ", ".join(f"{role} is {reference}" for role, reference in roles.items()))
    pair = {"name": f"{name}-pair", **{role: _source(reference) for role, reference in roles.items()}}
    return Imported(recipe, pair, tuple(reading.remarks))


def _models(reading: _Reading) -> dict[str, Mapping[str, Any]]:
    """Return the parameters of every model by its reference, in the order of the file."""
    entries = reading.document.get("models")
    if not isinstance(entries, list) or not entries:
        if not {"slices", "modules"} & reading.document.keys():
            reading.problems.append(f"models: expected a list of models, found {shown(entries)}")
        return {}
    found: dict[str, Mapping[str, Any]] = {}
    for index, entry in enumerate(entries):
        place = f"models.{index}"
        if not isinstance(entry, Mapping) or "model" not in entry:
            reading.problems.append(f"{place}: expected a mapping with `model`, found {shown(entry)}")
            continue
        reference = _reference(reading, f"{place}.model", entry["model"])
        extra = [key for key in entry if key not in ("model", "parameters")]
        reading.problems += [f"{place}.{key}: mergekit has no such key here and leaves it out" for key in extra]
        parameters = entry.get("parameters") or {}
        if not isinstance(parameters, Mapping):
            reading.problems.append(f"{place}.parameters: expected a mapping, found {shown(parameters)}")
            parameters = {}
        if reference in found:
            reading.problems.append(f"{place}.model: {reference} stands there twice")
        found[reference] = parameters
    return found


def _reference(reading: _Reading, place: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        reading.problems.append(f"{place}: expected a folder or a hub id as plain text, found {shown(value)}")
        return str(value)
    if "+" in value:
        reading.problems.append(f"{place}: {value} puts a LoRA on a model; merge the LoRA in first and name the result")
    if value.count("@") > 1:
        reading.problems.append(f"{place}: {value} holds more than one @")
    return value


def _roles(
    reading: _Reading, models: Mapping[str, Mapping[str, Any]], vlm: str | None
) -> tuple[dict[str, str], str | None]:
    """Return the models by role (ancestor, base, vlm) and the zero point; no roles if they do not fit a pair."""
    policy = MERGEKIT[reading.name].base
    given = reading.document.get("base_model")
    base_model = _reference(reading, "base_model", given) if given is not None else None
    if policy == "required" and base_model is None:
        reading.problems.append(f"base_model: missing, and {reading.name} needs it")
        return {}, None
    if policy == "ignored" and base_model is not None:
        reading.remarks.append(f"base_model: {reading.name} does not compute with it; it is left out.")
        base_model = None
    others = [reference for reference in models if reference != base_model]
    if base_model is not None and models.get(base_model):
        reading.problems.append(
            f"models: the parameters of {base_model} have no effect, since it is the base model; take them out"
        )
    if vlm is not None and vlm not in others:
        reading.problems.append(f"--vlm {vlm}: not among the merged models ({', '.join(others)})")
        return {}, None
    wanted = (1, 2) if policy == "required" else (2,)
    if len(others) not in wanted:
        if models:
            reading.problems.append(
                f"models: expected {' or '.join(map(str, wanted))} besides a base model, which make base and vlm of a "
                f"pair, found {len(others)}"
            )
        return {}, None
    if len(others) == 1:
        assert base_model is not None
        return {"base": base_model, "vlm": others[0]}, "base"
    chosen = vlm or others[-1]
    roles = {"base": next(reference for reference in others if reference != chosen), "vlm": chosen}
    if base_model is None:
        return roles, None
    return {"ancestor": base_model, **roles}, "ancestor"


def _parameters(reading: _Reading, models: Mapping[str, Mapping[str, Any]], roles: Mapping[str, str]) -> dict[str, Any]:
    """Return the values by mergekit's names, those of models by role; note what mergekit would not have read."""
    top = reading.document.get("parameters") or {}
    if not isinstance(top, Mapping):
        reading.problems.append(f"parameters: expected a mapping, found {shown(top)}")
        top = {}
    places = {"parameters": top} | {f"models.{i}.parameters": given for i, given in enumerate(models.values())}
    for place, given in places.items():
        for key, value in given.items():
            slot = reading.slots.get(key)
            if slot is None:
                hint = did_you_mean(key, reading.slots)
                reading.problems.append(f"{place}.{key}: {reading.name} has no such parameter{hint}; take it out")
            elif slot.per == "all" and place != "parameters":
                reading.problems.append(f"{place}.{key}: mergekit reads it only under the top-level `parameters`")
            elif isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(v, Mapping) for v in value)):
                reading.problems.append(f"{place}.{key}: values by filter on tensor names cannot be expressed")
            elif isinstance(value, list):
                reading.problems.append(f"{place}.{key}: a gradient over the layers cannot be expressed")
    values: dict[str, Any] = {}
    for slot in reading.slots.values():
        if slot.per == "all":
            if slot.name in top and slot.name not in VALUE_PARAMETERS:
                values[slot.name] = top[slot.name]
        else:
            each = {role: models[ref].get(slot.name, top.get(slot.name, slot.default)) for role, ref in roles.items()}
            if slot.required:
                lost = [reference for role, reference in roles.items() if each[role] is None]
                reading.problems += [
                    f"{slot.name}: missing for {reference}, and mergekit needs it" for reference in lost
                ]
            if any(value is not None and value != slot.default for value in each.values()):
                values[slot.name] = each
    return values


def _output_dtype(reading: _Reading) -> str:
    dtype, out_dtype = reading.document.get("dtype"), reading.document.get("out_dtype")
    for key, value in (("dtype", dtype), ("out_dtype", out_dtype)):
        if value is not None and value not in DTYPES:
            hint = did_you_mean(str(value), DTYPES)
            reading.problems.append(f"{key}: expected {', '.join(DTYPES)}, found {shown(value)}{hint}")
    if dtype != "float32":
        told = "that of the checkpoints" if dtype is None else dtype
        reading.remarks.append(f"arithmetic: mergekit computes in {told} here, mergelab in float32, rounded once.")
    return str(out_dtype or dtype or "auto")


def _own(method: str, values: Mapping[str, Any], roles: tuple[str, ...]) -> tuple[str, dict[str, Any]] | None:
    """Return the method and parameters of ours that compute the same, or None if none does."""
    slots = {slot.name: slot for slot in MERGEKIT[method].slots}
    value = {name: values.get(name, slot.default) for name, slot in slots.items()}
    weights = values.get("weight")
    if method not in ("linear", "task_arithmetic", "ties", "dare_linear", "dare_ties") or weights is None:
        return None
    made: dict[str, Any] = {"weights": weights}
    if method == "linear":
        made["normalize"] = value["normalize"]
    else:
        made["lambda"] = value["lambda"]
        each = value.get("density", 1.0)
        shares = set(each.values()) if isinstance(each, Mapping) else {each}
        if len(shares) > 1:
            return None
        (share,) = shares
        if method in ("task_arithmetic", "dare_linear") and value["normalize"]:
            return None
        if method == "ties":
            if value["rescale"]:
                return None
            made["density"] = share
        if method.startswith("dare"):
            made |= {"drop_rate": round(1 - share, DIGITS), "rescale": "l1" if value["rescale"] else "none"}
        if method.endswith("ties"):
            made["divisor"] = "weights" if value["normalize"] else "none"
    try:
        build(method, made, roles, "mergekit")
    except ParameterErrors:  # legal in mergekit, refused by ours: its own method then
        return None
    return method, made


def _source(reference: str) -> str | dict[str, str]:
    text, _, revision = reference.partition("@")
    folder = Path(text).expanduser()
    text = str(folder.resolve()) if folder.is_dir() else text
    return {"id": text, "revision": revision} if revision else text


def _refusal(path: Path, problems: list[str]) -> RecipeError:
    advice = "Take out what has no effect; for the rest use mergekit itself."
    return RecipeError(problem_list(f"{path}: cannot be expressed as a recipe:", dict.fromkeys(problems), advice))
