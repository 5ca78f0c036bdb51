"""Slots: which word of a record an argument is in, and how it is written."""

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracepipe.hooks.hook import INTEGER_KINDS, Argument, Signature
from tracepipe.hooks.slots import MAX_SLOTS, Slot, argument_text, out_text, slots

_KINDS = [kind for kind in INTEGER_KINDS if kind != "ioctl"]


def _signature(*kinds):
    """A signature of arguments a0, a1, … of these kinds, one after the other; a dim3 takes two positions."""
    arguments, position = [], 0
    for number, kind in enumerate(kinds):
        arguments.append(Argument(f"a{number}", position, kind))
        position += 2 if kind == "dim3" else 1
    return Signature(tuple(arguments))


def _written(signature, words, names=None):
    return json.loads("{" + argument_text(signature, names or {})(words) + "}")


def test_two_short_arguments_in_a_row_share_a_slot():
    assert slots(_signature("u32", "i16", "bool")) == [Slot(0, 1), Slot(2, bits=8)]


def test_a_long_argument_between_two_short_ones_keeps_them_apart():
    assert slots(_signature("u32", "u64", "u32")) == [Slot(0, bits=32), Slot(1), Slot(2, bits=32)]


def test_a_dim3_has_two_slots_and_shares_none():
    assert slots(_signature("u32", "dim3", "u32")) == [
        Slot(0, bits=32),
        Slot(1),
        Slot(2, bits=32),
        Slot(3, bits=32),
    ]


def test_text_and_out_arguments_have_no_slot_and_part_nobody():
    signature = Signature(
        (
            Argument("flags", 0, "u32"),
            Argument("symbol", 1, "str"),
            Argument("address", 2, "ptr", out=True),
            Argument("device", 3, "i32"),
        )
    )
    assert slots(signature) == [Slot(0, 3)]
    assert _written(signature, [7 | 0xFFFFFFFF << 32]) == {"flags": 7, "device": -1}


def test_a_kernel_launch_fits_into_six_slots():
    names = ["grid.x", "grid.y", "grid.z", "block.x", "block.y", "block.z", "shared_bytes"]
    launch = Signature(
        (
            Argument("function", 0, "ptr"),
            *[Argument(name, position, "u32") for position, name in enumerate(names, 1)],
            Argument("stream", 8, "ptr"),
        )
    )
    assert len(slots(launch)) == 6 <= MAX_SLOTS
    words = [0x7F00, 4 | 2 << 32, 1 | 256 << 32, 1 | 1 << 32, 48 << 10, 0x9000]
    assert _written(launch, words) == {
        "function": 0x7F00,
        "grid": [4, 2, 1],
        "block": [256, 1, 1],
        "shared_bytes": 48 << 10,
        "stream": 0x9000,
    }


def test_a_dim3_is_written_as_an_array():
    # The struct of three u32 as the ABI puts it into two registers; what is above z is undefined.
    x_y, z = struct.unpack("<QQ", struct.pack("<IIII", 4, 5, 6, 0xDEAD))
    assert _written(_signature("dim3"), [x_y, z]) == {"a0": [4, 5, 6]}


def test_axes_that_are_not_all_there_keep_their_names():
    signature = Signature((Argument("grid.x", 0, "u32"), Argument("grid.y", 1, "u32")))
    assert _written(signature, [1 | 2 << 32]) == {"grid.x": 1, "grid.y": 2}


@pytest.mark.parametrize("kind", _KINDS)
@given(data=st.data())
def test_a_value_comes_back_in_its_kind_whatever_is_above_it(kind, data):
    bits, signed = INTEGER_KINDS[kind]
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    value = data.draw(st.integers(low, 1 if kind == "bool" else high))
    above = data.draw(st.integers(0, (1 << 64) - 1)) << bits
    word = (value & (1 << bits) - 1 | above) & (1 << 64) - 1
    assert _written(_signature(kind), [word]) == {"a0": value}
    if bits <= 32:
        neighbour = data.draw(st.integers(0, (1 << 32) - 1))
        shared = _written(_signature("u32", kind), [neighbour | word << 32 & (1 << 64) - 1])
        assert shared == {"a0": neighbour, "a1": value}


def test_a_hash_is_written_in_hexadecimal():
    assert _written(_signature("hash128"), [0xF00D << 40]) == {"a0": "00f00d0000000000"}


def test_a_bool_is_true_or_false():
    text = argument_text(_signature("bool", "bool"), {})
    assert text([1 << 32]) == '"a0":false,"a1":true'


def test_a_value_with_a_name_is_written_by_name_and_another_as_the_number():
    names = {"Direction": {1: "HtoD", -1: 'the "odd" one'}}
    form = argument_text(_signature("Direction"), names)
    assert [json.loads("{" + form([word]) + "}")["a0"] for word in (1, 0xFFFFFFFF, 9)] == [
        "HtoD",
        'the "odd" one',
        9,
    ]


def test_an_ioctls_command_is_decoded_under_its_own_name():
    signature = Signature((Argument("command", 1, "ioctl"),))
    written = _written(signature, [0xC020462A])
    assert written["command"] == 0xC020462A
    assert (written["type"], written["nr"], written["size_bytes"]) == ("F", 0x2A, 32)
    assert "cmd" not in written


def test_names_are_written_as_json_whatever_is_in_them():
    signature = Signature((Argument('100%d "x" {y}', 0, "u64"), Argument("b%s", 1, "bool")))
    assert _written(signature, [5, 1]) == {'100%d "x" {y}': 5, "b%s": True}


def test_more_values_than_are_kept_ready_are_still_written():
    form = argument_text(_signature("Direction"), {"Direction": {}})
    assert [form([word]) for word in range(5000)] == [f'"a0":{word}' for word in range(5000)]


def test_a_signature_without_slots_is_empty_text():
    assert argument_text(Signature((Argument("symbol", 0, "str"),)), {})([]) == ""


def test_what_an_out_argument_points_to_is_a_member():
    assert out_text(Argument("address", 0, "ptr", out=True), {})(140000) == '"address":140000'
    assert out_text(Argument("device", 0, "i32", out=True), {})(0xFFFFFFFF) == '"device":-1'
    assert out_text(Argument("kind", 3, "Kind", out=True), {"Kind": {2: "array"}})(2) == '"kind":"array"'
