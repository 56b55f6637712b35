"""Grade stored answers again: the task's own filters and graders over texts that were written earlier, no model.

lm-eval's samples are rebuilt row by row from the stored responses, so that samples and scores go through the same
code as those of a live model. Reading and writing run folders is the sweep's.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from mergelab.errors import RecipeError
from mergelab.evals.loaded import LoadedTask, Part
from mergelab.evals.quiet import quiet_harness
from mergelab.evals.resources import check_thread
from mergelab.evals.samples import Sample, build_samples, check_scores, harness_scores, scored


def can_regrade(task: LoadedTask) -> bool:
    """Return whether the stored answers suffice: of log-likelihood tasks the choice alone is kept."""
    return all(part.loaded.is_generative for part in task.parts)


def regrade(
    task: LoadedTask, metrics: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], list[Sample]]:
    """Return metrics and samples as grading the stored responses gives them now.

    Whatever grading does not decide (tokens, truncation, seconds, prompts, decoding) stays as it was recorded.

    Args:
        task: The loaded task; generative.
        metrics: As stored.
        samples: As stored; any subset of the task's documents.

    Raises:
        RecipeError: A document is not the one that was asked about; the first such is named.
        MergelabError: lm-eval's aggregate over the new verdicts differs from ours.
    """
    check_thread(task.name, task.entry.needs)
    for part in task.parts:
        part.loaded.failures.clear()
    graded: list[Sample] = []
    results: dict[str, dict[str, Any]] = {}
    asked = {int(sample["doc_id"]): sample for sample in samples}
    with quiet_harness():
        for part in task.parts:
            own = {
                doc_id: asked.pop(doc_id)
                for doc_id in sorted(asked)
                if part.first_doc_id <= doc_id < part.first_doc_id + part.loaded.num_documents
            }
            rows, results[part.loaded.name] = _grade(task, part, own)
            endings = [(int(sample["num_tokens"]), not sample["truncated"]) for sample in own.values()]
            graded += build_samples(task.entry, rows, endings, part.first_doc_id)
    if asked:
        raise _other_document(task, min(asked), "the task has no such document now")
    scores = harness_scores(task, {"results": results}, graded)
    now = {
        **metrics,
        **scored(task.entry, graded),
        "ungradable_reasons": dict(sum((part.loaded.failures for part in task.parts), Counter())),
        "lm_eval": scores,
    }
    check_scores(task.entry, graded, scores)
    return now, graded


def _grade(
    task: LoadedTask, part: Part, samples: Mapping[int, Mapping[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return lm-eval's sample rows of one task object over stored responses, and its aggregates by result key."""
    from lm_eval.api.instance import Instance
    from lm_eval.utils import handle_non_serializable, hash_string

    harness_task = part.loaded.task
    documents = harness_task.eval_docs
    instances = []
    for doc_id, sample in samples.items():
        document = documents[doc_id - part.first_doc_id]
        text = json.dumps(document, indent=2, default=handle_non_serializable, ensure_ascii=False)
        if hash_string(text) != sample["doc_hash"]:
            raise _other_document(task, doc_id, "its content is another one now")
        # Graders see the document and the answer; the prompt itself is not needed again.
        instances.append(
            Instance(
                request_type="generate_until",
                doc=document,
                arguments=("", {}),
                idx=0,
                metadata=(part.loaded.name, doc_id, 1),
                resps=[sample["response"]],
            )
        )
    if not instances:
        return [], {}
    harness_task._instances = instances
    harness_task.apply_filters()
    rows: list[dict[str, Any]] = []
    values: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for name in instances[0].filtered_resps:
        for instance in instances:
            answer = instance.filtered_resps[name]
            verdicts = harness_task.process_results(instance.doc, [answer])
            sample = samples[instance.doc_id]
            rows.append(
                {
                    "doc_id": instance.doc_id - part.first_doc_id,
                    "doc": instance.doc,
                    "filter": name,
                    "resps": [instance.resps],
                    "filtered_resps": [answer],
                    "doc_hash": sample["doc_hash"],
                    "prompt_hash": sample["prompt_hash"],
                    "target_hash": hash_string(str(harness_task.doc_to_target(instance.doc))),
                    **verdicts,
                }
            )
            for metric, value in verdicts.items():
                values[metric, name].append(value)
    aggregation = harness_task.aggregation()
    return rows, {f"{metric},{name}": aggregation[metric](found) for (metric, name), found in values.items()}


def _other_document(task: LoadedTask, doc_id: int, why: str) -> RecipeError:
    return RecipeError(
        f"task {task.name}: document {doc_id} is not the one that was asked about: {why}. Nothing was written. "
        "Give the documents of the run with --data."
    )
