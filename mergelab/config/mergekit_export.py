"""From a point to the YAML that `mergekit-yaml` reads, with every place where mergekit would compute otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from mergelab.config.pair import Pair, Source
from mergelab.errors import RecipeError, problem_list
from merges.mergekit_methods import MERGEKIT, PREFIX, VERSION, is_mergekit
from merges.parameters import inputs_of

DIGITS = 12
"""Decimals of a density made from a drop rate: 1 - 0.9 is written as 0.1."""

NATIVE = ("linear", "task_arithmetic", "ties", "dare_linear", "dare_ties")
"""Methods of ours that mergekit has under the same name."""


@dataclass(frozen=True)
class MergekitPoint:
    """A merge in mergekit's terms."""

    document: Mapping[str, Any]
    """What its YAML says."""

    differences: tuple[str, ...]
    """Where mergekit makes other weights of it than we do."""

    remarks: tuple[str, ...]
    """What the user has to see to before mergekit can read it."""

    def text(self, heading: str) -> str:
        """Return the YAML with heading, differences and remarks as comments."""
        said = [heading, *self.lines()]
        comments = "".join(f"# {line}\n" for line in said)
        return comments + yaml.safe_dump(dict(self.document), sort_keys=False, default_flow_style=None, width=100)

    def lines(self) -> list[str]:
        """Return differences and remarks, one line each."""
        return [
            *(f"differs: {line}" for line in self.differences or ("nowhere beyond rounding.",)),
            *(f"note: {line}" for line in self.remarks),
        ]


@dataclass
class _Terms:
    """A point taken apart into what mergekit asks for."""

    name: str
    shared: dict[str, Any]
    by_role: dict[str, Mapping[str, Any]]
    differences: list[str]


def export_point(
    pair: Pair, method: str, values: Mapping[str, Any], zero_point: str | None, output_dtype: str
) -> MergekitPoint:
    """Return one point as mergekit would be asked for it.

    Args:
        pair: Whose models are named.
        method: As in a recipe.
        values: Every parameter by its recipe name, as points carry them.
        zero_point: Of the point; None for averages.
        output_dtype: Of the recipe.

    Raises:
        RecipeError: mergekit has no such method, or cannot name one of the models.
    """
    if not is_mergekit(method) and method not in NATIVE:
        raise RecipeError(
            f"{method}: mergekit {VERSION} has nothing that computes it. "
            f"Of ours it has {', '.join(NATIVE)}; `mergelab merge` writes the weights of any point."
        )
    roles, zero = inputs_of(method, zero_point)
    terms = _own_terms(method, values, roles) if not is_mergekit(method) else _mergekit_terms(method, values)
    if values.get("exclude"):
        kinds = ", ".join(values["exclude"])
        terms.differences.append(f"exclude: mergekit merges every tensor, mergelab leaves {kinds} as the vlm's.")
    references = _references(pair, (*roles, *((zero,) if zero is not None else ())))
    models: list[dict[str, Any]] = [] if zero is None else [{"model": references[zero]}]
    for role in roles:
        chosen = {key: by[role] for key, by in terms.by_role.items() if by[role] is not None}
        models.append({"model": references[role], **({"parameters": chosen} if chosen else {})})
    document: dict[str, Any] = {"merge_method": terms.name}
    if zero is not None:
        document["base_model"] = references[zero]
    document["models"] = models
    if terms.shared:
        document["parameters"] = terms.shared
    document["dtype"] = "float32"
    remarks = [
        "mergekit cannot read a tower inside a vlm. If the vlm is more than a text checkpoint, write its tower as one: "
        "mergelab merge linear --set 'parameters={weights: {base: 0, vlm: 1}}' --as text --out DIR, on the same pair, "
        "and name DIR here.",
        "mergekit pairs rows of vocabularies by index, mergelab by token.",
    ]
    if output_dtype != "auto":
        document["out_dtype"] = output_dtype
    else:
        remarks.append("out_dtype is left open, and mergekit then writes float32; mergelab keeps the vlm's dtypes.")
    return MergekitPoint(document, tuple(terms.differences), tuple(remarks))


