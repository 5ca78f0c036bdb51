"""What the commands have in common: messages, choices, progress."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, TextIO

import typer


def say(text: str) -> None:
    """A line for the user, beside what a command writes to standard output."""
    print(text, file=sys.stderr)


def choices(name: str, values: Any) -> Any:
    """An Enum of strings, which is what Typer makes choices from."""
    return Enum(name, {value.replace("-", "_"): value for value in values}, type=str)


def text_of(choice: Any) -> str:
    """The text of a choice."""
    return str(getattr(choice, "value", choice))


def offsets(values: list[str]) -> dict[str, int | str]:
    """What `--assume-offset CLOCK=NS` options say: clock → ns to add, or a host clock's name."""
    out: dict[str, int | str] = {}
    for value in values:
        clock, equals, offset = value.partition("=")
        if not equals or not clock or not offset:
            raise typer.BadParameter(f"{value!r} is not CLOCK=NANOSECONDS or CLOCK=realtime")
        try:
            out[clock] = int(offset)
        except ValueError:
            out[clock] = offset
    return out


@contextlib.contextmanager
def progress(title: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on a terminal for what takes over a second; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    import time

    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    begun_s = time.monotonic()
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None, visible=False)

        def update(done_bytes: int, total_bytes: int) -> None:
            if time.monotonic() - begun_s > 1:
                bar.update(task, completed=done_bytes, total=total_bytes or None, visible=True)

        yield update


@contextlib.contextmanager
def status(stream: TextIO) -> Iterator[Callable[[str], None]]:
    """One line on a terminal that says what is being looked at, gone at the end; nothing elsewhere."""
    if not stream.isatty():
        yield lambda text: None
        return

    def show(text: str) -> None:
        stream.write(f"\r\x1b[K{text} …")
        stream.flush()

    try:
        yield show
    finally:
        stream.write("\r\x1b[K")
        stream.flush()
