"""Input formats. A new one is a file here and a line in `READERS`."""

from __future__ import annotations

from tracepipe.errors import FormatError
from tracepipe.readers import bpftime, cuda_tables, layered, tracepipe1
from tracepipe.readers.recording import InputFormat, Recording

__all__ = ["READERS", "InputFormat", "Recording", "recognise"]

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
    raise FormatError(
        "the content is of no known input format",
        f"name it with --from, one of: {', '.join(READERS)}",
    )