def _mergekit_terms(method: str, values: Mapping[str, Any]) -> _Terms:
    name = method.removeprefix(PREFIX)
    slots = MERGEKIT[name].slots
    shared = {slot.name: values[slot.name] for slot in slots if slot.per == "all"}
    by_role = {slot.name: values[slot.name] for slot in slots if slot.per != "all"}
    return _Terms(name, shared, by_role, [_MASKS] if MERGEKIT[name].draws else [])


_MASKS = (
    "random choices: mergekit draws them from one global stream in the order of the tensors (and unseeded without "
    "--random-seed), mergelab from the seed and the name of each tensor."
)


def _own_terms(method: str, values: Mapping[str, Any], roles: tuple[str, ...]) -> _Terms:
    weights = dict(values["weights"])
    if method == "linear":
        return _Terms("linear", {"normalize": values["normalize"]}, {"weight": weights}, [])
    terms = _Terms(method, {"lambda": values["lambda"]}, {"weight": weights}, [])
    if method == "task_arithmetic":
        terms.shared["normalize"] = False
        return terms
    if method == "ties":
        terms.by_role["density"] = dict.fromkeys(roles, values["density"])
        terms.shared["rescale"] = False
        terms.differences += _trimming(values)
    else:
        terms.by_role["density"] = dict.fromkeys(roles, round(1 - values["drop_rate"], DIGITS))
        terms.shared["rescale"] = values["rescale"] != "none"
        if values["drop_rate"] > 0:
            terms.differences.append(_MASKS)
            if values["rescale"] == "inverse":
                terms.differences.append(
                    "rescaling: mergekit brings every thinned task vector back to its L1 norm, mergelab divides by "
                    "1 - drop_rate."
                )
    if method == "dare_linear":
        terms.shared["normalize"] = False
        return terms
    terms.shared["normalize"] = values["divisor"] != "none"
    equal = len(set(weights.values())) == 1
    if values["divisor"] == "count":
        if equal:  # dividing by the number is dividing by weights of 1
            terms.shared["lambda"] = values["lambda"] * weights[roles[0]]
            terms.by_role["weight"] = dict.fromkeys(roles, 1.0)
        else:
            terms.differences.append(
                "divisor: mergekit divides by the weights of the agreeing vectors, mergelab here by their number."
            )
    if len(roles) > 1:
        terms.differences += _electing(values, equal and weights[roles[0]] > 0)
    return terms


def _trimming(values: Mapping[str, Any]) -> list[str]:
    if values["density"] == 1:
        return []
    found = [
        "equal magnitudes at the threshold: mergelab keeps those of lower index, the sort of mergekit is not stable; "
        "checkpoints in bfloat16 have many."
    ]
    if values.get("trim_scope", "tensor") != "tensor":
        found.append("trim scope: mergekit trims every tensor by itself, mergelab here over the whole model.")
    if values.get("kept_count", "at_least_one") != "at_least_one":
        found.append(
            f"kept count: mergekit keeps max(1, floor(density n)) entries, mergelab here {values['kept_count']}."
        )
    return found


def _electing(values: Mapping[str, Any], same_ballots: bool) -> list[str]:
    found = []
    if values["elect"] == "count" or (values["elect"] == "raw" and not same_ballots):
        found.append(
            "sign election: mergekit elects the sign of the weighted sum, mergelab here that of "
            f"{'the raw sum' if values['elect'] == 'raw' else 'the majority'}."
        )
    if values["zero_sum"] != "plus":
        found.append(
            "ties of signs: where kept entries cancel to exactly 0 mergekit elects plus, mergelab here "
            f"{values['zero_sum']}."
        )
    return found


def _references(pair: Pair, roles: tuple[str, ...]) -> dict[str, str]:
    """Return how mergekit names the models: PATH, or ID@REVISION."""
    sources: dict[str, Source] = {str(role): source for role, source in pair.sources.items()}
    found, problems = {}, []
    for role in roles:
        source = sources[role]
        if set("@+") & set(source.location):
            problems.append(f"{role}: {source.location} holds @ or +, which mergekit reads as a revision or a LoRA")
        found[role] = source.location + (f"@{source.revision}" if source.revision else "")
    if problems:
        raise RecipeError(problem_list(f"pair {pair.name}: mergekit cannot name these models:", problems, "Move them."))
    return found
