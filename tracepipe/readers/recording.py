"""What a reader is, and what it gives: the seam between input formats and the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO, Protocol

from tracepipe.event.model import Batch, Header, Problem
from tracepipe.readers.lines import BOM, chunks_of_lines


@dataclass(slots=True)
class Recording:
    """An opened input: its header, made up from what the format tells where it has none, and its batches."""

    header: Header
    batches: Iterable[Batch]


@dataclass(frozen=True, slots=True)
class InputFormat:
    """An input format. `sniff` sees the first 64 KiB of the decompressed input; `read` the whole stream."""

    name: str
    title: str
    sniff: Callable[[bytes], bool]
    read: Callable[[BinaryIO], Recording]


def saying(problems: list[Problem], batches: Iterable[Batch]) -> Iterator[Batch]:
    """`batches`, the first of which has these problems too."""
    for batch in batches:
        batch.problems[:0], problems = problems, []
        yield batch
    if problems:
        yield Batch(problems=problems)


class LineReader(Protocol):
    """Understands a format line by line, and remembers what decides the next ones."""

    def read(self, number: int, text: bytes, cut: bool, batch: Batch) -> None:
        """Put what line `number` says into `batch`. A `cut` line has no newline, as the input ended."""

    def at_end(self, batch: Batch) -> None:
        """Put what there is to say of the whole input into `batch`."""


def batches_of(stream: BinaryIO, lines: LineReader, chunk_bytes: int) -> Iterator[Batch]:
    """What `lines` reads in a stream, a batch for each chunk and one for what is said at the end."""
    offset_bytes = 0
    for first, some, offset_bytes, cut in chunks_of_lines(stream, chunk_bytes):
        batch = Batch(offset_bytes=offset_bytes)
        if first == 1:
            some[0] = some[0].removeprefix(BOM)
        for number, text in enumerate(some, first):
            lines.read(number, text, cut, batch)
        yield batch
    last = Batch(offset_bytes=offset_bytes)
    lines.at_end(last)
    if last.records or last.problems:
        yield last
