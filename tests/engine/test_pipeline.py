"""The pipeline: results in order, bytes bounded, one error that does not depend on timing, no thread left."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mergelab.engine.pipeline import PARTS_AHEAD, Gate, Stages, overlap
from tests.merges.inputs import REPEATABLE

Send = Callable[[int], None]


def stages(written: list[int]) -> Stages[int, int, int, int]:
    """Tasks are numbers; each sends itself to be written and returns its square."""

    def compute(task: int, loaded: int, send: Send) -> int:
        send(loaded)
        return loaded * loaded

    return Stages(lambda task: 1, lambda task: task, compute, lambda task, part: written.append(part))


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("mergelab-")]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert threads() == []


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_results_come_in_order_whichever_is_first(num_workers: int) -> None:
    written: list[int] = []

    def compute(task: int, loaded: int, send: Send) -> int:
        time.sleep(0.002 * (task % 3 == 0))
        send(loaded)
        return task

    work = replace(stages(written), compute=compute)
    assert list(overlap(range(20), work, num_workers, Gate(5))) == list(range(20))
    assert sorted(written) == list(range(20))


def test_no_tasks_no_results() -> None:
    assert list(overlap([], stages([]), 2, Gate(5))) == []


@given(st.lists(st.integers(0, 9), max_size=25), st.integers(1, 12), st.integers(1, 3))
@REPEATABLE
def test_bytes_inside_never_pass_the_limit_but_for_one_task_alone(sizes: list[int], limit: int, workers: int) -> None:
    gate = Gate(limit)
    inside, most = set[int](), 0
    lock = threading.Lock()

    def read(task: int) -> int:
        nonlocal most
        with lock:
            inside.add(task)
            here = sum(sizes[number] for number in inside)
            assert here <= limit or {number for number in inside if sizes[number]} == {task}
            most = max(most, here)
        return task

    def write(task: int, part: int) -> None:
        with lock:
            inside.remove(task)

    work = replace(stages([]), size=lambda task: sizes[task], read=read, write=write)
    assert list(overlap(range(len(sizes)), work, workers, gate)) == [task * task for task in range(len(sizes))]
    assert most <= gate.peak_bytes <= max([limit, *sizes])


def test_the_next_task_is_read_while_one_is_written() -> None:
    read_ahead = threading.Event()

    def read(task: int) -> int:
        if task == 2:
            read_ahead.set()
        return task

    def write(task: int, part: int) -> None:
        assert read_ahead.wait(5), "nothing was read while the first task was being written"

    assert len(list(overlap(range(3), replace(stages([]), read=read, write=write), 1, Gate(9)))) == 3


def test_a_task_of_many_parts_waits_for_a_slow_writer() -> None:
    written, ahead = list[int](), list[int]()

    def compute(task: int, loaded: int, send: Send) -> int:
        for part in range(50):
            send(part)
            ahead.append(part + 1 - len(written))
        return 0

    def write(task: int, part: int) -> None:
        time.sleep(0.001)
        written.append(part)

    list(overlap([0], replace(stages(written), compute=compute, write=write), 1, Gate(1)))
    assert written == list(range(50))
    assert max(ahead) <= PARTS_AHEAD + 2


class Refused(Exception):
    pass


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize("stage", ["read", "compute", "write"])
@pytest.mark.parametrize("error", [Refused("number 7"), MemoryError("number 7"), KeyboardInterrupt("number 7")])
def test_an_error_in_any_stage_is_raised_once_and_stops_the_others(
    stage: str, num_workers: int, error: BaseException
) -> None:
    read, written, results = list[int](), list[int](), list[int]()
    plain = stages(written)

    def fails(task: int, *rest: object) -> int:
        if stage == "read":
            read.append(task)
        if task == 7:
            raise error
        return getattr(plain, stage)(task, *rest)  # type: ignore[no-any-return]

    work = replace(plain, **{stage: fails})
    with pytest.raises(type(error), match="number 7") as caught:
        for result in overlap(range(1000), work, num_workers, Gate(5)):
            results.append(result)
    assert caught.value is error
    assert results == [task * task for task in range(7)], "what came before is whole"
    assert max([*read, *written]) < 20, "what comes after is not begun"


def test_the_first_failed_task_is_named_even_if_a_later_one_fails_sooner() -> None:
    late = threading.Event()

    def compute(task: int, loaded: int, send: Send) -> int:
        if task == 1:
            assert late.wait(5)
            raise Refused("the first")
        if task == 3:
            late.set()
            raise Refused("a later one")
        return task

    with pytest.raises(Refused, match="the first"):
        list(overlap(range(9), replace(stages([]), compute=compute), 3, Gate(9)))


@pytest.mark.parametrize("leave", [KeyboardInterrupt, Refused, GeneratorExit])
def test_a_caller_that_leaves_takes_all_threads_with_it(leave: type[BaseException]) -> None:
    written: list[int] = []
    running = overlap(range(10_000), stages(written), 2, Gate(5))
    assert next(running) == 0
    assert threads() != []
    with pytest.raises(leave):
        running.throw(leave())
    count = len(written)
    assert threads() == []
    time.sleep(0.01)
    assert len(written) == count < 100
