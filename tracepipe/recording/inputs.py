"""The recordings that one timeline is made of: one as it is, or several as one, on one clock."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

from tracepipe.clocks.anchors import Anchor, Source, anchors, reference
from tracepipe.errors import ClockError, InputError
from tracepipe.event.columns import TraceBatch
from tracepipe.event.model import Header, Problem, new_header
from tracepipe.event.origins import Origins
from tracepipe.event.renumbered import Renumbered
from tracepipe.event.tables import KEPT_MAX, Tables
from tracepipe.readers.native_lines import new_tables
from tracepipe.recording.account import Account
from tracepipe.recording.files import STANDARD
from tracepipe.recording.numbers import Part, numbered
from tracepipe.recording.open import OpenRecording, open_recording
from tracepipe.recording.reading import Progress, Reading
from tracepipe.recording.survey import surveyed
from tracepipe.units import duration_text

Placed = tuple[TraceBatch, list[Problem]]
"""A batch on the trace's clock, and what went wrong in it."""


@dataclass(slots=True, eq=False)
class Input:
    """One recording, as it is read: `name` tells it from the others, `anchor` is where it stands on the clock
    of all. Alone it has neither.
    """

    opened: OpenRecording
    reading: Reading
    name: str = ""
    anchor: Anchor | None = None
    renumbered: Renumbered | None = None


@dataclass(slots=True, eq=False)
class Inputs:
    """Recordings that are read as one. `header` and `tables` are those of all; `start` is the instant at
    which they begin, on the host's clocks as far as they are known.
    """

    parts: list[Input]
    header: Header
    tables: Tables
    clock: str
    start: Mapping[str, int]
    origins: Origins
    notes: list[str] = field(default_factory=list)
    """What is to be said of all of them."""
    _others: int = 0

    def streams(self, relieve: Callable[[], None]) -> list[Iterator[Placed]]:
        """The batches of each, on the clock and in the tables of all. `relieve` is called between two of them
        when the tables hold much that may not be in use any more.
        """
        if self.parts[0].renumbered is None:
            self.parts[0].reading.relieve = relieve
            return [self.parts[0].reading.placed()]
        return [self._stream(part, relieve) for part in self.parts]

    def _stream(self, part: Input, relieve: Callable[[], None]) -> Iterator[Placed]:
        assert part.renumbered is not None
        for batch, problems in part.reading.placed():
            yield part.renumbered.batch(batch), problems
            self._others += len(batch.others)
            if self.tables.crowded() or self._others > KEPT_MAX:
                self._others = 0
                relieve()

    def account(self) -> Account:
        """What was found in all of them."""
        accounts = [part.reading.finish() for part in self.parts]
        for part, account in zip(self.parts, accounts, strict=True):
            account.anchor = None if part.anchor is None else part.anchor.said(self.clock)
        whole = accounts[0] if len(accounts) == 1 else Account.of_all(accounts)
        whole.notes += self.notes
        return whole


@contextmanager
def open_inputs(
    paths: Sequence[str],
    how: tuple[str, Mapping[str, int | str], str],
    *,
    strict: bool = False,
    offsets: Mapping[str, int] | None = None,
    progress: Progress | None = None,
) -> Iterator[Inputs]:
    """Open recordings; several are read twice, first for what numbers they have. `how` is as `open_recording`
    has it; `offsets` are added to the times of those that they name.

    Raises InputError, FormatError, ClockError.
    """
    if len(paths) == 1 and not offsets:
        with open_recording(paths[0], *how) as opened:
            reading = Reading(opened, paths[0], strict=strict, progress=progress)
            header, clock = opened.recording.header, opened.clocks.trace_clock
            start = cast("dict[str, int]", header.get("start", {}))
            tables = opened.recording.tables
            yield Inputs([Input(opened, reading)], header, tables, clock, start, Origins())
        return
    names = _names(paths)
    by_hand = _by_hand(paths, names, offsets or {})
    parts = [_part(path, name, how) for path, name in zip(paths, names, strict=True)]
    sources = [part.source for part in parts]
    placed = anchors(sources, by_hand, [part.survey.seen for part in parts])
    _refuse_before_zero(parts, placed)
    numbers, origins = numbered(parts)
    is_one = len({part.capture for part in parts}) == 1
    with ExitStack() as stack:
        tables, inputs = new_tables(), []
        for at, path in enumerate(paths):
            opened = stack.enter_context(open_recording(path, *how))
            opened.clocks.anchor(placed[at].offset_ns)
            reading = Reading(opened, path, strict=strict, progress=progress)
            name = "" if is_one else names[at]
            renumbered = Renumbered(name, opened.recording.tables, tables, numbers[at])
            inputs.append(Input(opened, reading, names[at], placed[at], renumbered))
        base = sources[reference(sources)]
        start, notes = _start(sources, placed, base), [] if is_one else _apart(parts, placed)
        yield Inputs(inputs, _header(sources), tables, base.clock, start, origins, notes)


