"""Programs of models: which pass, and what they cannot reach. Verdicts are those of HumanEval's own checker."""

import socket
import subprocess
import sys
import tempfile
import time

import pytest

from mergelab.evals import sandbox
from mergelab.evals.code_eval import CodeEval
from mergelab.evals.request import EvalRequest
from mergelab.evals.sandbox import runs
from mergelab.evals.suite import load_suite
from tests.evals.scripted import write_jsonl

PROGRAMS = {
    "passes": ("def add(a, b): return a + b\nassert add(1, 2) == 3", True),
    "fails": ("assert False", False),
    "raises": ("1 / 0", False),
    "syntax": ("def add(:", False),
    "prints": ("print('passed')", True),
    "leaves with 0": ("import sys; sys.exit(0)", False),
    "leaves at once": ("import os; os._exit(0)", False),
    "leaves after the right word": ("import os; os.write(1, b'passed'); os._exit(0)", False),
    "reads input": ("input()", False),
    "is not main": ("if __name__ == '__main__': assert False", True),
    "kills": ("import os; os.kill(os.getppid(), 9)", False),
    "removes": ("open('x', 'w').close(); import os; os.remove('x')", False),
    "starts a process": ("import subprocess; subprocess.run(['true'])", False),
    "writes and reads a file": ("open('x', 'w').write('a'); assert open('x').read() == 'a'", True),
    "too large a file": (f"with open('x', 'w') as f: f.write('a' * {sandbox.FILE_BYTES + 1})", False),
    "too much memory": (f"x = 'a' * {sandbox.MEMORY_BYTES}", False),
    "numpy": ("import numpy; assert numpy.ones(3).sum() == 3", True),
    "unicode": ("assert len('né') == 2", True),
    "lone surrogate": ("x = '\\ud800'", True),
    "none of our environment": ("import os; assert 'MERGELAB_SECRET' not in os.environ", True),
    "raises KeyboardInterrupt": ("raise KeyboardInterrupt", False),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_passes_only_if_it_ends_by_itself(monkeypatch, name):
    monkeypatch.setenv("MERGELAB_SECRET", "1")
    program, passes = PROGRAMS[name]
    assert runs(program) is passes


@pytest.mark.parametrize(
    ("program", "at_most"),
    [
        ("while True: pass", 3.0),
        ("import time; time.sleep(60)", 3.0),
        ("import time\nwhile True:\n    try: time.sleep(60)\n    except BaseException: pass", 6.0),
    ],
    ids=["busy", "asleep", "holds on"],
)
def test_program_that_does_not_end_is_ended(monkeypatch, program, at_most):
    monkeypatch.setattr(sandbox, "GRACE_SECONDS", 2.0)
    sandbox.isolation()
    started = time.monotonic()
    assert not runs(program, 0.5)
    assert time.monotonic() - started < at_most


def test_nothing_stays_behind(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert not runs("open('x', 'w').close()\nraise ValueError")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks through the C library")
def test_processes_that_a_program_starts_die_with_it(tmp_path):
    beat = tmp_path / "beat"
    program = (
        "import ctypes, time, pathlib\n"  # os.fork is taken away, the C library's is not
        f"beat = pathlib.Path({str(beat)!r})\n"
        "if ctypes.CDLL(None).fork() == 0:\n"
        "    for _ in range(1000):\n"
        "        with beat.open('a') as file: file.write('.')\n"
        "        time.sleep(0.01)\n"
        "else:\n"
        "    while not beat.exists(): time.sleep(0.01)\n"
    )
    assert not runs(program, 0.5) or beat.exists()
    size = beat.stat().st_size
    time.sleep(0.2)
    assert beat.stat().st_size == size > 0


@pytest.mark.skipif(not sandbox.isolation(), reason="this system has no user namespaces")
def test_network_is_cut_off():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=1)"
        assert not runs(program)
        assert subprocess.run([sys.executable, "-I", "-c", program], check=False).returncode == 0
    assert "without network" in sandbox.describe_isolation()


def test_without_namespaces_programs_still_run_and_it_is_said(monkeypatch, tmp_path):
    sandbox.isolation.cache_clear()
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    try:
        assert runs("assert True") and not runs("assert False")
        assert "does not let us cut off the network" in sandbox.describe_isolation()
        told = []
        row = {"text": "t", "test_list": ["assert True"] * 3, "code": "1", "task_id": 1}
        path = write_jsonl(tmp_path / "mbpp.jsonl", [row])
        request = EvalRequest("paper-instruct-v1", tasks=("mbpp",), data={"mbpp": path}, allow_code=True)
        load_suite(request, told.append)
        assert told == [sandbox.describe_isolation()]
    finally:
        sandbox.isolation.cache_clear()


def test_pass_at_1_is_the_share_of_problems_solved():
    scores, passed = CodeEval().compute(
        references=["assert f(2) == 4", "assert f(2) == 5", "assert f(2) == 4"],
        predictions=[["def f(x): return x * x"], ["def f(x): return x * x"], ["def f(x): return x +"]],
        k=[1],
    )
    assert scores == {"pass@1": 1 / 3}
    assert passed == {0: [True], 1: [False], 2: [False]}
    with pytest.raises(ValueError, match="only pass@1"):
        CodeEval().compute(references=["", ""], predictions=[["1"], ["1"]], k=[10])
