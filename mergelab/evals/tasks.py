"""The tasks this tool knows, as a table a person can read.

Adding a task means adding its row, with both result keys checked against a real run; loading checks them against the
metrics and filters of the definition. Tasks from a folder of the user's are in ``task_folder``.
"""

from __future__ import annotations

from mergelab.evals.entry import TaskEntry, nearest, task_path

__all__ = ["EQ_BENCH_LOWEST", "TASKS", "TaskEntry", "nearest", "task_path"]

EQ_BENCH_LOWEST = -199.08
"""10 (10 - 0.7477 * 40): all four emotions off by the whole scale of 0 to 10."""

RULER = {
    **{name: f"{name}.yaml" for name in ("niah_single_1", "niah_single_2", "niah_single_3")},
    **{name: f"{name}.yaml" for name in ("niah_multikey_1", "niah_multikey_2", "niah_multikey_3")},
    **{name: f"{name}.yaml" for name in ("niah_multiquery", "niah_multivalue")},
    **{f"ruler_{name}": f"{name}.yaml" for name in ("vt", "cwe", "fwe", "qa_squad", "qa_hotpot")},
}
"""The thirteen subtasks of RULER and their files. Those with essays or questions fetch a data set to make documents."""

_MATH = {"problem": str, "solution": str}
_MBPP = {"text": str, "test_list": list}
_HUMANEVAL = {"prompt": str, "test": str, "entry_point": str}
_RULER = {"input": str, "outputs": list, "max_length": int, "gen_prefix": str}
_GSM8K = {"question": str, "answer": str}
_MATCH, _EXTRACT = "exact_match,strict-match", "exact_match,flexible-extract"

