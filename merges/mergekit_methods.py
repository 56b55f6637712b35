"""The methods of mergekit as a recipe may ask for them: names, parameters, and how many models each takes.

A table of facts about one version of mergekit, so that recipes are checked without torch and without mergekit; a
test compares it with the installed package. Standard library only. The arithmetic is mergekit's own and is called
by whoever streams the tensors.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from merges.bounds import Bounds, Flag, Number, ParameterErrors, Whole

VERSION = "0.1.5"
"""The version of mergekit that the table describes, and the only one that is called."""

PREFIX = "mergekit:"
"""A recipe says ``method: mergekit:della``."""


@dataclass(frozen=True)
class Slot:
    """One parameter of a method of mergekit."""

    name: str
    bounds: Bounds
    meaning: str
    default: object = None
    required: bool = False
    per: str = "all"
    """``all``: one value; ``model``: one for each input; ``vector``: one for each input but the base model."""

    optional: bool = False
    """True where null is a value: the parameter is then not applied."""


@dataclass(frozen=True)
class MergekitMethod:
    """One method of mergekit.

    ``base`` is what mergekit does with its base model: ``required``, ``optional`` or ``ignored``. Numbers of inputs
    count the base model, numbers of others do not.
    """

    title: str
    source: str
    base: str
    slots: tuple[Slot, ...] = ()
    draws: bool = False
    min_inputs: int = 1
    max_inputs: int | None = None
    min_others: int | None = None
    max_others: int | None = None


_SHARE = Number(0, 1, low_open=True)
_POSITIVE = Number(0, low_open=True)

_WEIGHT = Slot("weight", Number(), "factor of each task vector", required=True, per="vector")


def _task_arithmetic(
    title: str, source: str, draws: bool, normalize: bool, rescale: bool, *more: Slot
) -> MergekitMethod:
    """Return a method of mergekit's task-arithmetic family, which share seven parameters."""
    return MergekitMethod(
        title,
        source,
        "required",
        (
            _WEIGHT,
            Slot("density", _SHARE, "share of each task vector's entries that is kept", 1.0, per="vector"),
            *more,
            Slot("lambda", Number(), "factor of the merged task vector", 1.0),
            Slot("normalize", Flag(), "divide by the sum of the weights that took part", normalize),
            Slot("rescale", Flag(), "bring each thinned task vector back to its L1 norm", rescale),
            Slot("int8_mask", Flag(), "hold masks in 8 bits; changes no value", False),
        ),
        draws,
    )


_GAMMA = Slot("gamma", Number(0, 1, high_open=True), "share of the largest entries that is dropped", 0.01, per="vector")
_EPSILON = Slot(
    "epsilon", Number(0, 0.5, high_open=True), "keep probabilities lie in density -/+ epsilon", 0.15, per="vector"
)
_RAM = Slot("epsilon", Number(0), "entries of a task vector up to this size count as unchanged", 1e-5)

