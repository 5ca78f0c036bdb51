"""Records as they come out of a channel, and what is made of their texts."""

from __future__ import annotations

from tests.support.gpu_records import pack_record
from tracepipe.tracer.gpu.engines.channel import NAME_BYTES, NOTE_BYTES, note, records, text


def test_packed_records_are_read_back() -> None:
    chunk = pack_record(3, 42, 43, 1000, b"abc") + pack_record(4, 42, 44, 2000, b"")
    assert [(r.kind, r.pid, r.tid, r.time_ns, bytes(r.payload)) for r in records(chunk)] == [
        (3, 42, 43, 1000, b"abc"),
        (4, 42, 44, 2000, b""),
    ]


def test_a_note_cannot_speak_to_the_terminal() -> None:
    assert note(memoryview(b"red: \x1b[31m\r\n\xff")) == r"red: \x1b[31m\r\n�"
    assert len(note(memoryview(b"x" * 100_000))) == NOTE_BYTES


def test_a_text_is_no_longer_than_a_name() -> None:
    assert text(memoryview(b"12345678" + b"x" * 100_000), 8) == "x" * NAME_BYTES
