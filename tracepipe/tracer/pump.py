"""Moves records and losses from the probes and from the library in the command to the store and the
watchers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from tracepipe.tracer.engines.drain import SHORT_S
from tracepipe.tracer.engines.engine import Attachment, Collector, DeviceEngine, Store
from tracepipe.tracer.flight.recorder import FlightRecorder
from tracepipe.tracer.interrupts import Interrupts
from tracepipe.tracer.last_steps import LastSteps
from tracepipe.tracer.records.record import event_count
from tracepipe.tracer.spool import Spool

_LAST_RECORDS_S = 4.0  # how long a GPU's last records may take: the library waits 3 s for a running kernel


class Pump:
    """Moves what has arrived at each `step`, and at the end everything that is left."""

    def __init__(
        self,
        attachment: Attachment,
        device: DeviceEngine | None,
        store: Store,
        watchers: Sequence[Collector],
        interrupts: Interrupts,
        *,
        counts_events: bool,
    ) -> None:
        self._attachment, self._device, self._interrupts = attachment, device, interrupts
        self._store, self._collectors = store, (store, *watchers)
        self._counts_events = counts_events
        self.events = 0
        """How many events came from the probes, if `counts_events`."""

    def step(self) -> int:
        """Move what has arrived, if the store can take it; returns the number of bytes."""
        return self._take_device() + self._take_probes() if self._takes_more() else 0

    def last(self, steps: LastSteps) -> None:
        """Move what is left, after everything has stopped."""
        steps.attempt(self._take_last_of_device)
        steps.attempt(self._wait_for_room)
        steps.attempt(lambda: self._take_device(is_final=True))
        for _ in range(2):  # if it fails without memory, the first failure has freed some
            if steps.attempt(self._take_rest):
                break

    def _takes_more(self) -> bool:
        return not isinstance(self._store, Spool) or self._store.takes_more()

    def _wait_for_room(self) -> None:
        """Wait until the store can take more."""
        while not self._takes_more():
            self._interrupts.wait(SHORT_S)

    def _take_rest(self) -> bool:
        while self._take_probes():
            self._wait_for_room()
            if isinstance(self._store, FlightRecorder):
                self._store.follow()
        return True

    def _take_probes(self) -> int:
        chunk = self._attachment.collect()
        if chunk:
            if self._counts_events:
                self.events += event_count(chunk)
            for collector in self._collectors:
                collector.put(chunk)
        for loss in self._attachment.lost():
            for collector in self._collectors:
                collector.put_loss(loss)
        return len(chunk)

    def _take_device(self, *, is_final: bool = False) -> int:
        if self._device is None or not isinstance(self._store, (Spool, FlightRecorder)):
            return 0
        chunk = self._device.collect(is_final=is_final)
        if chunk:
            self._store.put_device(chunk)
        for loss in self._device.lost():
            self._store.put_loss(loss)
        return len(chunk)

    def _take_last_of_device(self) -> None:
        """Move the records that the target's processes send before they stop recording; a Ctrl-C ends the
        wait.
        """
        ends_s = time.monotonic() + _LAST_RECORDS_S
        before = self._interrupts.count
        while self._device is not None and not self._device.is_over() and time.monotonic() < ends_s:
            self._take_device()
            self._interrupts.wait(SHORT_S)
            if self._interrupts.count > before:
                return
