"""The recordings of one timeline: a single one as it is, or several on one clock."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from tracepipe import paths
from tracepipe.clocks.maps import ClockMap, Method
from tracepipe.errors import ClockError, InputError
from tracepipe.event.columns import TraceBatch
from tracepipe.event.model import Header, Layers, Problem, SourceNs
from tracepipe.event.origins import Origins, Renumbered, id_on
from tracepipe.event.tables import KEPT_MAX, Tables, new_tables
from tracepipe.options import STANDARD
from tracepipe.readers import UNDATED
from tracepipe.recording.account import Account
from tracepipe.recording.files import Progress, archive_of
from tracepipe.recording.reading import OpenRecording, Reading, open_recording
from tracepipe.recording.remote import is_url
from tracepipe.units import duration_text

if TYPE_CHECKING:  # what relates several recordings is loaded where there are several
    from tracepipe.clocks.anchors import Anchor
    from tracepipe.clocks.causality import LaunchSpan
    from tracepipe.recording.survey import Part, Survey

_BILLION = 1_000_000_000


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """One of several recordings. `name` is its name among them, and `header` has what is known of it besides
    its own. `clock` is the name of the common clock, on which `drift` puts its times, as `how` says, within
    `bound_ns`, or as `bound` says where that is not a number.
    """

    name: str
    header: Mapping[str, Any]
    clock: str
    drift: ClockMap
    how: str
    bound_ns: int | None
    bound: str = ""

    def anchor(self, survey: Survey) -> Anchor:
        """Its place, by its first time."""
        from tracepipe.clocks.anchors import Anchor

        first_ns = survey.first_ns if survey.is_begun else int(self.drift.source_ns[0])
        offset_ns = self.drift.place(SourceNs(first_ns)) - first_ns
        drift = None if self.drift.rate == (_BILLION, _BILLION) else self.drift
        return Anchor(offset_ns, self.bound_ns, self.how, self.bound, drift)


def line_map(at_ns: int, offset_ns: int, drift_ppb: int, bound_ns: int) -> ClockMap:
    """The map of a clock by `ns + offset_ns + (ns - at_ns) * drift_ppb / 10⁹`, to the ns below."""
    point, bounds_ns = np.full(1, at_ns, np.int64), np.full(2, bound_ns, np.int64)
    rate = _BILLION + drift_ppb, _BILLION
    return ClockMap("", Method.ASSUMED, point, point + offset_ns, bounds_ns, bounds_ns, rate)


Placed = tuple[TraceBatch, list[Problem]]
"""A batch on the trace's clock, and its problems."""


@dataclass(slots=True)
class InputOptions:
    """How recordings are read. `assumed` places clocks that have no pairs: clock → ns to add, or the name of
    a host clock. `undated` is as in `open_recording`. Several recordings are related by what they have in
    common, by `offsets` to add to the times of the files that they name, or by the place of each, as one of
    the `members`.
    """

    source_format: str = ""
    strict: bool = False
    assumed: Mapping[str, int | str] = field(default_factory=dict)
    undated: str = UNDATED[0]
    offsets: Mapping[str, int] = field(default_factory=dict)
    members: Sequence[Member] = ()

    @contextmanager
    def open(
        self,
        path: str,
        called: str = "",
        known: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
    ) -> Iterator[OpenRecording]:
        """Open a recording. It may be `called` otherwise in errors. `known` is added to its header."""
        with open_recording(
            path, self.source_format, self.assumed, self.undated, called=called, progress=progress
        ) as opened:
            if known is not None:
                opened.recording.header = replace(opened.recording.header, **known)
            yield opened


@dataclass(slots=True, eq=False)
class Input:
    """One recording that is being read. `name` distinguishes it from the others, `anchor` is its place on the
    common clock, `machine` is the host where there are several. A single recording has none of them.
    """

    opened: OpenRecording
    reading: Reading
    name: str = ""
    anchor: Anchor | None = None
    renumbered: Renumbered | None = None
    machine: str = ""


@dataclass(slots=True, eq=False)
class Inputs:
    """Recordings that are read as one. `header` and `tables` are those of all. `start` is the instant at
    which they begin, on the host clocks that are known.
    """

    parts: list[Input]
    header: Header
    tables: Tables
    clock: str
    start: Mapping[str, int]
    origins: Origins
    notes: list[str] = field(default_factory=list)
    """Notes that are about all of them."""
    _others: int = 0

    def streams(self, relieve: Callable[[], None]) -> list[Iterator[Placed]]:
        """The batches of each recording, on the common clock and in the common tables. `relieve` is called
        between two batches when the tables have much that may not be in use any more.
        """

        def renumbered(reading: Reading, numbers: Renumbered) -> Iterator[Placed]:
            for batch, problems in reading.placed():
                yield numbers.batch(batch), problems
                self._others += len(batch.others)
                if self.tables.crowded() or self._others > KEPT_MAX:
                    self._others = 0
                    relieve()

        if self.parts[0].renumbered is None:
            self.parts[0].reading.relieve = relieve
        return [
            part.reading.placed() if part.renumbered is None else renumbered(part.reading, part.renumbered)
            for part in self.parts
        ]

    def account(self) -> Account:
        """The account of all of them."""
        accounts = [part.reading.finish() for part in self.parts]
        for part, account in zip(self.parts, accounts, strict=True):
            account.anchor = None if part.anchor is None else part.anchor.stated(self.clock)
        whole = Account.of_all(accounts)
        whole.notes += self.notes
        return whole


