"""Durations and sizes as people write them."""

from __future__ import annotations

import re

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
_NUMBER = r"(\d+(?:\.\d+)?)\s*"


def duration_ns(text: str) -> int:
    """`10s`, `1.5ms`, `20us`, `2m`, in nanoseconds; a bare number is seconds. Raises TracepipeError."""
    match = re.fullmatch(_NUMBER + r"(ns|us|µs|ms|s|m|h)?", text.strip())
    if not match:
        raise TracepipeError(f"{text!r} is not a duration.", "Write 10s, 500ms, 20us, 2m.")
    return round(float(match[1]) * _DURATIONS_NS[match[2] or "s"])


def size_bytes(text: str) -> int:
    """`100M`, `1.5G`, `64KiB`, `4096`, in bytes; K, M, G, T are powers of 1024. Raises TracepipeError."""
    match = re.fullmatch(_NUMBER + r"([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not match:
        raise TracepipeError(f"{text!r} is not a size.", "Write 100M, 1G, 4096.")
    return round(float(match[1]) * _SIZES_BYTES[match[2].upper()])
