"""A store that writes nothing: it adds up totals of a recording on a separate thread.

It replaces a spool, or watches in addition to one.
"""

from __future__ import annotations

import platform
import sys
import threading
import time
from queue import Empty, SimpleQueue

from tracepipe.tracer.engines.engine import Store
from tracepipe.tracer.live.totals import Snapshot, Totals, function_of
from tracepipe.tracer.records.record import Loss
from tracepipe.tracer.records.syscalls import SYSCALLS
from tracepipe.tracer.request import Plan

_BEHIND_BYTES = 32 << 20  # half a million records, a fifth of a second of work
# The time that adding up may hold the interpreter while the collector, which runs every 2 ms, waits.
_SWITCH_S = 0.0005

_Reply = SimpleQueue[Snapshot]


class LiveSink(Store):
    """Takes chunks and losses in order; `snapshot` gives the totals at any time, on any thread."""

    def __init__(self, *, behind_bytes: int = _BEHIND_BYTES) -> None:
        """`behind_bytes`: how far the totals may lag before chunks are only counted."""
        self._behind_limit_bytes = behind_bytes
        self._put_bytes = self._added_bytes = 0  # each written on one thread
        self._totals: Totals | None = None
        self._end_ns: int | None = None
        self._items: SimpleQueue[bytes | Loss | _Reply | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._add_up, name="tracepipe-totals", daemon=True)
        self._old_switch_s = sys.getswitchinterval()
        self.cpu_losses: dict[str, dict[int, int]] = {}

    def begin(self, plan: Plan, start_ns: int) -> None:
        syscalls = SYSCALLS.get(platform.machine(), {})
        self._totals = Totals(
            map(function_of, plan.probes), syscalls, start_ns, plan.layers, values=plan.values
        )
        sys.setswitchinterval(_SWITCH_S)
        self._thread.start()

    def put(self, chunk: bytes) -> None:
        self._put_bytes += len(chunk)
        self._items.put(chunk)

    def put_loss(self, loss: Loss) -> None:
        self._items.put(loss)

    def finish(self) -> None:
        """Called at the end; later snapshots are those of now."""
        self._end_ns = self._end_ns or time.monotonic_ns()
        self._items.put(None)

    def wait(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return self.is_done

    def abandon(self) -> None:
        """Only count what is left."""
        self._behind_limit_bytes = -1

    def close(self) -> None:
        if self._thread.is_alive():
            self.abandon()
            self.finish()
            self._thread.join()
        sys.setswitchinterval(self._old_switch_s)

    @property
    def is_done(self) -> bool:
        """Whether everything that was put is in the totals."""
        return not self._thread.is_alive()

    @property
    def counts(self) -> dict[str, int]:
        found = self.snapshot()
        return found.counts if found else {}

    @property
    def losses(self) -> dict[str, int]:
        found = self.snapshot()
        return found.losses if found else {}

    def snapshot(self) -> Snapshot | None:
        """The totals of everything that was put before this call; None before `begin`."""
        if self._totals is None:
            return None
        reply: _Reply = SimpleQueue()
        self._items.put(reply)
        while self._thread.is_alive():
            try:
                return reply.get(timeout=0.1)
            except Empty:
                continue
        return self._totals.snapshot(self._end_ns or time.monotonic_ns())  # no other thread uses them now

    def _add_up(self) -> None:
        totals = self._totals
        assert totals is not None
        while (item := self._items.get()) is not None:
            if isinstance(item, bytes):
                behind_bytes = self._put_bytes - self._added_bytes - len(item)
                (totals.count if behind_bytes > self._behind_limit_bytes else totals.add)(item)
                self._added_bytes += len(item)
            elif isinstance(item, Loss):
                totals.lose(item)
                if item.cpu is not None:
                    by_cpu = self.cpu_losses.setdefault(item.layer or "unknown", {})
                    by_cpu[item.cpu] = by_cpu.get(item.cpu, 0) + item.count
            else:
                item.put(totals.snapshot(time.monotonic_ns()))
