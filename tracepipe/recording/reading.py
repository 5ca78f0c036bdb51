"""Opens a recording: recognizes its format, reads its header, and relates its clocks. Then the one loop that
reads it: batches, progress, damage, and the account of what was found.
"""

from __future__ import annotations

import ctypes
import gc
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import BinaryIO, cast

import numpy as np
import orjson

from tracepipe.clocks import Clocks
from tracepipe.clocks.maps import ClockMap
from tracepipe.errors import FormatError, InputError
from tracepipe.event.checks import first_fault
from tracepipe.event.columns import SPECIAL, SourceBatch, TraceBatch, no_events
from tracepipe.event.model import (
    GLOBALTIMER,
    HOST_CLOCKS,
    LAYERS,
    STALLS,
    Footer,
    Header,
    Problem,
    Record,
    still_running,
)
from tracepipe.event.nesting import count_loss
from tracepipe.event.shape import ShapeColumn
from tracepipe.event.stacks import LaunchStacks
from tracepipe.event.tables import KEPT_MAX
from tracepipe.event.warps import WarpGroup
from tracepipe.readers import UNDATED, InputFormat, is_known, naming_others, recognise
from tracepipe.readers.recording import Recording, chunks_of_text, with_problems
from tracepipe.recording.account import Account
from tracepipe.recording.files import InputStream, Progress, open_input
from tracepipe.units import agree, counted

_CLOCK_RECORD = re.compile(rb'"type"\s*:\s*"clock"')
_CLOCK_VALUE = re.compile(rb'"clock"(?!\s*:)')


@dataclass(slots=True)
class OpenRecording:
    """A recording whose batches can be read and put on the trace clock.

    `source` is the input format's name.
    """

    recording: Recording
    clocks: Clocks
    stream: InputStream
    source: str


def clock_records(stream: BinaryIO) -> Iterator[Record]:
    """The good `clock` records of a stream of JSON Lines, found without looking at the other lines."""
    for text, _ in chunks_of_text(stream):
        done = 0
        for found in _CLOCK_VALUE.finditer(text):
            if (at := found.start()) < done:
                continue
            end = text.find(b"\n", at)
            line = text[text.rfind(b"\n", 0, at) + 1 : end if end >= 0 else len(text)]
            done = end if end >= 0 else len(text)
            if not _CLOCK_RECORD.search(line):
                continue
            try:
                record = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue  # the reader will report it
            if isinstance(record, dict) and record.get("type") == "clock" and not first_fault(record):
                yield record


@dataclass(slots=True)
class _Pairs:
    """The clock pairs of a recording, which can be iterated several times: those of the header, then those of
    the file, where there is a `stream` to search.
    """

    of_header: list[Record]
    stream: InputStream | None

    def __iter__(self) -> Iterator[Record]:
        with nullcontext() if self.stream is None else self.stream.again() as again:
            yield from self.of_header
            yield from clock_records(cast(BinaryIO, again)) if again else ()


