"""Reading ahead, computing and writing at the same time, with a bound on the bytes in between."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from queue import Queue
from typing import Generic, TypeVar

Task = TypeVar("Task")
Loaded = TypeVar("Loaded")
Part = TypeVar("Part")
Result = TypeVar("Result")

PARTS_AHEAD = 4
"""Parts of tasks that wait for the writer; a task of many parts does not run away from a slow disk."""


@dataclass(frozen=True)
class Stages(Generic[Task, Loaded, Part, Result]):
    """What is done with each task. Reading and writing have a thread each, computing has several.

    Attributes:
        size: Bytes that a task holds from the start of its reading to the end of its writing.
        read: Called in the order of the tasks.
        compute: Is given a function that sends a part to the writer; what it returns is the result of the task.
        write: Called once for every part.
    """

    size: Callable[[Task], int]
    read: Callable[[Task], Loaded]
    compute: Callable[[Task, Loaded, Callable[[Part], None]], Result]
    write: Callable[[Task, Part], None]


class Gate:
    """Lets tasks in while their bytes stay within a limit; one that is larger than that gets in alone."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.peak_bytes = 0
        self._inside = 0
        self._num_inside = 0
        self._closed = False
        self._changed = threading.Condition()

    def enter(self, num_bytes: int) -> bool:
        """Wait until the bytes fit; False if the gate was closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or not self._num_inside or self._inside + num_bytes <= self.limit_bytes
            )
            if self._closed:
                return False
            self._inside += num_bytes
            self._num_inside += 1
            self.peak_bytes = max(self.peak_bytes, self._inside)
            return True

    def leave(self, num_bytes: int) -> None:
        """Give the bytes back."""
        with self._changed:
            self._inside -= num_bytes
            self._num_inside -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """Let nothing in any more, and wake who waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def overlap(
    tasks: Sequence[Task], stages: Stages[Task, Loaded, Part, Result], num_workers: int, gate: Gate
) -> Generator[Result]:
    """Yield the result of every task, in the order of the tasks, whichever finishes first.

    Tasks are let in in order. After an error no further one is, those inside are finished up to the failed one, and
    the error of the first failed task in order is raised, once; so what is raised does not depend on timing. However
    the caller leaves (an error, an interrupt, no more interest), no thread is left when this generator is closed.

    Args:
        tasks: In the order in which they are read.
        stages: The work.
        num_workers: Threads that compute, at least 1.
        gate: Bounds the bytes of all tasks that are inside.
    """
    run = _Run(tasks, stages, num_workers, gate)
    threads = [
        threading.Thread(target=target, name=f"mergelab-{target.__name__}", daemon=True)
        for target in (run.writing, *[run.computing] * num_workers, run.reading)
    ]
    try:
        for thread in threads:
            thread.start()
        yield from run.in_order()
    finally:
        gate.close()
        run.stopped = True
        if threads[-1].ident is not None:  # without a reader the others have nothing to do, and no end
            _join(threads)


@dataclass
class _Outcome(Generic[Result]):
    value: Result | None = None
    error: BaseException | None = None


class _Run(Generic[Task, Loaded, Part, Result]):
    """The queues between the threads of one call of ``overlap``."""

    def __init__(
        self, tasks: Sequence[Task], stages: Stages[Task, Loaded, Part, Result], num_workers: int, gate: Gate
    ) -> None:
        self.tasks = tasks
        self.sizes = [stages.size(task) for task in tasks]
        self.stages = stages
        self.num_workers = num_workers
        self.gate = gate
        self.stopped = False
        """Nobody waits for results any more: what is still queued is dropped."""
        self.loaded: Queue[tuple[int, _Outcome[Loaded]] | None] = Queue()
        self.parts: Queue[tuple[int, Part | _Outcome[Result]] | None] = Queue(PARTS_AHEAD)
        self.outcomes: Queue[tuple[int, _Outcome[Result]]] = Queue()

    def reading(self) -> None:
        for index, task in enumerate(self.tasks):
            if not self.gate.enter(self.sizes[index]):
                break
            loaded: _Outcome[Loaded] = _Outcome()
            try:
                loaded.value = self.stages.read(task)
            except BaseException as error:
                self.gate.close()
                loaded.error = error
            self.loaded.put((index, loaded))
            del loaded
        for _ in range(self.num_workers):
            self.loaded.put(None)

    def computing(self) -> None:
        while (item := self.loaded.get()) is not None:
            index, loaded = item
            outcome: _Outcome[Result] = _Outcome(error=loaded.error)
            if outcome.error is None and not self.stopped:
                try:
                    outcome.value = self.stages.compute(
                        self.tasks[index],
                        loaded.value,  # type: ignore[arg-type]
                        lambda part, index=index: self.parts.put((index, part)),  # type: ignore[misc]
                    )
                except BaseException as error:
                    self.gate.close()
                    outcome.error = error
            del item, loaded
            self.parts.put((index, outcome))
        self.parts.put(None)

    def writing(self) -> None:
        left = self.num_workers
        failed: dict[int, BaseException] = {}
        while left:
            item = self.parts.get()
            if item is None:
                left -= 1
                continue
            index, part = item
            if isinstance(part, _Outcome):
                part.error = failed.pop(index, None) or part.error
                self.gate.leave(self.sizes[index])
                self.outcomes.put((index, part))
            elif index not in failed and not self.stopped:
                try:
                    self.stages.write(self.tasks[index], part)
                except BaseException as error:
                    self.gate.close()
                    failed[index] = error
            del item, part

    def in_order(self) -> Iterator[Result]:
        early: dict[int, _Outcome[Result]] = {}
        for index in range(len(self.tasks)):
            while index not in early:
                number, outcome = self.outcomes.get()
                early[number] = outcome
            outcome = early.pop(index)
            if outcome.error is not None:
                raise outcome.error
            yield outcome.value  # type: ignore[misc]


def _join(threads: Sequence[threading.Thread]) -> None:
    """Wait for the threads, even if the user interrupts again: they must not write once their file is closed."""
    interrupt: KeyboardInterrupt | None = None
    for thread in threads:
        while thread.is_alive():
            try:
                thread.join()
            except KeyboardInterrupt as error:
                interrupt = error
    if interrupt is not None:
        raise interrupt