def _part(path: str, name: str, how: tuple[str, Mapping[str, int | str], str]) -> Part:
    """What there is to know of a recording before it is read with others."""
    if path == STANDARD or (not Path(path).is_file() and Path(path).exists()):
        raise InputError("is read twice, and a pipe cannot be", "write it to a file first", path=path)
    with open_recording(path, *how) as opened:
        survey, clocks = surveyed(opened, path), opened.clocks
        source = Source(name, opened.recording.header, clocks.trace_clock, survey.first_ns, clocks)
        return Part(source, survey, opened.source)


def _refuse_before_zero(parts: Sequence[Part], placed: Sequence[Anchor]) -> None:
    """Raise ClockError where times would be below 0, which a trace cannot hold."""
    for part, anchor in zip(parts, placed, strict=True):
        if part.survey.is_begun and (first_ns := part.survey.first_ns + anchor.offset_ns) < 0:
            raise ClockError(
                f"{part.source.name} begins {-first_ns} ns before the clock of all is 0",
                f"give each file an --offset FILE=NS that is {-first_ns} larger than now",
            )


def _apart(parts: Sequence[Part], placed: Sequence[Anchor]) -> list[str]:
    """What to say where some of the recordings begin after all others have ended."""
    spans = sorted(
        (part.survey.first_ns + anchor.offset_ns, part.survey.end_ns + anchor.offset_ns, part.source.name)
        for part, anchor in zip(parts, placed, strict=True)
        if part.survey.is_begun
    )
    ends = accumulate(((end_ns, name) for _, end_ns, name in spans), max)
    pairs = zip(ends, spans[1:], strict=False)
    gaps = [(begin_ns - end_ns, name, ended) for (end_ns, ended), (begin_ns, _, name) in pairs]
    gap_ns, name, ended = max(gaps, default=(0, "", ""))
    if gap_ns <= 0:
        return []
    return [f"{name} begins {duration_text(gap_ns)} after {ended} ends: they have no time in common"]


def _names(paths: Sequence[str]) -> list[str]:
    """What the files are called: as short as tells one from the others, and as text that can be written."""
    files = [os.path.realpath(path) for path in paths]
    for at, path in enumerate(paths):
        if files[at] in files[:at]:
            raise InputError("is named twice", "name each file once", path=path)
    short = [Path(path).name for path in paths]
    names = [name if short.count(name) == 1 else path for name, path in zip(short, paths, strict=True)]
    return [_text(name) for name in names]


def _text(path: str) -> str:
    """A path whose bytes need not be text, as text."""
    return os.fsencode(path).decode("utf-8", "replace")


def _by_hand(paths: Sequence[str], names: Sequence[str], offsets: Mapping[str, int]) -> dict[int, int]:
    """Offsets by the places of the files that they name."""
    found = {}
    for file, offset_ns in offsets.items():
        called = enumerate(zip(map(_text, paths), names, strict=True))
        at = next((at for at, both in called if _text(file) in both), None)
        if at is None:
            raise ClockError(
                f"--offset names {file}, which is none of the inputs", f"they are: {', '.join(names)}"
            )
        found[at] = offset_ns
    return found


def _header(sources: Sequence[Source]) -> Header:
    """What the layout is to know of all of them."""
    headers = [source.header for source in sources]
    if all(header == headers[0] for header in headers):
        return headers[0]
    layers = [layer for header in headers for layer in header.get("layers", {}).get("got", [])]
    fields: dict[str, Any] = {"layers": {"got": list(dict.fromkeys(layers))}}
    return new_header(**fields)


def _start(sources: Sequence[Source], placed: Sequence[Anchor], base: Source) -> dict[str, int]:
    """The earliest begin of a recording, on the clocks that the reference relates."""
    start = cast("dict[str, int]", base.header.get("start", {}))
    here_ns = start.get(f"{base.clock}_ns")
    if here_ns is None:
        return {}
    begins = [
        begin_ns + anchor.offset_ns
        for source, anchor in zip(sources, placed, strict=True)
        if (begin_ns := source.at(source.clock)) is not None
    ]
    before_ns = here_ns - min(begins)
    return {clock: max(0, ns - before_ns) for clock, ns in start.items()}
