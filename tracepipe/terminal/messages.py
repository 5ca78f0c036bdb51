"""Progress of a command on the terminal: a bar, or a line with the current step."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from tracepipe.printable import printable
from tracepipe.terminal.output import can_draw, unguarded

Progress = Callable[[int, int], None]
"""Called with the bytes read and the total bytes, 0 if unknown."""
_QUIET_S = 1.0


@contextlib.contextmanager
def progress(title: str) -> Iterator[Progress | None]:
    """A bar on a terminal for what takes longer than a second; nothing elsewhere."""
    if not can_draw(sys.stderr):
        yield None
        return
    begun_s = time.monotonic()
    show: Progress | None = None
    with contextlib.ExitStack() as shown:

        def update(done_bytes: int, total_bytes: int) -> None:
            nonlocal show
            if show is None:
                if time.monotonic() - begun_s < _QUIET_S:
                    return
                show = shown.enter_context(_bar(title))
            show(done_bytes, total_bytes)

        yield update


@contextlib.contextmanager
def _bar(title: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    # Not the title itself, as Rich may take parts of a file's name for markup or for a field.
    named = TextColumn("{task.description}", markup=False)
    columns = (named, BarColumn(), DownloadColumn(), TimeRemainingColumn())
    # Output goes above the bar if it is on the terminal, and otherwise to its file or pipe.
    above = sys.stdout.isatty()
    console = Console(file=unguarded(sys.stderr))
    with Bar(*columns, console=console, transient=True, redirect_stdout=above) as bar:
        task = bar.add_task(printable(title), total=None)
        yield lambda done_bytes, total_bytes: bar.update(
            task, completed=done_bytes, total=total_bytes or None
        )


@contextlib.contextmanager
def status(stream: TextIO) -> Iterator[Callable[[str], None]]:
    """A line on a terminal with the current step, removed at the end; nothing elsewhere."""
    if not can_draw(stream):
        yield lambda text: None
        return
    stream = unguarded(stream)

    def show(text: str) -> None:
        stream.write(f"\r\x1b[K{printable(text)} …")
        stream.flush()

    try:
        yield show
    finally:
        stream.write("\r\x1b[K")
        stream.flush()
