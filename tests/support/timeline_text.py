"""A timeline as lines that a test can state."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable

from tracepipe.converters.text import TextWriter
from tracepipe.converters.writer import TraceInfo
from tracepipe.layout.timeline import Drawn

_DRAWN = re.compile(r" *(-?\d+) (?:\+ *(\d+)| {10})  ( *)(.*)")


def shown(drawn: Iterable[Drawn]) -> list[str]:
    """The timeline, a line for each track and slice: `start+length name`, a `>` for each slice around it."""
    out = io.BytesIO()
    writer = TextWriter(out, TraceInfo("monotonic"))
    for part in drawn:
        writer.write(part)
    writer.finish()
    lines = []
    for line in out.getvalue().decode().splitlines()[1:-1]:
        found = _DRAWN.fullmatch(line)
        if found is None:
            lines.append(" ".join(line.split()))
        else:
            start, length, indent, rest = found.groups()
            lines.append(f"{start}{f'+{length}' if length else ''} {'>' * (len(indent) // 2)}{rest}".strip())
    return lines
