"""Reading the fields of Protobuf messages: any integer, any order, and errors that name the damaged byte."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracepipe.converters.packets import delimited, double, number
from tracepipe.readers import wire_fields
from tracepipe.readers.wire_fields import (
    BYTES,
    VARINT,
    WireError,
    WireFile,
    signed,
    tagged,
    varints,
)

FIELDS = st.lists(
    st.tuples(
        st.integers(1, 1 << 20), st.one_of(st.integers(-(1 << 63), (1 << 63) - 1), st.binary(max_size=300))
    )
)


def message(fields: list[tuple[int, int | bytes]]) -> bytes:
    return b"".join(
        number(at, value) if isinstance(value, int) else delimited(at, value) for at, value in fields
    )


@given(FIELDS, st.integers(1, 40))
def test_what_was_written_is_read(fields: list[tuple[int, int | bytes]], chunk: int) -> None:
    data = message(fields)
    by_tags = [(tag >> 3, signed(one) if tag & 7 == VARINT else one) for tag, one in tagged(data)]
    assert by_tags == fields
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire_fields, "_CHUNK_BYTES", chunk)
        file = WireFile(io.BytesIO(b"##" + data))
        places = [
            (one.number, signed(one.value) if one.wire_type == VARINT else file.read(one.start, one.end))
            for one in file.fields(2, file.size)
        ]
    assert places == fields


def test_fixed_sizes_are_passed_over() -> None:
    data = double(3, 1.5) + bytes([4 << 3 | 5]) + b"1234" + number(5, 6)
    fields = tagged(data)
    assert fields[1:] == [(4 << 3 | 5, b"1234"), (5 << 3, 6)]
    assert wire_fields.double(fields[0][1]) == 1.5
    file = WireFile(io.BytesIO(data))
    assert [file.read(one.start, one.end) for one in file.fields(0, file.size)][1] == b"1234"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x08" + b"\xff" * 11, "a number does not end at byte 1"),
        (b"\x08", "a number does not end at byte 1"),
        (b"\x0b", "is not a field at byte 0"),
        (b"\x00\x01", "is not a field at byte 0"),
        (number(1, 1) + b"\x12\x05abc", "a field is cut off at byte 2"),
        (b"\x11abc", "a field is cut off at byte 0"),
    ],
)
def test_damage_is_reported_with_its_byte(data: bytes, message: str) -> None:
    with pytest.raises(WireError, match=message.partition(" at byte")[0]):
        tagged(data)
    file = WireFile(io.BytesIO(data))
    with pytest.raises(WireError, match=message):
        list(file.fields(0, file.size))


def test_a_field_that_is_cut_off_is_read_as_far_as_it_goes() -> None:
    file = WireFile(io.BytesIO(b"\x12\x05abc"))
    fields = file.fields(0, file.size)
    place = next(fields)
    assert (place.number, place.wire_type, file.read(place.start, place.end)) == (2, BYTES, b"abc")
    with pytest.raises(WireError):
        next(fields)


@given(st.binary(max_size=200))
def test_memory_and_files_have_the_same_fields_and_the_same_bytes_are_refused(data: bytes) -> None:
    file = WireFile(io.BytesIO(data))
    outcomes: list[object] = []
    for in_memory in (True, False):
        try:
            outcomes.append(
                tagged(data)
                if in_memory
                else [
                    (
                        one.number << 3 | one.wire_type,
                        one.value if one.wire_type == VARINT else file.read(one.start, one.end),
                    )
                    for one in file.fields(0, len(data))
                ]
            )
        except WireError:
            outcomes.append("damaged")
    assert outcomes[0] == outcomes[1]


def test_a_message_of_more_fields_than_can_be_held_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_fields, "FIELDS_MAX", 3)
    monkeypatch.setattr(wire_fields, "NUMBERS_MAX", 3)
    assert len(tagged(number(1, 1) * 3)) == len(varints(b"\1\2\3")) == 3
    with pytest.raises(WireError, match="over 3 fields"):
        tagged(number(1, 1) * 4)
    with pytest.raises(WireError, match="over 3 numbers"):
        varints(b"\1\2\3\4")