@contextmanager
def open_recording(
    path: str,
    source_format: str = "",
    assumed: Mapping[str, int | str] | None = None,
    undated: str = UNDATED[0],
    *,
    is_growing: bool = False,
    called: str = "",
    progress: Progress | None = None,
) -> Iterator[OpenRecording]:
    """Open an input and relate its clocks. Where that needs pairs from the whole file, it is read twice, and
    once more where there are more pairs than are kept.

    `source_format` is for inputs whose content does not show their format. `assumed` places clocks that have
    no pairs: clock → ns to add, or the name of a host clock. `undated`, one of `UNDATED`, is what is done
    with lines without a time. A recording that `is_growing` is read once, as it comes: only its times in
    source time are right. `called` is its name in errors, by default its path. `progress` is called while it
    is read. Raises InputError, FormatError, ClockError.
    """
    with ExitStack() as stack:
        stream = stack.enter_context(open_input(path, is_growing=is_growing))
        stream.progress = progress
        path = called or path

        @cache
        def file() -> BinaryIO:
            return stack.enter_context(stream.as_file())

        head = stream.head(is_known) if is_growing else stream.head()
        if not head.strip() and not source_format:
            if stream.damage:
                raise InputError(f"cannot be read: {stream.damage}", "Copy or record it again.", path=path)
            raise InputError("is empty", "Record something first.", path=path)
        try:
            source = recognise(head, source_format, file)
        except InputError as e:
            raise InputError(e.message, e.hint, path=path) from e
        except FormatError as e:
            if source_format:
                raise
            if str(path).endswith((".nsys-rep", ".qdrep")):
                hint = "Export it first: nsys export --type sqlite REPORT; then give the .sqlite file."
                raise FormatError(f"{path}: is a report of Nsight Systems", hint) from e
            raise FormatError(f"{path}: {e.message}", e.hint) from e
        if undated not in UNDATED:
            raise FormatError(
                f"lines without a time cannot be taken as {undated!r}", f"Use one of: {', '.join(UNDATED)}."
            )
        content = file() if source.needs_file else cast(BinaryIO, stream)
        try:
            recording = source.read(content, undated)
        except InputError as e:
            # The reader does not know the path: its message starts with the line alone.
            message = e.message.removeprefix(f":{e.line}: ")
            raise InputError(message, e.hint, path=path, line=e.line) from e
        recording.batches = naming_others(recording.batches, source)
        header = recording.header
        problems: list[Problem] = []
        of_header: list[Record] = []
        for at, pair in enumerate(header.clock_pairs):
            of_header.append({"type": "clock", **pair})
            if fault := first_fault(of_header[-1]):
                problems.append(Problem(1, f"clock_pairs[{at}].{fault[0]}", fault[1]))
                of_header.pop()
        recording.batches = with_problems(problems, recording.batches)
        used = header.declared_clocks
        needs_others = not (is_growing or set(used) <= set(HOST_CLOCKS) or len(used) == 1)
        clocks = Clocks(header, _Pairs(of_header, stream if needs_others else None), assumed)
        if needs_others and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
            # Up to 130,000 pairs take some MB while they are fitted, which glibc would keep in pieces.
            libc.malloc_trim(0)
        # A header names the clocks of all GPUs, but they may have done nothing.
        is_related = all(clocks.get(clock) is not None for clock in used if clock.startswith(GLOBALTIMER))
        if not is_growing and (recording.is_undeclared or not is_related):
            clocks.others = partial(_by_launches, source, stream, undated, header, assumed or {})
        yield OpenRecording(recording, clocks, stream, source.name)
        clocks.others = None


def _by_launches(
    source: InputFormat, stream: InputStream, undated: str, header: Header, assumed: Mapping[str, int | str]
) -> dict[str, ClockMap]:
    """The maps of the clocks that the launches of a recording relate. This reads it once."""
    from tracepipe.clocks.causality import Causality  # here, as few recordings need it

    with ExitStack() as stack:
        again = stack.enter_context(stream.again())
        content = stack.enter_context(again.as_file()) if source.needs_file else cast(BinaryIO, again)
        recording = source.read(content, undated)
        found = Causality(recording.tables, header.default_clock, leave_out=frozenset(assumed))
        nothing = np.empty(0, np.int32)
        for batch in recording.batches:
            found.add(batch)
            if recording.tables.crowded():
                recording.tables.relieve(nothing, nothing)
        maps = found.maps()
    gc.collect()  # this reading left reference cycles, which are not collected by themselves here
    return maps


def footer_notes(footer: Footer, counts: Mapping[str, int]) -> list[str]:
    """Notes where the footer disagrees with the file, and on processes that it says still ran."""
    if not footer.is_read:
        return ["the file has no footer: the capture was cut off"]
    notes = [still_running(footer.running, footer.running_processes)] if footer.running else []
    return notes + [
        f"the footer counts {made} {layer} {agree(made, 'event|events')}, the file has {counts.get(layer, 0)}"
        for layer, made in footer.counts.items()
        if counts.get(layer, 0) != made
    ]


