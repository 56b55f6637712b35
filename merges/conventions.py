"""What the conventions of other implementations set apart from the defaults, which are those of the papers.

Standard library only.
"""

from __future__ import annotations


class Required:
    """Stands in a preset for a value that its convention has no default for."""


REQUIRED = Required()

PRESETS: dict[str, dict[str, dict[str, object]]] = {
    "paper": {
        "linear": {},
        "task_arithmetic": {},
        "ties": {},
        "dare_linear": {},
        "dare_ties": {},
        "tsv": {},
        "star": {},
        "iso_c": {},
        "slerp": {},
        "gaussian": {},
    },
    "official": {
        "linear": {},
        "task_arithmetic": {},
        "ties": {
            "trim_scope": "model",
            "kept_count": "threshold",
            "zero_sum": "majority",
            "divisor": "count",
        },
        "dare_linear": {},
        "dare_ties": {"zero_sum": "majority", "divisor": "count"},
        "tsv": {"svd_scope": "matrices"},
        "star": {"svd_scope": "matrices"},
        "iso_c": {"svd_scope": "matrices"},
        "gaussian": {},
    },
    "mergekit": {
        "linear": {"normalize": True},
        "task_arithmetic": {},
        "ties": {"density": 1.0, "elect": "weighted", "zero_sum": "plus"},
        "dare_linear": {"drop_rate": 0.0, "rescale": "l1"},
        "dare_ties": {
            "drop_rate": 0.0,
            "rescale": "l1",
            "elect": "weighted",
            "zero_sum": "plus",
            "divisor": "none",
        },
        "slerp": {},
        "gaussian": {},
    },
    "peft": {
        "task_arithmetic": {},
        "ties": {"density": REQUIRED, "kept_count": "floor", "zero_sum": "plus", "divisor": "count"},
        "dare_linear": {"drop_rate": REQUIRED},
        "dare_ties": {"drop_rate": REQUIRED, "zero_sum": "plus", "divisor": "count"},
        "gaussian": {},
    },
}
"""What each convention sets apart from the defaults of fields; it does not define methods missing there."""
