"""What the renderers share of records that came through a channel."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tracepipe.capture.gpu.engines.carries import ChannelCarry
from tracepipe.capture.gpu.engines.gpu_numbers import GpuNumbers
from tracepipe.capture.gpu.engines.python_stacks import PythonStacks
from tracepipe.capture.gpu.engines.spans import ChannelSpans
from tracepipe.capture.gpu.engines.transport import GpuRecord, records
from tracepipe.capture.gpu.engines.untrusted import Kept, Refused, whole_records
from tracepipe.capture.records.carry import Carried
from tracepipe.capture.records.line import Lines
from tracepipe.capture.records.spans import Wanted


class ChannelRenderer(ABC):
    """Turns chunks of records into lines. One renderer may have another: records are parsed once."""

    def __init__(self, gpus: Mapping[str, int] | None = None) -> None:
        """`gpus`: number of each GPU by UUID, as the header has them."""
        self._gpus = dict(gpus or {})
        self._numbers = GpuNumbers(gpus)
        self._kept, self._refused = Kept(), Refused()
        self._stacks = PythonStacks(self._kept)
        self._notes: list[str] = []
        self._losses: dict[str, int] = {}
        self._resumed_ns: int | None = None  # while records of what began before are rendered

    @property
    def news(self) -> list[str]:
        """The notes that are known before the recording ends, in the order in which they came."""
        return self._notes

    @property
    def notes(self) -> list[str]:
        """What the user should know."""
        return self._notes

    @property
    def losses(self) -> dict[str, int]:
        """Layer → losses that were found in what was collected."""
        return self._losses

    @property
    def gpus(self) -> list[dict[str, Any]]:
        """The GPUs that were met, as a header has them: index, name, uuid, sm_count."""
        return self._numbers.met

    def render(self, chunk: bytes) -> Lines:
        """Lines of one chunk, but for those that `rest` has; chunks come in the order of their collection."""
        return self.lines(whole_records(chunk, self._refused))

    def lines(self, some: Iterable[GpuRecord]) -> Lines:
        """Lines of the records of one chunk, which are taken to the last."""
        lines = self._rendered(some)
        for loss in self._refused.take_losses(self._losses):
            lines.record(loss)
        return lines

    def rest(self) -> Iterator[Lines]:
        """More lines of the last chunk, some thousand at a time."""
        return iter(())

    @abstractmethod
    def spans(self, wanted: Wanted) -> ChannelSpans:
        """What finds among such records calls and kernels that took long."""

    @abstractmethod
    def anew(self) -> ChannelRenderer:
        """A renderer like this one that has taken nothing."""

    @abstractmethod
    def carry(self) -> ChannelCarry:
        """What keeps of dropped records what such a renderer needs of them."""

    def resume(self, carried: Carried, start_ns: int) -> Lines:
        """Begin where records were dropped before: lines of what is under way, which begins at `start_ns`."""
        self.render(carried.known)
        self.begin_at(start_ns)
        lines = self.render(carried.under_way)
        self.begin_at(None)
        return lines

    def begin_at(self, start_ns: int | None) -> None:
        """What is rendered from now on began before that; None: no more."""
        self._resumed_ns = start_ns

    def last(self) -> Lines:
        """Lines of what waited for something that has not come, when no more comes."""
        return Lines()

    def counts(self, chunk: bytes) -> dict[str, int]:
        """Layer → events of the records in a chunk, which is not rendered."""
        counts: Counter[str] = Counter()
        for record in records(chunk):
            layer, events = self.counted(record)
            counts[layer] += events
        return {layer: events for layer, events in counts.items() if events}

    @abstractmethod
    def counted(self, record: GpuRecord) -> tuple[str, int]:
        """The layer of a record's events, and how many it has; 0 of one that is none."""

    @abstractmethod
    def _rendered(self, some: Iterable[GpuRecord]) -> Lines:
        """Lines of records, without the losses of those that are refused."""
