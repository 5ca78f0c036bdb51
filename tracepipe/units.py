"""Durations, sizes, counts and ids as people write and read them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tracepipe.errors import TracepipeError

_DURATIONS_NS = {
    "ns": 1,
    "us": 1_000,
    "µs": 1_000,
    "ms": 1_000_000,
    "s": 10**9,
    "m": 60 * 10**9,
    "h": 3600 * 10**9,
}
_SIZES_BYTES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_FORMS = re.compile(r"(\w+)\|(\w+)")
# More digits than any time or size has, and fewer than a float can take.
_NUMBER = r"(\d{1,30}(?:\.\d{1,30})?)\s*"

MADE_UP = (1 << 30) - 1
"""Ids of processes and threads that a reader made up, for what has none, are above this."""


def known_id(id: int | None) -> int | None:
    """An id of a process or a thread; None for one that a reader made up, which no person should see."""
    return None if id is None or id > MADE_UP else id


def duration_ns(text: str) -> int:
    """`10s`, `1.5ms`, `20us`, `2m`, in nanoseconds; a bare number is seconds. Raises TracepipeError."""
    match = re.fullmatch(_NUMBER + r"(ns|us|µs|ms|s|m|h)?", text.strip())
    if not match:
        raise TracepipeError(
            f"{text!r} is not a duration.",
            "Write 10s, 500ms, 20us, 2m; a number without a unit is in seconds.",
        )
    return round(float(match[1]) * _DURATIONS_NS[match[2] or "s"])


def size_bytes(text: str) -> int:
    """`100M`, `1.5G`, `64KiB`, `4096`, in bytes; K, M, G, T are powers of 1024. Raises TracepipeError."""
    match = re.fullmatch(_NUMBER + r"([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not match:
        raise TracepipeError(f"{text!r} is not a size.", "Write 100M, 1G, 4096.")
    return round(float(match[1]) * _SIZES_BYTES[match[2].upper()])


def duration_text(duration_ns: float) -> str:
    """Three digits and a unit: `1.23 µs`."""
    if duration_ns < 0:
        return f"-{duration_text(-duration_ns)}"
    if duration_ns >= 48 * 3600 * 10**9:
        return f"{duration_ns / 86400e9:.0f} days"
    if duration_ns >= 600 * 10**9:
        return f"{duration_ns / 60e9:.0f} min"
    for unit, size_ns in (("s", 10**9), ("ms", 10**6), ("µs", 10**3)):
        if duration_ns >= size_ns * 0.9995:
            return f"{three_digits(duration_ns / size_ns)} {unit}"
    return f"{duration_ns:.0f} ns"


def steps_text(lengths_ns: Iterable[int]) -> str:
    """The number of steps, and the usual one: `3 steps (median 177 ms)`, `1 step (9.33 ms)`, `2 steps`."""
    ordered = sorted(lengths_ns)
    median = duration_text(ordered[(len(ordered) - 1) // 2])
    length = "" if len(ordered) == 2 else f" ({'median ' if len(ordered) > 1 else ''}{median})"
    return counted(len(ordered), "step|steps") + length


def change_text(change_ns: float) -> str:
    """A difference of durations: `+1.23 µs`."""
    return f"{'+' if change_ns > 0 else ''}{duration_text(change_ns)}"


def size_text(size_bytes: float) -> str:
    """Three digits and a unit, powers of 1024: `1.50 MiB`."""
    for unit, one_bytes in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(size_bytes) >= one_bytes * 0.9995:
            return f"{three_digits(size_bytes / one_bytes)} {unit}"
    return f"{size_bytes:.0f} B"


def three_digits(value: float) -> str:
    """`1.23`, `12.3`, `123`."""
    size = abs(value)
    return f"{value:.{0 if size >= 99.95 else 1 if size >= 9.995 else 2}f}"


def counted(count: int, text: str) -> str:
    """A count with its noun and verb: with `row|rows is|are not read`, `1 row is not read`."""
    return f"{count} {agree(count, text)}"


def agree(count: int, text: str) -> str:
    """Text that agrees with a count: `one|many` becomes the first word for 1 and the second otherwise, and
    `an_instant|instants` has a blank instead of each `_`.
    """
    return _FORMS.sub(lambda forms: forms[1 if count == 1 else 2].replace("_", " "), text)