MERGEKIT: dict[str, MergekitMethod] = {
    "linear": MergekitMethod(
        "Linear",
        "arXiv 2203.05482",
        "ignored",
        (
            Slot("weight", Number(), "factor of each model", required=True, per="model"),
            Slot("normalize", Flag(), "divide by the sum of the weights", True),
        ),
    ),
    "slerp": MergekitMethod(
        "SLERP",
        "spherical linear interpolation",
        "required",
        (Slot("t", Number(), "0 is the zero point, 1 the vlm", required=True),),
        min_inputs=2,
        max_inputs=2,
    ),
    "nuslerp": MergekitMethod(
        "NuSLERP",
        "mergekit",
        "optional",
        (
            Slot("weight", Number(), "factor of each model", required=True, per="vector"),
            Slot("nuslerp_row_wise", Flag(), "angles of rows; needs nuslerp_flatten: false", False),
            Slot("nuslerp_flatten", Flag(), "one angle for the whole tensor", True),
        ),
        min_others=2,
        max_others=2,
    ),
    "multislerp": MergekitMethod(
        "Multi-SLERP",
        "https://goddard.blog/posts/multislerp-wow-what-a-cool-idea",
        "optional",
        (
            Slot("weight", Number(), "factor of each model", required=True, per="vector"),
            Slot("normalize_weights", Flag(), "divide the weights by their sum", True),
            Slot("eps", _POSITIVE, "what is added to norms", 1e-8),
        ),
        min_others=1,
    ),
    "karcher": MergekitMethod(
        "Karcher mean",
        "arXiv 2603.04972",
        "ignored",
        (
            Slot("max_iter", Whole(1), "most iterations", 10),
            Slot("tol", _POSITIVE, "step at which they stop", 1e-5),
        ),
    ),
    "passthrough": MergekitMethod(
        "Passthrough",
        "mergekit",
        "ignored",
        (Slot("scale", Number(), "factor of the model", None, per="model", optional=True),),
        max_inputs=1,
    ),
    "model_stock": MergekitMethod(
        "Model Stock",
        "arXiv 2403.19522",
        "required",
        (Slot("filter_wise", Flag(), "one ratio for each row instead of each tensor", False),),
        min_inputs=3,
    ),
    "nearswap": MergekitMethod(
        "NearSwap",
        "https://huggingface.co/alchemonaut/QuartetAnemoi-70B-t0.0001",
        "required",
        (Slot("t", Number(0), "distance up to which an entry becomes the vlm's", required=True),),
        min_inputs=2,
        max_inputs=2,
    ),
    "arcee_fusion": MergekitMethod(
        "Arcee Fusion", "https://arcee.ai", "required", draws=True, min_inputs=2, max_inputs=2
    ),
    "sce": MergekitMethod(
        "SCE",
        "arXiv 2408.07990",
        "required",
        (
            Slot("select_topk", _SHARE, "share of entries kept, those that vary most over the models", 1.0),
            Slot("int8_mask", Flag(), "hold masks in 8 bits; changes no value", False),
        ),
    ),
    "ram": MergekitMethod("RAM", "arXiv 2601.13572", "required", (_RAM,)),
    "ramplus_tl": MergekitMethod(
        "RAM+, tensor-local",
        "arXiv 2601.13572",
        "required",
        (
            Slot("r", Number(0), "strength of the rescaling of entries that one model alone changed", 0.1),
            Slot("alpha", Number(0), "most of the ratio of shared to unique entries that counts", 0.2),
            _RAM,
        ),
    ),
    "task_arithmetic": _task_arithmetic("Task arithmetic", "arXiv 2212.04089", False, False, False),
    "ties": _task_arithmetic("TIES", "arXiv 2306.01708", False, True, False),
    "dare_linear": _task_arithmetic("Linear DARE", "arXiv 2311.03099", True, False, True),
    "dare_ties": _task_arithmetic("DARE TIES", "arXiv 2311.03099", True, False, True),
    "breadcrumbs": _task_arithmetic("Model Breadcrumbs", "arXiv 2312.06795", False, False, False, _GAMMA),
    "breadcrumbs_ties": _task_arithmetic(
        "Model Breadcrumbs with TIES", "arXiv 2312.06795", False, False, False, _GAMMA
    ),
    "della": _task_arithmetic("DELLA", "arXiv 2406.11617", True, True, True, _EPSILON),
    "della_linear": _task_arithmetic("Linear DELLA", "arXiv 2406.11617", True, False, True, _EPSILON),
}
"""Every method of mergekit ``VERSION`` by its own name."""

NO_EFFECT = {
    "task_arithmetic": {"density": "nothing is trimmed", "rescale": "nothing is trimmed, so nothing is rescaled"},
}
"""Parameters that mergekit takes and does not use: another value than the default is refused."""


@dataclass(frozen=True)
class ByMergekit:
    """Parameters of ``mergekit:NAME``, complete and checked; made by ``build_mergekit``."""

    name: str
    values: Mapping[str, object] = field(hash=False)
    """By mergekit's own names; those that may differ between models as a mapping from role to value."""

    scope = "tensor"

    @property
    def spec(self) -> MergekitMethod:
        """What the table says about the method."""
        return MERGEKIT[self.name]

    @property
    def method(self) -> str:
        """The name in a recipe."""
        return PREFIX + self.name

    @property
    def inputs(self) -> str:
        """``models`` for averages of the models themselves, else ``task_vectors``."""
        return "models" if self.spec.base == "ignored" else "task_vectors"

    @property
    def draws(self) -> bool:
        """True if the result depends on a seed."""
        return self.spec.draws


