"""The engine without probes: used where eBPF cannot work and only a library in the command records."""

from __future__ import annotations

import time

from tracepipe.errors import OutputError
from tracepipe.tracer.engines.engine import Coverage, Turn
from tracepipe.tracer.records.record import Loss, window_record
from tracepipe.tracer.records.render import RecordRenderer
from tracepipe.tracer.request import Cause, Notify, Plan


class NoProbes:
    """Records nothing itself, and needs no privilege."""

    name = "none"
    layers: frozenset[str] = frozenset()

    def check(self) -> str:
        """It always works."""
        return ""

    def attach(self, plan: Plan, notify: Notify) -> NothingRecorded:
        """Nothing is attached."""
        return NothingRecorded(plan)


class NothingRecorded:
    """A recording without probes, which has only the begins and ends of windows."""

    is_unordered = False
    probed: frozenset[bool] = frozenset()
    error: OutputError | None = None

    def __init__(self, plan: Plan | None = None) -> None:
        self.coverage = Coverage()
        self.filtered: dict[str, int] = {}
        self._causes = plan.windows.causes if plan and plan.windows else ()
        self._pending = b""

    def start(self) -> None:
        """There is nothing to start."""

    def prepare(self) -> None:
        """There is nothing to attach."""

    def rest(self) -> None:
        """There is nothing to detach."""

    def hits(self) -> int:
        """No call is seen."""
        return 0

    def asked(self) -> int | None:
        """No call asks for a window."""
        return None

    def let_go(self) -> bool:
        """No call waits."""
        return False

    def let_end(self) -> None:
        """No call waits."""

    def open_window(self, since_ns: int, at_ns: int | None = None, *, name: str = "") -> int:
        """Begin a window; returns its time on CLOCK_MONOTONIC."""
        return self._turn(Cause.START, at_ns, begins=True, name=name)

    def close_window(self, cause: Cause, at_ns: int | None = None) -> int:
        """End the open window; returns the time."""
        return self._turn(cause, at_ns, begins=False)

    def _turn(self, cause: Cause, at_ns: int | None, *, begins: bool, name: str = "") -> int:
        now_ns = time.monotonic_ns() if at_ns is None else at_ns
        self._pending += window_record(now_ns, cause, begins=begins, name=name)
        return now_ns

    def arm(self, windows: int) -> None:
        """No function is seen."""

    def turns(self) -> list[Turn]:
        """No function begins or ends a window."""
        return []

    def collect(self) -> bytes:
        """The records of begins and ends of windows."""
        pending, self._pending = self._pending, b""
        return pending

    def lost(self) -> list[Loss]:
        """No losses."""
        return []

    def renderer(self) -> RecordRenderer:
        """A decoder for records of windows."""
        return RecordRenderer([], {}, {}, causes=self._causes)

    def stop(self) -> None:
        """There is nothing to stop."""

    def close(self) -> None:
        """There is nothing to free."""
