"""Stands in for the ``code_eval`` metric, which lm-eval's code tasks fetch from the hub and run in our own process.

The tasks' other functions (what is cut out of an answer, which tests are appended) stay upstream's.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence

from mergelab.evals.quiet import replaced
from mergelab.evals.sandbox import runs

VERSION = 1
"""Raised whenever the same program may be judged otherwise; part of the stage key."""

_MODULES = ("lm_eval.tasks.mbpp.utils", "lm_eval.tasks.humaneval.utils")


class CodeEval:
    """What ``evaluate.load("code_eval")`` returns, as far as the tasks use it."""

    def compute(
        self, *, references: Sequence[str], predictions: Sequence[Sequence[str]], k: Sequence[int]
    ) -> tuple[dict[str, float], dict[int, list[bool]]]:
        """Return pass@1 over the problems, and which candidates passed.

        Args:
            references: Tests, one text a problem.
            predictions: Candidate programs of each problem; the test is appended to each.
            k: Only 1 can be asked for: one greedy answer is all there is.

        **Source**: pass@k of Chen et al. 2021 (2107.03374); for k = 1 the mean share of candidates that pass.

        **Deviations**: none for k = 1.
        """
        if list(k) != [1]:
            raise ValueError(f"only pass@1 is graded here, asked for k = {k}")
        passed = {
            number: [runs(f"{candidate}\n{test}") for candidate in candidates]
            for number, (test, candidates) in enumerate(zip(references, predictions, strict=True))
        }
        return {"pass@1": sum(sum(one) / len(one) for one in passed.values()) / len(passed)}, passed


@contextlib.contextmanager
def own_code_eval() -> Iterator[None]:
    """Let task modules that are imported meanwhile get our grader, whoever imported them before."""
    import evaluate

    for name in _MODULES:
        sys.modules.pop(name, None)
    with replaced(evaluate, "load", lambda *_, **__: CodeEval()):
        yield
