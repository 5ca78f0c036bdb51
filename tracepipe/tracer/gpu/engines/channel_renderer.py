"""The base of renderers of records that come through a channel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tracepipe.tracer.gpu.engines.carries import ChannelCarry
from tracepipe.tracer.gpu.engines.gpu_numbers import GpuNumbers
from tracepipe.tracer.gpu.engines.python_stacks import PythonStacks
from tracepipe.tracer.gpu.engines.spans import ChannelSpans
from tracepipe.tracer.gpu.engines.transport import GpuRecord, records
from tracepipe.tracer.gpu.engines.untrusted import Kept, Refused, whole_records
from tracepipe.tracer.records.line import Lines
from tracepipe.tracer.records.unrendered import Carried, Wanted


class ChannelRenderer(ABC):
    """Turns chunks of records into lines. One renderer may contain another: records are parsed once."""

    def __init__(self, gpus: Mapping[str, int] | None = None) -> None:
        """`gpus`: UUID → number, as in the header."""
        self._gpus = dict(gpus or {})
        self._numbers = GpuNumbers(gpus)
        self._kept, self._refused = Kept(), Refused()
        self._stacks = PythonStacks(self._kept)
        self._notes: list[str] = []
        self._losses: dict[str, int] = {}
        self._resumed_ns: int | None = None  # set while records of what began before are rendered

    @property
    def news(self) -> list[str]:
        """The notes that are known before the recording ends, in the order in which they came."""
        return self._notes

    @property
    def notes(self) -> list[str]:
        """Messages for the user."""
        return self._notes

    @property
    def losses(self) -> dict[str, int]:
        """Layer → losses that were found in what was collected."""
        return self._losses

    @property
    def gpus(self) -> list[dict[str, Any]]:
        """The GPUs that processes reported, in the form of a header: index, name, uuid, sm_count, limits."""
        return self._numbers.reported

    @property
    def sampling(self) -> list[dict[str, Any]]:
        """The processor time of GPU samplers, in the form of a footer: gpu, cpu_ns, elapsed_ns."""
        return []

    @property
    def stall_samples(self) -> int:
        """Samples of what warps wait for, which are not counted as events."""
        return 0

    def render(self, chunk: bytes) -> Lines:
        """Lines of one chunk, without those of `rest`; chunks are rendered in the order of their
        collection.
        """
        return self.lines(whole_records(chunk, self._refused))

    def lines(self, some: Iterable[GpuRecord]) -> Lines:
        """Lines of the records of one chunk; all records are consumed."""
        lines = self._rendered(some)
        for loss in self._refused.take_losses(self._losses):
            lines.record(loss)
        return lines

    def rest(self) -> Iterator[Lines]:
        """More lines of the last chunk, a few thousand at a time."""
        return iter(())

    @abstractmethod
    def spans(self, wanted: Wanted) -> ChannelSpans:
        """A finder of long calls and kernels among such records."""

    @abstractmethod
    def anew(self) -> ChannelRenderer:
        """A renderer like this one that has taken nothing."""

    @abstractmethod
    def carry(self) -> ChannelCarry:
        """A keeper of what such a renderer needs from evicted records."""

    def resume(self, carried: Carried, start_ns: int) -> Lines:
        """Begin after evicted records: the lines of open calls and ranges, which begin at `start_ns`."""
        self.render(carried.known)
        self.begin_at(start_ns)
        lines = self.render(carried.under_way)
        self.begin_at(None)
        return lines

    def begin_at(self, start_ns: int | None) -> None:
        """Records rendered from now on began before `start_ns`; None ends that."""
        self._resumed_ns = start_ns

    def last(self) -> Lines:
        """At the end, lines of what waited for something that did not come."""
        return Lines()

    def counts(self, chunk: bytes) -> dict[str, int]:
        """Layer → number of events in a chunk that is not rendered."""
        counts: Counter[str] = Counter()
        for record in records(chunk):
            layer, events = self.counted(record)
            counts[layer] += events
        return {layer: events for layer, events in counts.items() if events}

    @abstractmethod
    def counted(self, record: GpuRecord) -> tuple[str, int]:
        """The layer of a record's events and their number, 0 for a record that is no event."""

    @abstractmethod
    def _rendered(self, some: Iterable[GpuRecord]) -> Lines:
        """Lines of records, without the losses of refused ones."""