class _Several:
    """Several recordings after their first reading, with the anchor and the numbers of each. `is_one` is
    whether they are parts of one capture, and `notes` are about all of them.
    """

    def __init__(self, paths: Sequence[str], options: InputOptions, progress: Progress | None) -> None:
        """Read the recordings for the first time. Raises InputError, FormatError, ClockError."""
        from tracepipe.clocks.anchors import anchors
        from tracepipe.recording.survey import numbered

        self.paths, self.options, self.progress = paths, options, progress
        if members := options.members:
            known = zip(paths, members, strict=True)
            parts = [_part(path, one.name, options, one.header) for path, one in known]
            placed = [one.anchor(part.survey) for part, one in zip(parts, members, strict=True)]
        else:
            names = _names(paths)
            by_hand = {}
            for file, offset_ns in options.offsets.items():
                called = enumerate(zip(map(_text, paths), names, strict=True))
                at = next((at for at, both in called if _text(file) in both), None)
                if at is None:
                    raise ClockError(
                        f"--offset names {file}, which is not an input", f"Name one of: {', '.join(names)}."
                    )
                by_hand[at] = offset_ns
            parts = [_part(path, name, options) for path, name in zip(paths, names, strict=True)]
            if any(part.source.is_of_gpu for part in parts):
                parts = [
                    part
                    if part.source.is_of_gpu
                    else replace(part, source=replace(part.source, launched=_launched(path, options)))
                    for path, part in zip(paths, parts, strict=True)
                ]
            placed = anchors([part.source for part in parts], by_hand)
        for part, anchor in zip(parts, placed, strict=True):
            # A trace cannot have times below 0.
            if part.survey.is_begun and (first_ns := part.survey.first_ns + anchor.offset_ns) < 0:
                raise ClockError(
                    f"{part.source.name} begins {-first_ns} ns before the common clock is 0",
                    f"Give each file an --offset FILE=NS that is {-first_ns} larger than now.",
                )
        self.parts, self.placed = parts, placed
        self.numbers, self.origins = numbered(parts)
        self.is_one = len({part.capture for part in parts}) == 1
        self.notes = [] if self.is_one else _gap_notes(parts, placed)

    @contextmanager
    def opened(self, at: int, tables: Tables) -> Iterator[Input]:
        """Open one of them, to be read into these tables."""
        path, name = self.paths[at], self.parts[at].source.name
        known = self.options.members[at].header if self.options.members else {}
        with self.options.open(path, name if known else "", known, self.progress) as opened:
            opened.clocks.anchor(self.placed[at].offset_ns, self.placed[at].drift)
            called, strict = name if self.options.members else path, self.options.strict
            reading = Reading(opened, called, strict=strict)
            stated = "" if self.is_one else name
            renumbered = Renumbered(stated, opened.recording.tables, tables, self.numbers[at])
            # The text that follows the names of processes is "on node1", or "of" a file of the host.
            machine = self.origins.host(id_on(self.numbers[at].host, 0)).strip().partition(" ")[2]
            yield Input(opened, reading, name, self.placed[at], renumbered, machine)

    def inputs(self, parts: list[Input], tables: Tables, origins: Origins) -> Inputs:
        """Some of them, which are open, as one."""
        sources = [part.source for part in self.parts]
        header = sources[0].header
        if any(source.header != header for source in sources):
            layers = dict.fromkeys(layer for source in sources for layer in source.header.layers.got)
            counters = [one for source in sources for one in source.header.counters if "gpu" not in one]
            header = Header(layers=Layers(got=list(layers)), counters=counters)
        begins = [
            (begin_ns, anchor)
            for source, anchor in zip(sources, self.placed, strict=True)
            if (begin_ns := source.header.start_ns(source.clock)) is not None
        ]
        start: dict[str, int] = {}
        if self.options.members:
            clock = self.options.members[0].clock
            if begins:
                first_ns = min(int(anchor.place_all(np.array([ns], np.int64))[0]) for ns, anchor in begins)
                start = {f"{clock}_ns": max(0, first_ns)}
        else:
            from tracepipe.clocks.anchors import reference

            # The earliest begin of a recording, on the clocks that the reference recording relates.
            base = sources[reference(sources)]
            clock, stated = base.clock, cast("dict[str, int]", base.header.start)
            if (here_ns := stated.get(f"{clock}_ns")) is not None:
                before_ns = here_ns - min(begin_ns + anchor.offset_ns for begin_ns, anchor in begins)
                start = {of: max(0, ns - before_ns) for of, ns in stated.items()}
        return Inputs(parts, header, tables, clock, start, origins)


