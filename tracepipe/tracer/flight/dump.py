"""Writes a recording of what a flight recorder kept, on a separate thread, while it continues to collect."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol, runtime_checkable

from tracepipe.event.model import HostInstant
from tracepipe.tracer.engines.engine import Attachment, DeviceRenderer
from tracepipe.tracer.flight.ring import Chunk
from tracepipe.tracer.records.record import Loss
from tracepipe.tracer.records.unrendered import Carried, Carry
from tracepipe.tracer.request import Plan
from tracepipe.tracer.spool import Spool
from tracepipe.tracer.summary import Recording


@runtime_checkable
class Outputs(Protocol):
    """Provides a file for each recording."""

    def another(self) -> AbstractContextManager[tuple[str, BinaryIO]]:
        """The name and the stream of a file for the next recording. Raises OutputError."""
        ...


@dataclass(frozen=True, slots=True)
class Frame:
    """The functions that make the header and the footer of a recording."""

    header: Callable[[HostInstant], Mapping[str, Any]]
    footer: Callable[[Spool, DeviceRenderer | None, str, HostInstant, Mapping[str, int]], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Kept:
    """The contents of a recording: what was kept at the time of the request, and what was carried."""

    start: HostInstant
    end: HostInstant
    items: list[Chunk | Loss]
    never_followed: list[Loss]
    carried: Carried
    of_device: Carried
    evicted: Mapping[str, int]
    reason: str


class Dump(threading.Thread):
    """Writes a recording; the thread ends when the file has its final name."""

    def __init__(
        self,
        outputs: Outputs,
        frame: Frame,
        plan: Plan,
        attachment: Attachment,
        device: DeviceRenderer | None,
        asked: int,
        kept: Kept,
    ) -> None:
        """`asked`: the number of requests of the control so far; this recording answers the last one."""
        super().__init__(name="tracepipe-last", daemon=True)
        self._outputs, self._frame, self._plan, self._kept = outputs, frame, plan, kept
        self._attachment, self._device = attachment, device
        self._renderer = attachment.renderer()
        self._start_ns = kept.start["monotonic_ns"]
        self._spool: Spool | None = None
        self._is_abandoned = False
        self.asked = asked
        self.recording: Recording | None = None
        self.error: Exception | None = None

    @property
    def notes(self) -> list[str]:
        """The notes of the renderer of the GPUs' records."""
        return self._device.notes if self._device else []

    def abandon(self) -> None:
        """Write no more lines."""
        self._is_abandoned = True
        if self._spool is not None:
            self._spool.abandon()

    def run(self) -> None:
        """Write the recording; sets `recording` or `error`."""
        try:
            with self._outputs.another() as (path, sink):
                self._spool = Spool(
                    sink,
                    self._renderer,
                    device_renderer=self._device,
                    is_unordered=self._attachment.is_unordered,
                    sizes_bytes=(self._size_bytes(of_device=False), self._size_bytes(of_device=True)),
                )
                try:
                    self._write(path, self._spool)
                finally:
                    self._spool.close()
        except Exception as error:  # a bug: raised by the code that waits for the end
            self.error = self.error or error

    def _size_bytes(self, *, of_device: bool) -> int:
        chunks = (item for item in self._kept.items if isinstance(item, Chunk))
        return sum(len(chunk.content) for chunk in chunks if chunk.of_device == of_device)

    def _write(self, path: str, spool: Spool) -> None:
        began_ns = time.monotonic_ns()
        kept = self._kept
        spool.write_record(self._frame.header(kept.start))
        early, late = self._divided()
        if self._attachment.is_unordered:
            for item in late:
                if isinstance(item, Chunk) and not item.of_device:
                    self._renderer.learn(item.content)
        carried = _with(self._renderer.carry(), kept.carried, early[False])
        spool.write_first(self._renderer.resume(carried, self._start_ns))
        if self._device is not None:
            of_device = _with(self._device.carry(), kept.of_device, early[True])
            spool.write_first(self._device.resume(of_device, self._start_ns))
        spool.begin(self._plan, self._start_ns)
        if self._is_abandoned:
            spool.abandon()
        for loss in kept.never_followed:
            spool.put_loss(Loss(None, loss.count, self._start_ns, self._start_ns, loss.reason))
        late.reverse()
        while late:  # frees each item as soon as it is put
            item = late.pop()
            if isinstance(item, Loss):
                spool.put_loss(item)
            elif item.of_device:
                spool.put_device(item.content)
            else:
                spool.put(item.content)
        spool.finish()
        while not spool.wait(1.0):
            pass
        footer = self._frame.footer(spool, self._device, kept.reason, kept.end, kept.evicted)
        spool.write_record(footer)
        self.error = spool.error
        self.recording = Recording(
            path,
            footer["counts"],
            footer["losses"],
            spool.cpu_losses,
            dict(kept.evicted),
            kept.end["monotonic_ns"] - self._start_ns,
            kept.reason,
            time.monotonic_ns() - began_ns,
            self._device.stall_samples if self._device else 0,
        )

    def _divided(self) -> tuple[dict[bool, list[bytes]], list[Chunk | Loss]]:
        """Divide the kept items into records from before the start, which may follow later ones, and the
        rest.
        """
        early: dict[bool, list[bytes]] = {False: [], True: []}
        late: list[Chunk | Loss] = []
        carries: dict[bool, Carry] = {False: self._renderer.carry()}
        if self._device is not None:
            carries[True] = self._device.carry()
        for item in self._kept.items:
            if isinstance(item, Loss):
                late.append(item)
                continue
            before, after = carries[item.of_device].divide(item.content, self._start_ns)
            early[item.of_device].append(before)
            if after:
                late.append(Chunk(after, item.of_device) if before else item)
        self._kept.items.clear()
        return early, late


def _with(carry: Carry, carried: Carried, early: list[bytes]) -> Carried:
    """The carried records, after more records were evicted."""
    for chunk in (*carried, *early):
        carry.take(chunk)
    return carry.carried()
