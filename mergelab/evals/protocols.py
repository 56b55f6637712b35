"""Named, versioned protocols: template, shots, budgets and batch size under which a score is read.

The protocol alone can flip a conclusion, so it stands in every record and in the caption of every table. A
changed value is a new name. Which graders a task has is in ``tasks``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Protocol:
    """One way of asking.

    Args:
        name: The name with its version.
        tasks: What ``tasks: auto`` means.
        apply_chat_template: Whether prompts go through the chat template.
        batch_size: Rows a batch. Fixed, because greedy text can change with it.
        max_gen_toks: Task name -> new tokens. A generative task that stands neither here, nor in the recipe,
            nor in the task file itself is refused: the harness would silently cut at 256.
        num_fewshot: Shots for every task; None leaves each task its own.
        task_fewshot: Task name -> shots, over ``num_fewshot``.
        fewshot_as_multiturn: Whether examples are turns of their own under a chat template.
        enable_thinking: What a template that knows the switch is told.
    """

    name: str
    tasks: tuple[str, ...]
    apply_chat_template: bool
    batch_size: int
    max_gen_toks: Mapping[str, int]
    num_fewshot: int | None = None
    task_fewshot: Mapping[str, int] = field(default_factory=dict)
    fewshot_as_multiturn: bool = True
    enable_thinking: bool = False

    def shots(self, task: str) -> int | None:
        """Return the number of examples shown for ``task``, or None for the task's own."""
        return self.task_fewshot.get(task, self.num_fewshot)


# The paper states 1280 for IFEval and 80 for EQ-Bench; the others are ours: above the harness's 256, which cuts a chat
# model that explains before it answers. RULER's subtasks have budgets of their own.
_PAPER_BUDGETS = {
    "ifeval": 1280,
    "gsm8k": 1024,
    "gsm8k_cot": 1024,
    "gsm8k_cot_zeroshot": 1024,
    "gpqa_diamond_cot_zeroshot": 1024,
    "mmlu_pro": 2048,
    "mmmu_val": 512,
    "chartqa": 512,
    "bbh_cot_fewshot": 1024,
    "minerva_math500": 1024,
    "hendrycks_math500": 1024,
    "eq_bench": 80,
    "mbpp": 512,
    "humaneval": 1024,
    "humaneval_instruct": 1024,
}

PROTOCOLS: dict[str, Protocol] = {
    protocol.name: protocol
    for protocol in (
        Protocol(
            name="bench-v1",
            tasks=("bench_format", "bench_image"),
            apply_chat_template=True,
            batch_size=128,
            max_gen_toks={"bench_format": 24, "bench_image": 24},
            num_fewshot=0,
        ),
        Protocol(
            name="paper-instruct-v1",
            tasks=("ifeval", "gsm8k_cot_zeroshot"),
            apply_chat_template=True,
            batch_size=8,
            max_gen_toks=_PAPER_BUDGETS,
            num_fewshot=0,
        ),
        Protocol(
            name="paper-default-v1",
            tasks=("ifeval", "gsm8k_cot"),
            apply_chat_template=False,
            batch_size=8,
            max_gen_toks=_PAPER_BUDGETS,
            task_fewshot={"mmlu": 5},
        ),
    )
}