def is_mergekit(method: str) -> bool:
    """Return True if a method of a recipe is meant to be one of mergekit's, known or not."""
    return method.startswith(PREFIX)


def mergekit_inputs(name: str, zero_point: str | None) -> tuple[tuple[str, ...], str | None]:
    """Return the models that a method merges, and the one it gets as its base model.

        zero point ancestor     base model ancestor, others base and vlm
        zero point base         base model base, the other is the vlm

    Methods that ignore a base model average base and vlm. Those to which it is optional get the ancestor if that is
    the zero point, else none, and base and vlm as the others. Passthrough takes one model, the vlm.

    Args:
        name: A key of ``MERGEKIT``.
        zero_point: ``ancestor``, ``base``, or None for methods that were given none.
    """
    spec = MERGEKIT[name]
    if spec.max_inputs == 1:
        return ("vlm",), None
    if spec.base == "ignored" or (spec.base == "optional" and zero_point != "ancestor"):
        return ("base", "vlm"), None
    return ("base", "vlm") if zero_point == "ancestor" else ("vlm",), zero_point


def zero_points(name: str) -> tuple[str, ...]:
    """Return the zero points (ancestor, base) under which the number of models fits the method."""
    return tuple(zero for zero in ("ancestor", "base") if not _count_problems(name, mergekit_inputs(name, zero)[0]))


def build_mergekit(method: str, values: Mapping[str, object], vectors: Sequence[str]) -> ByMergekit:
    """Check the values of a recipe against the table.

    Args:
        method: ``mergekit:NAME``.
        values: By mergekit's names. A parameter of its models is one number for all, or a mapping from role.
        vectors: Roles of the models besides the base model.

    Raises:
        ParameterErrors: The method or a parameter is unknown, a value is missing, misplaced, of the wrong type or
            out of range, has no effect, or the method does not take that many models. All of them are listed.
    """
    name = method.removeprefix(PREFIX)
    if name not in MERGEKIT:
        raise ParameterErrors([f"method: {unknown_method(method)}"])
    spec = MERGEKIT[name]
    slots = {slot.name: slot for slot in spec.slots}
    problems = _count_problems(name, vectors)
    problems += [
        f"{key}: {method} has no such parameter; {_nearest(str(key), slots)}" for key in values if key not in slots
    ]
    complete: dict[str, object] = {}
    for slot in spec.slots:
        if slot.name not in values:
            if slot.required:
                form = f", {slot.bounds.text()} or one per model" if slot.per != "all" else f", {slot.bounds.text()}"
                problems.append(f"{slot.name}: missing, and mergekit has no default for it{form}")
                continue
            value = slot.default
        else:
            value = values[slot.name]
        settled, found = _settled(slot, value, vectors)
        problems += found
        complete[slot.name] = settled
    if not problems:
        problems = _joint_problems(name, complete, vectors)
    if problems:
        raise ParameterErrors(problems)
    return ByMergekit(name, complete)


def unknown_method(method: str) -> str:
    """Say that mergekit has no such method, and which it has."""
    near = difflib.get_close_matches(method.removeprefix(PREFIX).lower(), MERGEKIT, n=1)
    hint = f" (did you mean `{PREFIX}{near[0]}`?)" if near else ""
    return f"mergekit {VERSION} has no {method.removeprefix(PREFIX)!r}{hint}; it has {', '.join(MERGEKIT)}"


def default_text(slot: Slot) -> str:
    """Return the default as a person reads it."""
    if slot.required:
        return "required"
    return "" if slot.default is None else str(slot.default)


def _settled(slot: Slot, value: object, vectors: Sequence[str]) -> tuple[object, list[str]]:
    """Return a value with its numbers as floats and, where models may differ, one for each; and what is wrong."""
    if isinstance(value, list | tuple):
        return None, [
            f"{slot.name}: a list over layers (mergekit's gradient) is not possible here; give one value, or one per "
            "model by role"
        ]
    if slot.per == "all":
        if isinstance(value, Mapping):
            return None, [f"{slot.name}: is one value for all models, found one per model"]
        problem = slot.bounds.problem(slot.name, value)
        return _number(slot, value), [problem] if problem else []
    given = dict(value) if isinstance(value, Mapping) else dict.fromkeys(vectors, value)
    have = ", ".join(vectors)
    problems = [
        f"{slot.name}: there is no {role} among the merged models ({have})" for role in given if role not in vectors
    ]
    problems += [f"{slot.name}: no value for {role}; name all of {have}" for role in vectors if role not in given]
    for role in vectors:
        if role in given and not (slot.optional and given[role] is None):
            problem = slot.bounds.problem(slot.name, given[role])
            problems += [problem] if problem and problem not in problems else []
    return {role: _number(slot, given[role]) for role in sorted(given) if role in vectors}, problems


