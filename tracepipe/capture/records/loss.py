"""Losses: what was recorded nowhere is said in the file, with where and when."""

from __future__ import annotations

import json
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


def loss_line(loss: Loss) -> bytes:
    """The loss as a line."""
    record: dict[str, str | int] = {"type": "loss"}
    if loss.layer:
        record["layer"] = loss.layer
    if loss.cpu is not None:
        record["cpu"] = loss.cpu
    record |= {
        "ts_ns": loss.start_ns,
        "dur_ns": loss.end_ns - loss.start_ns,
        "count": loss.count,
        "reason": loss.reason,
    }
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"
