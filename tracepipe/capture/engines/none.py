"""The engine that sets no probes: where eBPF cannot work, and a GPU's library tells what it knows."""

from __future__ import annotations

from tracepipe.capture.engines.engine import Coverage
from tracepipe.capture.records.loss import Loss
from tracepipe.capture.records.render import RecordRenderer
from tracepipe.capture.request import Notify, Plan


class NoProbes:
    """Records nothing itself, which is all that can be had without privilege."""

    name = "none"
    layers: frozenset[str] = frozenset()

    def check(self) -> str:
        """It always works."""
        return ""

    def attach(self, plan: Plan, notify: Notify) -> NothingRecorded:
        """Nothing is attached."""
        return NothingRecorded()


class NothingRecorded:
    """A recording without probes."""

    is_unordered = False

    def __init__(self) -> None:
        self.coverage = Coverage()
        self.filtered: dict[str, int] = {}

    def start(self) -> None:
        """There is nothing to start."""

    def collect(self) -> bytes:
        """No records."""
        return b""

    def lost(self) -> list[Loss]:
        """No losses."""
        return []

    def renderer(self) -> RecordRenderer:
        """A decoder that is given nothing."""
        return RecordRenderer([], {}, {})

    def stop(self) -> None:
        """There is nothing to stop."""

    def close(self) -> None:
        """There is nothing to give back."""
