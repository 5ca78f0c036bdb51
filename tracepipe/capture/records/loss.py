"""Losses: what was recorded nowhere is said in the file, with where and when."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Loss:
    """Events of a layer (None: of any) on a processor (None: unknown) that were lost between two instants.

    Times on CLOCK_MONOTONIC.
    """

    layer: str | None
    count: int
    start_ns: int
    end_ns: int
    reason: str
    cpu: int | None = None


def loss_record(loss: Loss) -> dict[str, str | int]:
    """The loss as a record of an event file."""
    record: dict[str, str | int] = {"type": "loss"}
    if loss.layer:
        record["layer"] = loss.layer
    if loss.cpu is not None:
        record["cpu"] = loss.cpu
    return record | {
        "ts_ns": loss.start_ns,
        "dur_ns": loss.end_ns - loss.start_ns,
        "count": loss.count,
        "reason": loss.reason,
    }
