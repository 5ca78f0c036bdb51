"""Input formats. A new one is a file here and a line in `READERS`."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator

from tracepipe.errors import FormatError
from tracepipe.event.columns import SourceBatch
from tracepipe.event.model import Problem
from tracepipe.readers import bpftime, cuda_tables, layered, tracepipe1
from tracepipe.readers.recording import InputFormat, Recording

__all__ = ["READERS", "InputFormat", "Recording", "naming_others", "recognise"]

# In the order in which they are asked whether the content is theirs: the strictest first.
READERS: dict[str, InputFormat] = {
    reader.name: reader for reader in (tracepipe1.FORMAT, bpftime.FORMAT, cuda_tables.FORMAT, layered.FORMAT)
}


def recognise(head: bytes, name: str = "") -> InputFormat:
    """The format of an input that starts with `head`, or the one called `name`. Raises FormatError."""
    if name:
        if name not in READERS:
            raise FormatError(f"no input format is called {name!r}", f"there are: {', '.join(READERS)}")
        return READERS[name]
    for reader in READERS.values():
        if reader.sniff(head):
            return reader
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise FormatError("the text is UTF-16", "make it UTF-8: iconv -f UTF-16 -t UTF-8 FILE")
    raise FormatError(
        "the content is of no known input format",
        f"name it with --from, one of: {', '.join(READERS)}",
    )


def naming_others(batches: Iterable[SourceBatch], source: InputFormat) -> Iterator[SourceBatch]:
    """Batches that `source` read, with a problem for each line that it passed over and another would read."""
    others = [reader for reader in READERS.values() if reader is not source]
    for batch in batches:
        problems = [
            Problem(number, "", f"is not {source.name}'s: --from {other.name} reads it")
            for number, text in batch.passed_over
            if (other := next((reader for reader in others if reader.sniff(text)), None))
        ]
        batch.passed_over = []
        if problems:
            batch.problems = sorted(batch.problems + problems, key=lambda problem: problem.line)
        yield batch
