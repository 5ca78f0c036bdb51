"""Records of probes.bpf.c.

One record, little-endian, with offsets in bytes; the first eight bytes are the ring's own header:

    0       8        16     20     24   28   29     30    32      40      48      56      64
    ┌───────┬────────┬──────┬──────┬────┬────┬──────┬─────┬───────┬───────┬───────┬───────┐
    │ ring  │ ts_ns  │ tid  │ tgid │ id │kind│ torn │ cpu │ a[0]  │ a[1]  │ a[2]  │ a[3]  │
    └───────┴────────┴──────┴──────┴────┴────┴──────┴─────┴───────┴───────┴───────┴───────┘
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from tracepipe.errors import OutputError
from tracepipe.hooks.hook import HOST_SAMPLE

RECORD = struct.Struct("<8xQIIIBBHQQQQ")
RECORD_BYTES = RECORD.size
NUMBER_AND_KIND = struct.Struct("<24xIB35x")
"""Only the id and the kind of a record."""

(
    CALL_ENTER,
    MORE,
    CALL_RETURN,
    SYSCALL_ENTER,
    SYSCALL_EXIT,
    SWITCH_OUT,
    SWITCH_IN,
    WAKEUP,
    MIGRATE,
    SERVED,
    THREAD_NEW,
    THREAD_NAME,
    TEXT,
    EVENT,
    THREAD_IDS,
    WINDOW,
    THREAD_END,
    ON_CPU_SAMPLE,
    FRAMES,
) = range(1, 20)

# The order of the counters of losses. The one without a name counts threads that were not followed, whose
# events may be of any layer. The last counts wakeups and migrations for which the kernel ran no program.
DROP_LAYERS: tuple[str | None, ...] = (
    "userspace",
    "syscall",
    "kernel",
    "scheduler",
    "memory",
    "transfer",
    "hook",
    None,
    HOST_SAMPLE,
    "scheduler",
)
UNSEEN = len(DROP_LAYERS) - 1
FUNCTION_KINDS = frozenset({CALL_ENTER, CALL_RETURN, EVENT})
"""The kinds of a probe's records, which belong to the probe's layer."""
LAYER_OF_KIND = {
    SYSCALL_ENTER: "syscall",
    SYSCALL_EXIT: "syscall",
    SWITCH_OUT: "scheduler",
    SWITCH_IN: "scheduler",
    WAKEUP: "scheduler",
    MIGRATE: "scheduler",
    ON_CPU_SAMPLE: HOST_SAMPLE,
}
"""The other kinds that become events, and their layer."""
UNREPORTED, MET_RUNNING = 1, 2  # a[1] of a switch
_KIND_AT = 28
_NO_EVENTS = bytes({MORE, SERVED, THREAD_NEW, THREAD_NAME, TEXT, THREAD_IDS, WINDOW, THREAD_END, FRAMES})
_TEXT_BYTES = 32
OF_WINDOWS = 0xFFFF
"""The processor number of TEXT records that name a window, as no thread made them."""


def window_record(
    ts_ns: int, number: int, *, begins: bool, by: int = 0, waited_ns: int = 0, name: str = ""
) -> bytes:
    """A WINDOW record as the BPF programs write it; `by` is tgid<<32|tid of the call that caused it. a[1] has
    how long the call waited for the window to begin. TEXT records before it have the window's name.
    """
    text = name.encode(errors="replace")
    parts = (text[at : at + _TEXT_BYTES].ljust(_TEXT_BYTES, b"\0") for at in range(0, len(text), _TEXT_BYTES))
    texts = [RECORD.pack(ts_ns, 0, 0, 0, TEXT, 0, OF_WINDOWS, *struct.unpack("<4Q", part)) for part in parts]
    turn = RECORD.pack(ts_ns, by & 0xFFFFFFFF, by >> 32, number, WINDOW, 0, 0, begins, waited_ns, 0, 0)
    return b"".join((*texts, turn))


def windows_in(chunk: bytes) -> list[tuple[int, bool]]:
    """When windows began (True) or ended (False), from the WINDOW records in `chunk`."""
    return [(fields[0], bool(fields[7])) for fields in _of_kind(chunk, WINDOW)]


def ids_in(chunk: bytes) -> dict[int, int]:
    """Processes by the kernel's ids → their ids in the capture's pid namespace, from THREAD_IDS records."""
    return {fields[2]: fields[7] >> 32 for fields in _of_kind(chunk, THREAD_IDS)}


def _of_kind(chunk: bytes, kind: int) -> Iterator[tuple[int, ...]]:
    kinds = chunk[_KIND_AT::RECORD_BYTES]
    at = kinds.find(kind)
    while at >= 0:
        yield RECORD.unpack_from(chunk, at * RECORD_BYTES)
        at = kinds.find(kind, at + 1)


def event_count(chunk: bytes) -> int:
    """How many records in `chunk` become a line."""
    return len(chunk[_KIND_AT::RECORD_BYTES].translate(None, _NO_EVENTS))


@dataclass(frozen=True, slots=True)
class Loss:
    """Events of a layer (None: of any) that were lost on a processor (None: unknown) between two instants of
    CLOCK_MONOTONIC.
    """

    layer: str | None
    count: int
    start_ns: int
    end_ns: int
    reason: str
    cpu: int | None = None


def unread(count: int, start_ns: int, end_ns: int, error: OSError, *, bound: str = "at most") -> Loss:
    """The loss of records that cannot be read back: their layers, and how many were events, are unknown."""
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
