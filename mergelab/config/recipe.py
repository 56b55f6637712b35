"""A recipe: one experiment as a person writes it. What each key means, its unit and its range.

Only the form is checked here; whether a method takes its parameters, and whether the recipe fits its pair, is
checked in ``load.py``.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from mergelab.config.document import Document
from mergelab.config.pair import Name, Pair, ProtocolName
from mergelab.config.problems import PARTIAL

Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Values = dict[str, Any]
Grid = dict[str, Annotated[tuple[Any, ...], Field(strict=False, min_length=1)]]
Tasks = Annotated[tuple[Text, ...], Field(strict=False, min_length=1)]


class Merge(Document):
    """One method, the point that ``mergelab merge`` makes of it, and the grid that ``mergelab run`` walks."""

    method: Text
    """A merge method; ``mergelab methods`` lists them."""

    parameters: Values | None = None
    """Parameters of the method by name: the point that ``mergelab merge`` makes."""

    sweep: Grid | None = None
    """Lists of values by parameter; ``mergelab run`` makes every combination, in the written order. A swept
    key replaces the one of ``parameters``. Null: the point of ``parameters`` alone."""


class Sink(Document):
    """How Sink Strength is measured."""

    last_layers: Literal["auto"] | Count = "auto"
    """Number of last decoder layers, at least 1; auto is 10, or half of them when there are fewer than 20."""

    prompts: Text = "builtin-v1"
    """The calibration prompts: ``builtin-v1``, or a JSONL file (relative to the recipe)."""

    dtype: Dtype = "auto"
    """Dtype of the forward pass; auto is the one that the answers are generated in."""


class Evals(Document):
    """Which tasks are graded, and how. In YAML ``evals: auto`` is this block with every default."""

    protocol: Literal["auto"] | ProtocolName = "auto"
    """Named settings: tasks, shots, template, budgets, batch size; auto takes the pair's."""

    tasks: Literal["auto"] | Tasks = "auto"
    """Names of tasks; auto takes those of the protocol."""

    data: Text | dict[Text, Text] = Field(default_factory=dict)
    """Local JSONL data by task, a file or a folder of splits, instead of the task's own source; or one folder with
    ``TASK.jsonl`` or ``TASK/SPLIT.jsonl``. Relative to the recipe."""

    task_folder: Text | None = None
    """Folder of lm-eval YAMLs with a ``registry.yaml``: tasks of your own (relative to the recipe)."""

    allow_code: bool = False
    """Run programs that models write (mbpp, humaneval), and Python that a task folder brings along."""

    limit: Count | None = None
    """Documents per task, a seeded random subset of at least 1; null takes all."""

    batch_size: Count | None = None
    """Prompts per forward pass, at least 1; null takes the protocol's, and 256 for text under vllm."""

    backend: Literal["hf", "vllm"] = "hf"
    """What answers text tasks: ``hf``, transformers on the live model, or ``vllm`` (an extra; one GPU, with room for
    the weights twice). Pictures are always shown to the live model."""

    template: Literal["base"] = "base"
    """Whose chat template, tokenizer and stop tokens all points share."""

    max_gen_toks: dict[Text, Count] = Field(default_factory=dict)
    """Most new tokens per answer by task, at least 1, instead of the protocol's."""

    replicate: bool = False
    """Grade the vlm a second time: how many answers differ then is the noise floor of the run."""


class Claims(Document):
    """What the verdicts are held to, fixed before the run: a change is refused in the same run folder."""

    margin: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] = 2.0
    """The loss that still counts as none, in points, above 0 and at most 100."""

    alpha: Annotated[float, Field(gt=0, le=0.5, allow_inf_nan=False)] = 0.05
    """One minus the level of the printed two-sided intervals, above 0 and at most 0.5."""

    primary: Literal["auto"] | Tasks = "auto"
    """The tasks that the claims are about; auto is all tasks of the run."""

    correction: Literal["holm"] = "holm"
    """How claims over several methods and tasks are corrected for their number."""


