"""What a user may set on each merge method: one frozen dataclass a method, checked when it is made.

A field holds its default of the convention ``paper``; what the other conventions set differently is data in
``conventions``. The words a value may be are in ``bounds``, the arithmetic is in one file a method.
Standard library only, so recipes are checked without torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from merges.bounds import Choice, Flag, Number, ParameterErrors, Weights
from merges.conventions import PRESETS, Required
from merges.fields import (
    divisor_field,
    drop_rate_field,
    elect_field,
    exclude_field,
    lambda_field,
    parameter,
    recipe_name,
    rescale_field,
    rest_field,
    settle,
    svd_scope_field,
    weights_field,
    zero_sum_field,
)
from merges.mergekit_methods import (
    MERGEKIT,
    PREFIX,
    ByMergekit,
    build_mergekit,
    default_text,
    is_mergekit,
    mergekit_inputs,
)

__all__ = [
    "PARAMETERS",
    "ByMergekit",
    "DareLinear",
    "DareTies",
    "Gaussian",
    "IsoC",
    "Linear",
    "ParameterErrors",
    "ParameterInfo",
    "Parameters",
    "Slerp",
    "Star",
    "TaskArithmetic",
    "Ties",
    "Tsv",
    "build",
    "canonical",
    "describe",
    "inputs_of",
]

SUM_TOLERANCE = 1e-6
"""How far the weights of ``linear`` may be from 1: what rounding to six written decimals leaves."""


@dataclass(frozen=True, kw_only=True)
class Linear:
    """Parameters of ``linear``: sum of weight times model."""

    weights: Mapping[str, float] | None = weights_field("factor of each model; they sum to 1 unless normalize is set")
    normalize: bool = parameter(False, Flag(), "divide the weights by their sum")
    exclude: tuple[str, ...] = exclude_field()

    method: ClassVar[str] = "linear"
    inputs: ClassVar[str] = "models"
    scope: ClassVar[str] = "entry"
    draws: ClassVar[bool] = False
    title: ClassVar[str] = "Weighted average of the models"
    source: ClassVar[str] = "Wortsman et al. 2022, Model soups, arXiv 2203.05482"

    def __post_init__(self) -> None:
        """Check the fields and that the weights sum to 1, or at all."""
        settle(self)
        if self.weights is None:
            if not self.normalize:
                raise ParameterErrors(["weights: linear needs weights that sum to 1, or normalize: true"])
            return
        total = sum(self.weights.values())
        if self.normalize and abs(total) < SUM_TOLERANCE:
            raise ParameterErrors([f"weights: they sum to {total:g} and cannot be normalized"])
        if not self.normalize and abs(total - 1) > SUM_TOLERANCE:
            raise ParameterErrors(
                [f"weights: expected a sum of 1, found {total:g}; change them or set normalize: true"]
            )


@dataclass(frozen=True, kw_only=True)
class TaskArithmetic:
    """Parameters of ``task_arithmetic``: zero point plus lambda times the sum of weight times task vector."""

    weights: Mapping[str, float] | None = weights_field()
    lambda_: float = lambda_field()
    exclude: tuple[str, ...] = exclude_field()

    method: ClassVar[str] = "task_arithmetic"
    inputs: ClassVar[str] = "task_vectors"
    scope: ClassVar[str] = "entry"
    draws: ClassVar[bool] = False
    title: ClassVar[str] = "Task arithmetic"
    source: ClassVar[str] = "Ilharco et al. 2023, Editing models with task arithmetic, arXiv 2212.04089"

    def __post_init__(self) -> None:
        """Check the fields."""
        settle(self)


@dataclass(frozen=True, kw_only=True)
class Ties:
    """Parameters of ``ties``: trim, elect a sign, average what agrees."""

    density: float = parameter(0.2, Number(0, 1, low_open=True), "share of each task vector's entries that is kept")
    weights: Mapping[str, float] | None = weights_field()
    lambda_: float = lambda_field()
    trim_scope: str = parameter(
        "tensor",
        Choice(("tensor", "model")),
        "over what the largest entries are chosen: each tensor, or all merged tensors together",
    )
    kept_count: str = parameter(
        "at_least_one",
        Choice(("at_least_one", "floor", "threshold")),
        "entries kept of n: max(1, floor(density n)), floor(density n), or all from the (floor(density n) + 1)-th on",
    )
    elect: str = elect_field()
    zero_sum: str = zero_sum_field()
    divisor: str = divisor_field()
    exclude: tuple[str, ...] = exclude_field()

    method: ClassVar[str] = "ties"
    inputs: ClassVar[str] = "task_vectors"
    draws: ClassVar[bool] = False
    title: ClassVar[str] = "TIES: trim, elect, merge"
    source: ClassVar[str] = "Yadav et al. 2023, TIES-Merging, arXiv 2306.01708"

    def __post_init__(self) -> None:
        """Check the fields, that a weighted mean exists, and that the model scope counts by threshold."""
        settle(self)
        _check_mean(self)
        if self.trim_scope == "model" and self.kept_count != "threshold":
            raise ParameterErrors(
                [
                    f"kept_count: trim_scope model keeps every entry that reaches its threshold, found "
                    f"{self.kept_count}; write kept_count: threshold"
                ]
            )

    @property
    def scope(self) -> str:
        """``tensor``, but ``entry`` with ``trim_scope: model``, whose thresholds are known beforehand."""
        return "entry" if self.trim_scope == "model" else "tensor"


@dataclass(frozen=True, kw_only=True)
class DareLinear:
    """Parameters of ``dare_linear``: drop at random, rescale, then task arithmetic."""

    drop_rate: float = drop_rate_field()
    weights: Mapping[str, float] | None = weights_field()
    lambda_: float = lambda_field()
    rescale: str = rescale_field()
    exclude: tuple[str, ...] = exclude_field()

    method: ClassVar[str] = "dare_linear"
    inputs: ClassVar[str] = "task_vectors"
    draws: ClassVar[bool] = True
    title: ClassVar[str] = "DARE with task arithmetic"
    source: ClassVar[str] = "Yu et al. 2024, Language models are super Mario, arXiv 2311.03099"

    def __post_init__(self) -> None:
        """Check the fields."""
        settle(self)

    @property
    def scope(self) -> str:
        """``entry``, but ``tensor`` with ``rescale: l1``, whose factor depends on all entries."""
        return "tensor" if self.rescale == "l1" else "entry"


@dataclass(frozen=True, kw_only=True)
class DareTies:
    """Parameters of ``dare_ties``: drop at random, rescale, then elect and average as in TIES."""

    drop_rate: float = drop_rate_field()
    weights: Mapping[str, float] | None = weights_field()
    lambda_: float = lambda_field()
    rescale: str = rescale_field()
    elect: str = elect_field()
    zero_sum: str = zero_sum_field()
    divisor: str = divisor_field()
    exclude: tuple[str, ...] = exclude_field()

    method: ClassVar[str] = "dare_ties"
    inputs: ClassVar[str] = "task_vectors"
    draws: ClassVar[bool] = True
    title: ClassVar[str] = "DARE with sign election"
    source: ClassVar[str] = "Yu et al. 2024, arXiv 2311.03099, on Yadav et al. 2023, arXiv 2306.01708"

    def __post_init__(self) -> None:
        """Check the fields and that a weighted mean exists."""
        settle(self)
        _check_mean(self)

    @property
    def scope(self) -> str:
        """``entry``, but ``tensor`` with ``rescale: l1``, whose factor depends on all entries."""
        return "tensor" if self.rescale == "l1" else "entry"


@dataclass(frozen=True, kw_only=True)
class Tsv:
    """Parameters of ``tsv``: TSV-M, decorrelated top singular triplets of every matrix."""

    weights: Mapping[str, float] | None = weights_field()
    lambda_: float = lambda_field()
    svd_scope: str = svd_scope_field()
    rest: str = rest_field()
    exclude: tuple[str, ...] = exclude_field()

    method: ClassVar[str] = "tsv"
    inputs: ClassVar[str] = "task_vectors"
    scope: ClassVar[str] = "tensor"
    draws: ClassVar[bool] = False
    title: ClassVar[str] = "TSV-M: task singular vectors"
    source: ClassVar[str] = "Gargiulo et al. 2025, Task singular vectors, CVPR, arXiv 2412.00081"

    def __post_init__(self) -> None:
        """Check the fields."""
        settle(self)


@dataclass(frozen=True, kw_only=True)
class Star:
    """Parameters of ``star``: cut every task matrix to its leading part, rescale, average."""

    eta: float = parameter(
        40.0, Number(0, 100, low_open=True), "share of the sum of singular values that is kept, in percent"
    )
    weights: Mapping[str, float] | None = weights_field()
    lambda_: float = lambda_field()
    svd_scope: str = svd_scope_field()
    rest: str = rest_field()
    exclude: tuple[str, ...] = exclude_field()

    method: ClassVar[str] = "star"
    inputs: ClassVar[str] = "task_vectors"
    scope: ClassVar[str] = "tensor"
    draws: ClassVar[bool] = False
    title: ClassVar[str] = "STAR: spectral truncation and rescale"
    source: ClassVar[str] = "Lee et al. 2025, STAR, NAACL, arXiv 2502.10339"

    def __post_init__(self) -> None:
        """Check the fields."""
        settle(self)


@dataclass(frozen=True, kw_only=True)
class IsoC:
    """Parameters of ``iso_c``: the sum of the task matrices with a flat spectrum."""

    weights: Mapping[str, float] | None = weights_field()
    lambda_: float = lambda_field()
    svd_scope: str = svd_scope_field()
    rest: str = rest_field()
    exclude: tuple[str, ...] = exclude_field()

    method: ClassVar[str] = "iso_c"
    inputs: ClassVar[str] = "task_vectors"
    scope: ClassVar[str] = "tensor"
    draws: ClassVar[bool] = False
    title: ClassVar[str] = "Iso-C: isotropic merging in common subspace"
    source: ClassVar[str] = "Marczak et al. 2025, No task left behind, ICML, arXiv 2502.04959"

    def __post_init__(self) -> None:
        """Check the fields."""
        settle(self)


@dataclass(frozen=True, kw_only=True)
class Slerp:
    """Parameters of ``slerp``: the way from base to vlm along a great circle."""

    t: float = parameter(0.5, Number(0, 1), "share of the way from base (0) to vlm (1)")
    lerp_above: float = parameter(
        0.9995, Number(0, 1), "absolute cosine above which the way is a straight line, as for most fine-tunes"
    )
    exclude: tuple[str, ...] = exclude_field()

    method: ClassVar[str] = "slerp"
    inputs: ClassVar[str] = "models"
    scope: ClassVar[str] = "tensor"
    draws: ClassVar[bool] = False
    title: ClassVar[str] = "Spherical interpolation of two models"
    source: ClassVar[str] = "Shoemake 1985, Animating rotation with quaternion curves"

    def __post_init__(self) -> None:
        """Check the fields."""
        settle(self)


@dataclass(frozen=True, kw_only=True)
class Gaussian:
    """Parameters of ``gaussian``, a control: noise as long as the change of the vlm."""

    scale: float = parameter(1.0, Number(0), "norm of the noise over the norm of vlm minus zero point, per tensor")

    method: ClassVar[str] = "gaussian"
    inputs: ClassVar[str] = "task_vectors"
    scope: ClassVar[str] = "tensor"
    draws: ClassVar[bool] = True
    title: ClassVar[str] = "Control: Gaussian noise of matched norm"
    source: ClassVar[str] = "a control of this project"

    def __post_init__(self) -> None:
        """Check the fields."""
        settle(self)


Parameters = Linear | TaskArithmetic | Ties | DareLinear | DareTies | Tsv | Star | IsoC | Slerp | Gaussian | ByMergekit

PARAMETERS: dict[str, type[Any]] = {
    "linear": Linear,
    "task_arithmetic": TaskArithmetic,
    "ties": Ties,
    "dare_linear": DareLinear,
    "dare_ties": DareTies,
    "tsv": Tsv,
    "star": Star,
    "iso_c": IsoC,
    "slerp": Slerp,
    "gaussian": Gaussian,
}
"""Every method by its name in a recipe."""


@dataclass(frozen=True)
class ParameterInfo:
    """One line of the list of parameters: everything as the user reads it."""

    name: str
    type: str
    default: object
    bounds: str
    meaning: str


def build(method: str, values: Mapping[str, object], vectors: Sequence[str], conventions: str = "paper") -> Parameters:
    """Make the parameters of ``method`` from the values of a recipe, or say everything that is wrong.

    Args:
        method: A key of ``PARAMETERS``, or ``mergekit:NAME``, which has its own table and no conventions.
        values: By name as in the recipe, so ``lambda``, not ``lambda_``. Absent ones take the default.
        vectors: Roles of the models that give task vectors; for ``linear`` of the models that are averaged.
        conventions: A key of ``PRESETS``; ``values`` override what it sets.

    Returns:
        The parameters, with a weight for each role of ``vectors`` where the method has weights.

    Raises:
        ParameterErrors: A method, convention or parameter is unknown, a value is missing, of the wrong type
            or out of range, a weight belongs to no vector, a vector has no weight, or the method makes no
            sense with that many vectors. All of them are listed.
    """
    if is_mergekit(method):
        return build_mergekit(method, values, vectors)
    if method not in PARAMETERS:
        raise ParameterErrors([_unknown("method", method, PARAMETERS)])
    kind = PARAMETERS[method]
    named = {recipe_name(item.name): item for item in fields(kind)}
    preset, problems = _preset(method, conventions)
    problems += [
        f"{key}: {method} has no such parameter; {_nearest(str(key), named)}" for key in values if key not in named
    ]
    merged = {**preset, **{key: value for key, value in values.items() if key in named}}
    for key, value in merged.items():
        if isinstance(value, Required):
            problems.append(f"{key}: {method} needs a value, conventions {conventions} has no default")
        else:
            problem = named[key].metadata["bounds"].problem(key, value)
            problems += [problem] if problem else []
    weights = merged.get("weights")
    if "weights" in named:
        if isinstance(weights, Mapping) and Weights().problem("weights", weights) is None:
            problems += _role_problems(weights, vectors)
        elif weights is None and (method != "linear" or merged.get("normalize") is True):
            merged["weights"] = dict.fromkeys(vectors, 1.0)
    problems += _vector_problems(method, merged, vectors)
    if not problems:
        try:
            arguments: dict[str, Any] = {named[key].name: value for key, value in merged.items()}
            return kind(**arguments)
        except ParameterErrors as error:
            problems += error.problems
    raise ParameterErrors(problems)


def inputs_of(method: str, zero_point: str | None) -> tuple[tuple[str, ...], str | None]:
    """Return the models that a method merges, in the order it sees them, and what it measures them from.

    From ancestor there are two task vectors, base and vlm; from base the vlm's alone. Averages of the models
    themselves take base and vlm and no zero point. Methods of mergekit: ``mergekit_inputs``.

    Args:
        method: A known method.
        zero_point: ``ancestor`` or ``base``; None for methods that were given none.
    """
    if is_mergekit(method):
        return mergekit_inputs(method.removeprefix(PREFIX), zero_point)
    if PARAMETERS[method].inputs == "models":
        return ("base", "vlm"), None
    return ("base", "vlm") if zero_point == "ancestor" else ("vlm",), zero_point


def canonical(parameters: Parameters) -> dict[str, object]:
    """Return every field by its recipe name, JSON-able; equal parameters give equal JSON text."""
    if isinstance(parameters, ByMergekit):
        return {key: _plain(value) for key, value in parameters.values.items()}
    return {recipe_name(item.name): _plain(getattr(parameters, item.name)) for item in fields(parameters)}


def describe(method: str) -> list[ParameterInfo]:
    """List the parameters of ``method`` with defaults of the convention ``paper``.

    Raises:
        ParameterErrors: The method is unknown.
    """
    name = method.removeprefix(PREFIX)
    if is_mergekit(method) and name in MERGEKIT:
        return [
            ParameterInfo(
                name=slot.name,
                type=slot.bounds.type_name if slot.per == "all" else f"{slot.bounds.type_name} per model",
                default=default_text(slot) if slot.required else slot.default,
                bounds=slot.bounds.text() + ("" if slot.per == "all" else ", or one per model"),
                meaning=slot.meaning,
            )
            for slot in MERGEKIT[name].slots
        ]
    if method not in PARAMETERS:
        raise ParameterErrors([_unknown("method", method, PARAMETERS)])
    return [
        ParameterInfo(
            name=recipe_name(item.name),
            type=item.metadata["bounds"].type_name,
            default=_plain(item.default),
            bounds=item.metadata["bounds"].text(),
            meaning=item.metadata["meaning"],
        )
        for item in fields(PARAMETERS[method])
    ]


def _check_mean(parameters: Ties | DareTies) -> None:
    """Refuse weights whose mean over agreeing entries can divide by zero or turn signs around."""
    weights = parameters.weights
    if weights is None or parameters.divisor != "weights":
        return
    if any(weight < 0 for weight in weights.values()):
        raise ParameterErrors([f"weights: a weighted mean needs weights of at least 0, found {dict(weights)}"])
    if not any(weights.values()):
        raise ParameterErrors([f"weights: a weighted mean needs a weight above 0, found {dict(weights)}"])


def _preset(method: str, conventions: str) -> tuple[dict[str, object], list[str]]:
    if conventions not in PRESETS:
        return {}, [_unknown("conventions", conventions, PRESETS)]
    if method not in PRESETS[conventions]:
        return {}, [f"conventions: {conventions} has no method {method}; use conventions: paper"]
    return dict(PRESETS[conventions][method]), []


def _role_problems(weights: Mapping[str, object], vectors: Sequence[str]) -> list[str]:
    have = ", ".join(vectors)
    extra = [f"weights: there is no vector of {role}, only of {have}" for role in weights if role not in vectors]
    lost = [f"weights: no weight for {role}; name all of {have}" for role in vectors if role not in weights]
    return extra + lost


def _vector_problems(method: str, values: Mapping[str, object], vectors: Sequence[str]) -> list[str]:
    if method == "tsv" and len(vectors) == 1:
        return [
            f"method: with one task vector ({vectors[0]}) tsv is task arithmetic; "
            "use task_arithmetic, or a zero point that gives two vectors"
        ]
    if method == "slerp" and len(vectors) != 2:
        return [f"method: slerp goes from one model to another, found {', '.join(vectors)}"]
    if method == "gaussian" and "vlm" not in vectors:
        return [f"method: gaussian measures its norm on the vlm, found vectors of {', '.join(vectors)}"]
    if method in ("ties", "dare_ties") and len(vectors) == 1 and values.get("divisor", "weights") == "weights":
        weights = values.get("weights")
        weight = weights.get(vectors[0]) if isinstance(weights, Mapping) else None
        if isinstance(weight, int | float) and weight != 1:
            return [f"weights: the weight of a single vector cancels in {method}, found {weight}; use lambda"]
    return []


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return list(value)
    return dict(value) if isinstance(value, Mapping) else value


def _unknown(what: str, found: str, known: Mapping[str, object]) -> str:
    return f"{what}: {found!r} is unknown; {_nearest(str(found), known)}"


def _nearest(found: str, known: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(found.lower(), known, n=1)
    return f"{f'did you mean {near[0]}? ' if near else ''}known: {', '.join(known)}"
