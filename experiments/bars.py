"""Bars: the progress that long work shows."""
from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def progress(console: Console | None = None) -> Progress:
    """A bar a task, with what is done of how much, and a task's `state` in words."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[state]}"), TimeElapsedColumn()
    return Progress(*columns, console=console)


def pinning(bar: Progress) -> Callable[[int, int], None]:
    """What to call with bytes pinned, of how many: a task of its own that comes with the first call."""
    tasks = []

    def show(done: int, total: int) -> None:
        if not tasks:
            tasks.append(bar.add_task("pin host memory (GiB)", state=""))
        bar.update(tasks[0], completed=-(-done >> 30), total=-(-total >> 30))

    return show