class Recipe(Document):
    """One experiment: a pair, a grid of merges, and how they are measured, graded and judged."""

    name: Name
    """How tables and the default run folder call the recipe; letters, digits, dot, dash, underscore."""

    pair: Text
    """``bench``, the name of a pair, or the path of a pair file (relative to the recipe)."""

    zero_point: Literal["ancestor", "base"] | None = None
    """What task vectors are measured from; null is ancestor if the pair has one, else base."""

    conventions: Literal["paper", "official", "mergekit", "peft"] = "paper"
    """Whose trim scope, kept count, sign election, tie rule, divisor and rescale a method follows."""

    method: Text | None = None
    """Shorthand for a recipe with one merge: the method, with ``parameters`` and ``sweep`` beside it."""

    parameters: Values | None = None
    """See ``Merge.parameters``; only beside ``method``."""

    sweep: Grid | None = None
    """See ``Merge.sweep``; only beside ``method``."""

    merges: Annotated[tuple[Merge, ...], Field(strict=False, min_length=1)] | None = None
    """Several merges, instead of ``method``, ``parameters`` and ``sweep``."""

    seeds: Annotated[tuple[Seed, ...], Field(strict=False, min_length=1)] = (0,)
    """Seeds, 0 or above: one point per seed for methods that draw, ignored by the others."""

    controls: Annotated[tuple[Literal["endpoints", "gaussian", "gaussian_per_merge"], ...], Field(strict=False)] = (
        "endpoints",
        "gaussian",
    )
    """Control points: ``endpoints``, base and vlm sent through the stream as copies; ``gaussian``, base plus noise as
    large as the tower's change; ``gaussian_per_merge``, the same for every merge, as large as its change of base."""

    control_seeds: Literal["auto"] | Annotated[tuple[Seed, ...], Field(strict=False, min_length=1)] = "auto"
    """Seeds of the gaussian control, 0 or above; auto is ``seeds``, filled up to three on any pair but the bench."""

    output_dtype: Dtype = "auto"
    """What merged weights are rounded to, once; auto keeps the dtype of each tensor of the vlm."""

    keep_weights: Literal["never", "always"] = "never"
    """Whether ``mergelab run`` leaves the weights of its points on disk."""

    sink: Sink = Field(default_factory=Sink)
    """How Sink Strength is measured."""

    evals: Evals = Field(default_factory=Evals)
    """Which tasks are graded, and how."""

    claims: Claims = Field(default_factory=Claims)
    """What the verdicts are held to."""

    track: Literal["none"] = "none"
    """Experiment tracker that gets the numbers as well."""

    @field_validator("evals", mode="before")
    @classmethod
    def _auto_is_every_default(cls, value: Any) -> Any:
        return {} if value == "auto" else value

    @field_validator("seeds", "controls", "control_seeds")
    @classmethod
    def _once(cls, value: tuple[Any, ...] | str) -> tuple[Any, ...] | str:
        if isinstance(value, str):
            return value
        twice = sorted({item for item in value if value.count(item) > 1})
        if twice:
            raise ValueError(f"{', '.join(map(str, twice))} given twice; keep one")
        return value

    @model_validator(mode="after")
    def _one_way_to_name_merges(self, info: ValidationInfo) -> Recipe:
        if not (info.context or {}).get(PARTIAL):
            keys = [key for key in MERGE_KEYS if getattr(self, key) is not None]
            if problems := merge_key_problems(keys):
                raise ValueError("\n".join(problems))
        return self

    @property
    def entries(self) -> tuple[Merge, ...]:
        """The merges of the recipe, whichever way they are written."""
        if self.merges is not None:
            return self.merges
        if self.method is None:
            return ()
        return (Merge(method=self.method, parameters=self.parameters, sweep=self.sweep),)


MERGE_KEYS = ("method", "parameters", "sweep", "merges")


def merge_key_problems(keys: Collection[str]) -> list[str]:
    """Return what is wrong with the choice between ``method`` (and what goes with it) and ``merges``.

    Args:
        keys: Those of ``MERGE_KEYS`` that the recipe gives.
    """
    if "merges" in keys:
        beside = [f"`{key}`" for key in ("method", "parameters", "sweep") if key in keys]
        if beside:
            names = ", ".join(beside)
            return [f"merges: stands beside {names}; move these into an entry of `merges`, or drop `merges`"]
        return []
    if "method" not in keys:
        return ["method: missing, and required (or a list under `merges`); `mergelab methods` lists them"]
    return []


def resolved(document: Recipe | Pair) -> dict[str, Any]:
    """Return a recipe or pair with all defaults filled in, as JSON says it; loading it gives an equal one."""
    return document.model_dump(mode="json")
