"""Takes what is recorded, from the probes and from the library in the command, and hands it on."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tracepipe.capture.engines.engine import Attachment, Collector, DeviceEngine, Store
from tracepipe.capture.flight.recorder import FlightRecorder
from tracepipe.capture.interrupts import Interrupts
from tracepipe.capture.last_steps import LastSteps
from tracepipe.capture.records.record import event_count
from tracepipe.capture.spool import Spool
from tracepipe.capture.tick import SHORT_S

_LAST_RECORDS_S = 4.0  # how long a GPU's last records may take: the library gives a kernel that runs 3 s


class Pump:
    """Takes what came at each `step`, and at the end all that is left."""

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
        """How many came from the probes, where they are counted."""

    def step(self) -> int:
        """Take what came, if there is room for it; how many bytes that was."""
        return self._take_device() + self._take_probes() if self._takes_more() else 0

    def last(self, steps: LastSteps) -> None:
        """When all is stopped, take what is left."""
        steps.attempt(self._take_last_of_device)
        steps.attempt(self._wait_for_room)
        steps.attempt(lambda: self._take_device(is_final=True))
        for _ in range(2):  # where it fails for want of memory, there is some the second time
            if steps.attempt(self._take_rest):
                break

    def _takes_more(self) -> bool:
        return not isinstance(self._store, Spool) or self._store.takes_more()

    def _wait_for_room(self) -> None:
        """At the end there is time to wait for it."""
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
        """Take what the target's processes send before they let their GPUs go; a Ctrl-C leaves it out."""
        ends_s = time.monotonic() + _LAST_RECORDS_S
        before = self._interrupts.count
        while self._device is not None and not self._device.is_over() and time.monotonic() < ends_s:
            self._take_device()
            self._interrupts.wait(SHORT_S)
            if self._interrupts.count > before:
                return