def _number(slot: Slot, value: object) -> object:
    is_number = isinstance(slot.bounds, Number) and isinstance(value, int | float) and not isinstance(value, bool)
    try:
        return float(value) if is_number else value  # type: ignore[arg-type]
    except OverflowError:  # said by the bounds
        return value


def _count_problems(name: str, vectors: Sequence[str]) -> list[str]:
    """Return why the method does not take these models, with what to do about it."""
    spec = MERGEKIT[name]
    others = len(vectors)
    total = others + (spec.base == "required")
    wanted = _wanted(total, spec.min_inputs, spec.max_inputs, "models")
    if wanted is None and spec.base != "required":
        wanted = _wanted(others, spec.min_others or 0, spec.max_others, "models besides its base model")
    if wanted is None:
        return []
    advice = (
        "take a zero point ancestor, which makes three"
        if total < spec.min_inputs
        else "write zero_point: base, which makes base and vlm the two"
    )
    have = " and ".join([*(("the zero point",) if spec.base == "required" else ()), *vectors])
    return [f"method: {PREFIX}{name} takes {wanted}, found {total} ({have}); {advice}"]


def _wanted(count: int, low: int, high: int | None, what: str) -> str | None:
    if count >= low and (high is None or count <= high):
        return None
    return (
        f"exactly {low} {what}"
        if low == high
        else f"at least {low} {what}"
        if count < low
        else f"at most {high} {what}"
    )


def _joint_problems(name: str, values: Mapping[str, object], vectors: Sequence[str]) -> list[str]:
    """Return what is wrong with values together: what cannot change the result, or has no meaning."""
    problems = [
        f"{key}: mergekit's {name} takes it and does not use it: {reason}; leave it out"
        for key, reason in NO_EFFECT.get(name, {}).items()
        if not _is_default(name, key, values[key])
    ]
    weights = values.get("weight")
    normalizes = values.get("normalize", values.get("normalize_weights", name == "nuslerp")) is True
    if isinstance(weights, Mapping) and normalizes:
        total = sum(weights.values())
        if len(vectors) == 1 and MERGEKIT[name].base == "required" and total != 1:
            problems.append(
                f"weight: the weight of a single vector cancels in mergekit:{name} with normalize, found {total:g}; "
                "write 1 and use lambda, or normalize: false"
            )
        elif abs(total) < 1e-6:
            problems.append(f"weight: they sum to {total:g} and cannot be normalized")
    if name in ("della", "della_linear"):
        problems += _della_problems(values)
    if name == "nuslerp" and values["nuslerp_row_wise"] and values["nuslerp_flatten"]:
        problems.append("nuslerp_row_wise: has no effect on flattened tensors; set nuslerp_flatten: false")
    return problems


def _della_problems(values: Mapping[str, object]) -> list[str]:
    density, epsilon = values["density"], values["epsilon"]
    assert isinstance(density, Mapping) and isinstance(epsilon, Mapping)
    return [
        f"epsilon: density {density[role]:g} -/+ epsilon {epsilon[role]:g} leaves (0, 1) for {role}"
        for role in density
        if density[role] < 1 and not (density[role] - epsilon[role] > 0 and density[role] + epsilon[role] < 1)
    ]


def _is_default(name: str, key: str, value: object) -> bool:
    default = next(slot.default for slot in MERGEKIT[name].slots if slot.name == key)
    return all(item == default for item in value.values()) if isinstance(value, Mapping) else value == default


def _nearest(found: str, known: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(found.lower(), known, n=1)
    return f"{f'did you mean {near[0]}? ' if near else ''}known: {', '.join(known) or 'none'}"
