"""What is known before anything is loaded: protocols, tasks, and that knowing them needs no torch."""

import subprocess
import sys

import pytest

from mergelab.evals.protocols import PROTOCOLS
from mergelab.evals.tasks import TASKS, nearest, task_path


@pytest.mark.parametrize("protocol", PROTOCOLS.values(), ids=PROTOCOLS)
def test_protocol_names_known_tasks_with_explicit_budgets(protocol):
    assert set(protocol.tasks) <= set(TASKS)
    assert set(protocol.max_gen_toks) <= set(TASKS)
    assert set(protocol.tasks) <= set(protocol.max_gen_toks)


def test_protocols_hold_the_stated_values():
    bench, instruct, default = (PROTOCOLS[name] for name in ("bench-v1", "paper-instruct-v1", "paper-default-v1"))
    assert (bench.batch_size, bench.max_gen_toks["bench_format"], bench.apply_chat_template) == (
        128,
        24,
        True,
    )
    assert (instruct.shots("gsm8k"), instruct.max_gen_toks["ifeval"], instruct.batch_size) == (0, 1280, 8)
    assert not default.apply_chat_template
    assert (default.shots("mmlu"), default.shots("gsm8k_cot")) == (5, None)


@pytest.mark.parametrize("entry", TASKS.values(), ids=TASKS)
def test_task_is_defined_where_its_row_says(entry):
    assert task_path(entry).exists()


def test_nearest_suggests_the_close_name_or_lists_all():
    assert nearest("ifevl", list(TASKS)) == " (did you mean ifeval?)"
    assert "known: bbh_cot_fewshot" in nearest("zzz", list(TASKS))


def test_protocols_tasks_and_requests_load_without_torch():
    code = (
        "import sys, mergelab.evals.protocols, mergelab.evals.tasks, mergelab.evals.suite;"
        "print([name for name in ('torch', 'transformers', 'lm_eval', 'datasets') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