@contextmanager
def open_inputs(
    paths: Sequence[str], options: InputOptions, progress: Progress | None = None
) -> Iterator[Inputs]:
    """Open recordings. Several are read twice, the first time for their numbers. Raises InputError,
    FormatError, ClockError.
    """
    if len(paths) == 1 and not (options.offsets or options.members):
        with options.open(paths[0], progress=progress) as opened:
            reading = Reading(opened, paths[0], strict=options.strict)
            header, clock = opened.recording.header, opened.clocks.trace_clock
            start = cast("dict[str, int]", header.start)
            tables = opened.recording.tables
            yield Inputs([Input(opened, reading)], header, tables, clock, start, Origins())
        return
    several = _Several(paths, options, progress)
    with ExitStack() as stack:
        tables = new_tables()
        parts = [stack.enter_context(several.opened(at, tables)) for at in range(len(paths))]
        inputs = several.inputs(parts, tables, several.origins)
        inputs.notes += several.notes
        yield inputs


def open_separately(
    paths: Sequence[str], options: InputOptions, progress: Progress | None
) -> Iterator[Inputs]:
    """Open each recording alone, one at a time, with the clock, the numbers and the start that all of them
    share. Several are read twice. Raises InputError, FormatError, ClockError before the first one is yielded.
    """
    if len(paths) == 1:
        with open_inputs(paths, options, progress) as inputs:
            yield inputs
        return
    several = _Several(paths, options, progress)
    begun = zip(several.parts, several.placed, strict=True)
    firsts_ns = [part.survey.first_ns + anchor.offset_ns for part, anchor in begun if part.survey.is_begun]
    for at, part in enumerate(several.parts):
        tables, origins = new_tables(), several.origins.alone(part.source.name)
        with several.opened(at, tables) as opened:
            inputs = several.inputs([opened], tables, origins)
            # Traces on one clock must relate it to other clocks at the same instant.
            inputs.start = inputs.start or {f"{inputs.clock}_ns": min(firsts_ns, default=0)}
            inputs.notes += several.notes if at == len(paths) - 1 else []
            yield inputs
            del inputs, opened
        gc.collect()  # as in `_part`


def _part(path: str, name: str, options: InputOptions, known: Mapping[str, Any] | None = None) -> Part:
    """The facts about a recording that must be known before it is read with others."""
    if path == STANDARD or (not paths.is_file(path) and paths.is_there(path)):
        raise InputError("is a pipe, which cannot be read twice", "Write it to a file first.", path=path)
    from tracepipe.clocks.anchors import Source
    from tracepipe.recording.survey import Part, surveyed

    with options.open(path, name if known else "", known or {}) as opened:
        survey, clocks = surveyed(opened, path), opened.clocks
        source = Source(
            name,
            opened.recording.header,
            clocks.trace_clock,
            survey.first_ns,
            clocks,
            survey.end_ns,
            survey.common,
            archive_of(path),
        )
        part = Part(source, survey, opened.source)
    # A reading leaves reference cycles, which are not collected while recordings are read (`no_collector`).
    gc.collect()
    return part


def _launched(path: str, options: InputOptions) -> LaunchSpan | None:
    """When the kernels of a recording were launched, on its clock. Reads it once."""
    from tracepipe.clocks.causality import Causality

    with options.open(path) as opened:
        found = Causality(opened.recording.tables, opened.recording.header.default_clock)
        for batch in Reading(opened, path).source():
            found.add(batch)
        return found.span()


def _gap_notes(parts: Sequence[Part], placed: Sequence[Anchor]) -> list[str]:
    """Notes where some of the recordings begin after all others have ended."""
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
    """The shortest names that distinguish the files, as text that can be written."""
    files = [path if is_url(path) else os.path.realpath(path) for path in paths]
    for at, path in enumerate(paths):
        if files[at] in files[:at]:
            raise InputError("is named twice", "Name each file once.", path=path)
    short = [Path(path).name for path in paths]
    names = [name if short.count(name) == 1 else path for name, path in zip(short, paths, strict=True)]
    return [_text(name) for name in names]


def _text(path: str) -> str:
    """A path whose bytes need not be text, as text."""
    return os.fsencode(path).decode("utf-8", "replace")
