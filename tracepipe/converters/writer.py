"""What a converter is: it writes the operations of a timeline, and decides nothing about them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, Protocol

if TYPE_CHECKING:  # the names of formats need no columns
    from tracepipe.event.model import Header
    from tracepipe.event.tables import Tables
    from tracepipe.layout.timeline import Drawn


@dataclass(frozen=True, slots=True)
class TraceInfo:
    """What a converter gets before the first operation.

    `start` has the same instant on the trace clock (`trace_ns`) and on host clocks, as far as known;
    `trace_ns` is at or near the first operation. `header` is the recording's.
    """

    trace_clock: str
    start: dict[str, int] = field(default_factory=dict)
    compress: bool = False
    header: Header | None = None


class Writer(Protocol):
    """Writes one timeline to a stream that it does not close. It is made with that and a `TraceInfo`."""

    def write(self, drawn: Drawn) -> None:
        """Write what a batch draws, in the order given."""

    def forget(self) -> None:
        """Shapes and arguments have other numbers from here on."""

    def finish(self) -> None:
        """Write what ends the file."""


class EventWriter(Protocol):
    """Writes events as they were recorded, not as a timeline."""

    def write_events(self, batch: Any, tables: Tables) -> None:
        """Write the events of a `SourceBatch` or a `TraceBatch` in the order given."""

    def finish(self) -> None:
        """Write what ends the file."""

    def remarks(self) -> list[str]:
        """What the file does not say, or not as it was recorded."""


def without_form(unwritten: Counter[str]) -> list[str]:
    """A remark on what a format has no form for."""
    left_out = ", ".join(f"{count} {what}" for what, count in sorted(unwritten.items()) if count)
    return [f"not written, as the format has no form for it: {left_out}"] if left_out else []


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """An output format; `suffix` replaces that of the input, `writer` is `module:class`, which is a `Writer`
    of the "timeline", or an `EventWriter` of "events" on the clocks that they were recorded with or of "trace
    events", which are on the trace's clock. An "archive" holds a Perfetto trace of each recording.
    """

    suffix: str
    writer: str
    of: Literal["timeline", "archive", "events", "trace events"] = "timeline"
    can_compress: bool = False
    has_switches: bool = False
    """Whether its writer takes `Drawn.switches`, as the format says by itself when threads run."""
    has_loads: bool = False
    """Whether its viewers draw counters, so that it is worth having what is known by bins of time alone."""
    has_summaries: bool = False
    """Whether a group has a row of its own, which its viewers show while it is closed."""
    by_suffix: bool = False
    """Whether a file whose name ends with .gz or .zst is compressed."""
    on_terminal: bool = False
    """Whether it is for people, and goes to standard output unless told where."""

    @property
    def takes_several(self) -> bool:
        """Whether it can be made of several recordings."""
        return self.of in ("timeline", "archive")

    def open(self, out: BinaryIO, info: TraceInfo) -> Any:
        """A writer to `out`."""
        module, _, name = self.writer.partition(":")
        return getattr(import_module(module), name)(out, info)