@contextmanager
def no_collector() -> Iterator[None]:
    """Stop the cycle collector. Records have no cycles, and looking for them takes a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


# Records about the recording itself, which are not counted among its events.
_NO_EVENTS = ("header", "footer", "clock", "loss", "window", "stack", "name", *STALLS)


class Reading:
    """Reads an opened recording once. Raises InputError on the first bad line where `strict`.

    `relieve` is called between two batches when the tables have much that may not be in use any more. Without
    it, nothing of a batch may be in use after the batch.
    """

    def __init__(
        self,
        opened: OpenRecording,
        path: str,
        *,
        strict: bool = False,
    ) -> None:
        self.account = Account(path, opened.source)
        self.footer = Footer()
        self._opened, self._path, self._strict = opened, path, strict
        nothing = np.empty(0, np.int32)
        self.relieve: Callable[[], object] = lambda: opened.recording.tables.relieve(nothing, nothing)
        self._after_footer = 0
        self._layers = ShapeColumn(
            opened.recording.tables, lambda shape, _: LAYERS.index(shape.type), np.uint8
        )
        self._counts = np.zeros(len(LAYERS), np.int64)
        self._others = 0
        """Records that are not events since the tables were last relieved. The names made from them take
        memory too."""

    def source(self) -> Iterator[SourceBatch]:
        """Batches on the clocks that they were recorded with."""
        for batch in self._batches():
            self._count(batch)
            yield batch
            self._relieve()

    def placed(self) -> Iterator[tuple[TraceBatch, list[Problem]]]:
        """Batches on the trace's clock, with their problems."""
        for batch, placed in self.both():
            yield placed, batch.problems

    def both(self) -> Iterator[tuple[SourceBatch, TraceBatch]]:
        """Batches as they were read, and on the trace's clock. Both share columns."""
        clocks, tables = self._opened.clocks, self._opened.recording.tables
        stacks = LaunchStacks(tables)
        for batch in self._batches():
            placed = clocks.stamp(batch, tables, self.account.unplaced)
            stacks.give(placed.events)
            self._count(placed)
            yield batch, placed
            self._relieve()

    def _batches(self) -> Iterator[SourceBatch]:
        stream, tables = self._opened.stream, self._opened.recording.tables
        for batch in self._opened.recording.batches:
            batch.text_bytes = batch.text_bytes or tables.given_bytes
            tables.given_bytes = 0
            for problem in batch.problems:
                self.note(problem)
            for other in batch.others.parts:
                for named in (other,) if isinstance(other, dict) else other.records:
                    if type(name := named.get("name")) is str:
                        named["name"] = tables.long_names.shortened(name)
                if isinstance(other, WarpGroup) and other.whole.ranges:
                    other.whole.ranges = [*map(tables.long_names.shortened, other.whole.ranges)]
            # A reader that puts events in order has none at first.
            if len(batch.events) or batch.problems:
                yield batch
        if stream.damage:
            before = "" if stream.is_cut else "the data is damaged from here on: "
            problem = Problem(0, "", before + stream.damage)
            self.note(problem)
            yield SourceBatch(no_events(), problems=[problem])

    def note(self, problem: Problem) -> None:
        """Count a problem. Raises InputError where `strict` and its line was skipped."""
        if self._strict and problem.skipped:
            hint = "Leave out --strict to skip and count such lines."
            raise InputError(problem.message, hint, path=self._path, line=problem.line, field=problem.field)
        self.account.add(problem)

    def _count(self, batch: SourceBatch | TraceBatch) -> None:
        """Count the records of a batch."""
        shapes, others = batch.events.shape, batch.others
        if self.footer.is_read:
            self._after_footer += len(shapes)
        layers = self._layers.values()[shapes[shapes >= 0]]
        self._counts += np.bincount(layers, minlength=len(LAYERS))
        special = np.flatnonzero(shapes == SPECIAL) if others else np.empty(0, np.int64)
        are_warps = others.are_warps(batch.events.args[special])
        if are_warps.any():
            of_warps = batch.events.args[special[are_warps]]
            self.account.counts["gpu_warp"] += int(others.sizes(of_warps).sum())
        for at in special[~are_warps].tolist():
            other = cast("Record", others[int(batch.events.args[at])])
            self.account.counts[other["type"]] += 1
            self._others += 1
            if other["type"] == "loss":
                count_loss(self.account.losses, other)
            elif other["type"] == "footer":
                self.footer, self._after_footer = Footer.from_record(other), len(shapes) - at - 1

    def _relieve(self) -> None:
        if self._opened.recording.tables.crowded() or self._others > KEPT_MAX:
            self._others = 0
            self.relieve()

    def finish(self) -> Account:
        """The account of all that was read."""
        account = self.account
        account.counts += Counter(dict(zip(LAYERS, self._counts.tolist(), strict=True)))
        self._counts[:] = 0
        for kind in _NO_EVENTS:
            del account.counts[kind]
        account.clocks = self._opened.clocks.statements()
        if left_out := self._opened.recording.tables.stacks.left_out:
            account.notes.append(
                counted(left_out, "stack|stacks is|are left out: there are more than can be kept")
            )
        if note := self._opened.recording.tables.long_names.note():
            account.notes.append(note)
        if account.source == "tracepipe":
            if self._after_footer:
                account.notes.append(
                    counted(self._after_footer, "record|records comes|come after the footer")
                )
            if not self.footer.is_read or not account.unplaced:
                account.notes += footer_notes(self.footer, account.counts)
        return account