TASKS: dict[str, TaskEntry] = {
    entry.name: entry
    for entry in (
        TaskEntry(
            "bench_format",
            "text",
            "bench",
            "bench_format.yaml",
            strict="strict,none",
            flexible="flexible,none",
            cluster="cluster",
            unparsable="empty",
            fields={"prompt": str, "target": str, "answer": str},
        ),
        TaskEntry(
            "bench_image",
            "vision",
            "bench",
            "bench_image.yaml",
            strict="strict,none",
            flexible="flexible,none",
            cluster="cluster",
            unparsable="empty",
            fields={"kind": str, "question": str, "answers": list, "sentences": list, "pixels": str},
            listed="questions",
        ),
        TaskEntry(
            "ifeval",
            "text",
            "lm_eval",
            "ifeval/ifeval.yaml",
            strict="prompt_level_strict_acc,none",
            flexible="prompt_level_loose_acc,none",
            fields={"key": int, "prompt": str, "instruction_id_list": list, "kwargs": list},
            unparsable="empty",
            needs=("ifeval",),
        ),
        TaskEntry("gsm8k", "text", "lm_eval", "gsm8k/gsm8k.yaml", fields=_GSM8K, strict=_MATCH, flexible=_EXTRACT),
        TaskEntry(
            "gsm8k_cot",
            "text",
            "lm_eval",
            "gsm8k/gsm8k-cot.yaml",
            fields=_GSM8K,
            strict=_MATCH,
            flexible=_EXTRACT,
        ),
        TaskEntry(
            "gsm8k_cot_zeroshot",
            "text",
            "lm_eval",
            "gsm8k/gsm8k-cot-zeroshot.yaml",
            fields=_GSM8K,
            strict=_MATCH,
            flexible=_EXTRACT,
        ),
        TaskEntry(
            "gpqa_diamond_cot_zeroshot",
            "text",
            "lm_eval",
            "gpqa/cot_zeroshot/gpqa_diamond_cot_zeroshot.yaml",
            fields={
                "Question": str,
                "Correct Answer": str,
                "Incorrect Answer 1": str,
                "Incorrect Answer 2": str,
                "Incorrect Answer 3": str,
            },
            shuffled=True,
            strict=_MATCH,
            flexible=_EXTRACT,
        ),
        TaskEntry(
            "mmlu_pro",
            "text",
            "lm_eval",
            "mmlu_pro",
            strict="exact_match,custom-extract",
            flexible=None,
            fields={"question": str, "options": list, "answer": str, "category": str},
            group=True,
            subject="category",
        ),
        TaskEntry(
            "boolq",
            "text",
            "lm_eval",
            "super_glue/boolq/default.yaml",
            strict="acc,none",
            flexible=None,
            fields={"passage": str, "question": str, "label": int},
            unparsable="never",
        ),
        TaskEntry(
            "mmlu",
            "text",
            "lm_eval",
            "mmlu/default",
            strict="acc,none",
            flexible=None,
            fields={"question": str, "choices": list, "answer": int, "subject": str},
            group=True,
            subject="subject",
            unparsable="never",
        ),
        # Pictures through the vlm's own processor.
        TaskEntry(
            "mmmu_val",
            "vision",
            "lm_eval",
            "mmmu",
            strict="read_acc,none",
            flexible="acc,none",
            fields={"subject": str, "question": str, "options": str, "question_type": str, "answer": str},
            group=True,
            members="mmmu_*.yaml",
            subject="subject",
            unparsable="guessed",
            pictures=tuple(f"image_{number}" for number in range(1, 8)),
            guesses=True,
            needs=("vision",),
        ),
        TaskEntry(
            "chartqa",
            "vision",
            "lm_eval",
            "chartqa/chartqa.yaml",
            strict="exact_match,none",
            flexible="relaxed_accuracy,none",
            fields={"query": str, "label": list, "image": str},
            cluster="image",
            unparsable="empty",
            pictures=("image",),
            needs=("vision",),
        ),
        TaskEntry(
            "bbh_cot_fewshot",
            "text",
            "lm_eval",
            "bbh/cot_fewshot",
            strict="exact_match,get-answer",
            flexible=None,
            fields={"input": str, "target": str, "subtask": str},
            group=True,
            members="[!_]*.yaml",
            subject="subtask",
        ),
        TaskEntry(
            "minerva_math500",
            "text",
            "lm_eval",
            "minerva_math/minerva_math500.yaml",
            strict="exact_match,none",
            flexible="math_verify,none",
            fields=_MATH,
            unparsable="empty",
            needs=("math",),
        ),
        TaskEntry(
            "hendrycks_math500",
            "text",
            "lm_eval",
            "hendrycks_math/hendrycks_math500.yaml",
            strict="exact_match,none",
            flexible=None,
            fields=_MATH,
            unparsable="empty",
        ),
        TaskEntry(
            "truthfulqa_mc2",
            "text",
            "lm_eval",
            "truthfulqa/truthfulqa_mc2.yaml",
            strict="acc,none",
            flexible=None,
            fields={"question": str, "mc1_targets": dict, "mc2_targets": dict},
            unparsable="never",
        ),
        TaskEntry(
            "eq_bench",
            "text",
            "lm_eval",
            "eq_bench/default.yaml",
            strict="eqbench,none",
            flexible="percent_parseable,none",
            fields={"prompt": str, "reference_answer_fullscale": str},
            unparsable="flexible",
            unit=1.0,
            lowest=EQ_BENCH_LOWEST,
        ),
        *(
            TaskEntry(
                name,
                "text",
                "lm_eval",
                f"{name.partition('_')[0]}/{name}.yaml",
                strict=key,
                flexible=None,
                fields=fields,
                unparsable="empty",
                needs=("code",),
                code=True,
            )
            for name, key, fields in (
                ("mbpp", "pass_at_1,none", _MBPP),
                ("humaneval", "pass@1,create_test", _HUMANEVAL),
                ("humaneval_instruct", "pass@1,create_test", _HUMANEVAL),
            )
        ),
        *(
            TaskEntry(
                name,
                "text",
                "lm_eval",
                f"ruler/{path}",
                strict="4096,none",
                flexible=None,
                fields=_RULER | ({"subtask": str} if name == "ruler" else {}),
                only={"max_length": 4096},
                group=name == "ruler",
                members="[cfnqv]*.yaml" if name == "ruler" else "",
                subject="subtask" if name == "ruler" else None,
                unparsable="empty",
                needs=("ruler",),
                tokenized=True,
            )
            for name, path in {"ruler": ".", **RULER}.items()
        ),
    )
}
