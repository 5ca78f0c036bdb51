"""The interface of converters, which write the operations of a timeline and decide nothing about them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, Protocol

from tracepipe.units import counted

if TYPE_CHECKING:
    from tracepipe.event.columns import SourceBatch, TraceBatch

if TYPE_CHECKING:  # listing the formats must not import numpy
    from tracepipe.event.model import Header
    from tracepipe.event.tables import Tables
    from tracepipe.layout.timeline import Drawn


@dataclass(frozen=True, slots=True)
class TraceInfo:
    """Facts that a converter gets before the first operation.

    `start` is one instant on the trace clock (`trace_ns`) and on the host clocks that are known. `trace_ns`
    is at or near the first operation. `header` is that of the recording. `new_sorter` makes a sorter for a
    writer that must put its lines in order.
    """

    trace_clock: str
    start: dict[str, int] = field(default_factory=dict)
    compress: bool = False
    header: Header | None = None
    new_sorter: Callable[[], LineSorter] | None = None


class LineSorter(Protocol):
    """Puts lines in the order of time; of the same time, in the order in which they come."""

    def add(self, ts_ns: int, line: bytes) -> None:
        """Add a line, with its end."""

    def lines(self) -> Iterator[bytes]:
        """All lines in order, many at a time."""


class Writer(Protocol):
    """Writes one timeline to a stream, which stays open. Made with the stream and a `TraceInfo`."""

    def write(self, drawn: Drawn) -> None:
        """Write what a batch draws, in the order given."""

    def forget(self, *, shapes: bool) -> None:
        """Forget all arguments, and all names and `shapes`: they have new numbers now."""

    def finish(self) -> None:
        """Write the end of the file."""


class EventWriter(Protocol):
    """Writes events as they were recorded, not as a timeline."""

    def write_events(self, batch: SourceBatch | TraceBatch, tables: Tables) -> None:
        """Write the events of a `SourceBatch` or a `TraceBatch` in the order given."""

    def finish(self) -> None:
        """Write the end of the file."""

    def remarks(self) -> list[str]:
        """Remarks on what the file lacks, or has in another form."""


def without_form(unwritten: Counter[str]) -> list[str]:
    """A remark on events for which a format has no form; none where there are none."""
    left_out = ", ".join(counted(count, what) for what, count in sorted(unwritten.items()) if count)
    return [f"not written, as the format has no form for it: {left_out}"] if left_out else []


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """An output format. `suffix` replaces that of the input. `writer` is `module:class`: a `Writer` of the
    "timeline", or an `EventWriter` of "events", which are on the clocks that they were recorded with, or of
    "trace events", which are on the trace's clock. An "archive" has a Perfetto trace of each recording.
    """

    suffix: str
    writer: str
    of: Literal["timeline", "archive", "events", "trace events"] = "timeline"
    can_compress: bool = False
    has_switches: bool = False
    """Whether its writer takes `Drawn.switches`, as the format has its own form for context switches."""
    has_loads: bool = False
    """Whether its viewers draw counters, so that shares of time in bins are worth writing."""
    has_summaries: bool = False
    """Whether its viewers show slices of a group itself while the group is closed."""
    by_suffix: bool = False
    """Whether a file whose name ends with .gz or .zst is compressed."""
    on_terminal: bool = False
    """Whether it is for people, and goes to standard output by default."""

    @property
    def takes_several(self) -> bool:
        """Whether it can be made from several recordings."""
        return self.of in ("timeline", "archive")

    def open(self, out: BinaryIO, info: TraceInfo) -> Any:
        """Return a writer to `out`."""
        module, _, name = self.writer.partition(":")
        return getattr(import_module(module), name)(out, info)
