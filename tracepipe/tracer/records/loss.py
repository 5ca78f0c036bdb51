"""Losses: the file states how many events are missing, where and when."""

from __future__ import annotations

from dataclasses import dataclass

from tracepipe.errors import OutputError


@dataclass(frozen=True, slots=True)
class Loss:
    """Events of a layer (None: of any) on a processor (None: unknown) that were lost between two instants.

    Times are of CLOCK_MONOTONIC.
    """

    layer: str | None
    count: int
    start_ns: int
    end_ns: int
    reason: str
    cpu: int | None = None


def unread(count: int, start_ns: int, end_ns: int, error: OSError, *, bound: str = "at most") -> Loss:
    """The loss of records that cannot be read back from a temporary file: their layers are unknown, and how
    many of them were events.
    """
    reason = f"{bound}: not read back from a temporary file: {error.strerror}"
    return Loss(None, count, start_ns, end_ns, reason)


def unread_error(error: OSError) -> OutputError:
    """The error about records that cannot be read back, for the user."""
    found = OutputError(
        f"Events cannot be read back from a temporary file: {error.strerror}.",
        "Set TMPDIR to a folder on another disk; journalctl -k may say more.",
    )
    found.__cause__ = error
    return found


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
