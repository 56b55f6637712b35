"""Progress of a run on stderr: a live line on a terminal, one line a finished point elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from mergelab.cli.printing import say
from mergelab.sweeps.points import Point


class Progress:
    """Context manager whose ``report`` and ``finished`` a run calls."""

    def __init__(self, points: Sequence[Point]) -> None:
        """Take the points in run order."""
        self.numbers = {point.point_id: number for number, point in enumerate(points, start=1)}
        self.started = time.monotonic()
        self.point_started = self.started
        self.bar: RichProgress | None = None
        if sys.stderr.isatty():
            self.bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=20),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=Console(file=sys.stderr),
                transient=True,
            )
            self.task = self.bar.add_task("starting", total=len(points))

    def __enter__(self) -> Progress:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

    def report(self, point: Point, stage: str, share: float) -> None:
        """Show what is being done."""
        if self.bar is not None:
            done = self.numbers[point.point_id] - 1
            self.bar.update(self.task, description=f"{point.label[:40]}: {stage} {share:.0%}", completed=done)

    def finished(self, point: Point, worked: bool) -> None:
        """Note a finished point."""
        now = time.monotonic()
        number = self.numbers[point.point_id]
        if self.bar is not None:
            self.bar.update(self.task, completed=number)
        elif worked:
            say(f"[{number}/{len(self.numbers)}] {point.label}: {now - self.point_started:.1f} s")
        self.point_started = now

    def failed(self, point: Point, why: str) -> None:
        """Say at once that a point failed: the others may take hours."""
        line = f"[{self.numbers[point.point_id]}/{len(self.numbers)}] {point.label} failed: {why.splitlines()[0]}"
        if self.bar is not None:
            self.bar.console.print(line, markup=False, highlight=False)
        else:
            say(line)
        self.point_started = time.monotonic()
