"""Records of the channel that a traced process writes, as native/transport.h draws them."""

from __future__ import annotations

import struct

_RECORD = struct.Struct("<QIHxxIIQ")  # tag, length, kind, pid, tid, time_ns
_ALIGNMENT = 16


def pack_record(kind: int, pid: int, tid: int, time_ns: int, payload: bytes) -> bytes:
    """A record as the capture process collects it."""
    filler = bytes(-len(payload) % _ALIGNMENT)
    return _RECORD.pack(0, len(payload), kind, pid, tid, time_ns) + payload + filler
