"""What is filled into the programs, and that the shipped ones are those of the source."""

from __future__ import annotations

import json
import re
import struct

import pytest

from tracepipe.errors import CaptureUnavailable
from tracepipe.hooks.hook import (
    Argument,
    Condition,
    FilePlace,
    Hook,
    KernelPlace,
    Probe,
    Signature,
    TracepointPlace,
)
from tracepipe.tracer.bpf.bytecode import FIELDS, PROGRAMS, SHIPPED, Constant, filled_in, source_digest
from tracepipe.tracer.bpf.maps import SPEC_BYTES, Maps, is_paired, spec_of
from tracepipe.tracer.records.syscalls import SYSCALLS
from tracepipe.tracer.request import Filters

HERE = SHIPPED.parent
SOURCE = (HERE / "probes.bpf.c").read_text()


def instruction(code: int, dst: int = 0, src: int = 0, offset: int = 0, immediate: int = 0) -> bytes:
    return struct.pack("<BBhi", code, dst | src << 4, offset, immediate)


def constant(src: int, number: int) -> bytes:
    return instruction(0x18, 1, src, 0, number) + instruction(0)


def test_a_map_is_its_descriptor() -> None:
    code = filled_in(constant(1, 2), [10, 20, 30], {}, {})
    assert code == constant(1, 20)


@pytest.mark.parametrize("value", [0, 7, (1 << 64) - 1, 0xDEADBEEF_12345678])
def test_a_constant_is_64_bits_of_both_halves(value: int) -> None:
    code = filled_in(constant(9, Constant.SAMPLE), [], {Constant.SAMPLE: value}, {})
    assert (code[0], code[1]) == (0x18, 1)
    low, high = struct.unpack_from("<I", code, 4)[0], struct.unpack_from("<I", code, 12)[0]
    assert high << 32 | low == value


def test_another_constant_stays() -> None:
    code = constant(0, 5)
    assert filled_in(code, [], {}, {}) == code


@pytest.mark.parametrize(("size_bytes", "size_bits"), [(0, 0x18), (1, 0x10), (2, 0x08), (4, 0x00), (8, 0x18)])
def test_a_field_is_read_where_it_is_and_as_wide_as_it_is(size_bytes: int, size_bits: int) -> None:
    load = instruction(0x79, 1, 6, 0x4000 + 64 * 1 + 8)
    assert filled_in(load, [], {}, {1: (24, size_bytes)}) == instruction(0x61 | size_bits, 1, 6, 32)


def test_a_field_that_the_kernel_does_not_have_is_named() -> None:
    with pytest.raises(CaptureUnavailable, match="sched/sched_switch/prev_pid"):
        filled_in(instruction(0x61, 1, 6, 0x4000 + 64 * 4), [], {}, {0: (8, 0)})


def test_a_store_is_not_taken_for_a_field() -> None:
    store = instruction(0x63, 1, 6, 0x4000)
    assert filled_in(store, [], {}, {}) == store


def test_constants_fields_and_programs_are_those_of_the_source() -> None:
    constants = {int(n): name for name, n in re.findall(r"#define (\w+) CONFIG\((\d+)\)", SOURCE)}
    assert constants == {constant.value: constant.name for constant in Constant}
    fields = {int(n) for n in re.findall(r"FIELD(?:_AT)?\(u\d+, (\d+)", SOURCE)}
    assert fields == {*FIELDS, 32, 33, 34, 35}
    assert tuple(re.findall(r"^int (\w+)\(", SOURCE, re.MULTILINE)) == PROGRAMS


def test_maps_are_those_of_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def refuse(name: str, *_: int) -> int:
        made.append(name)
        if name == "walked":
            raise OSError(1, "enough")
        return 0

    monkeypatch.setattr("tracepipe.tracer.bpf.maps.bpf.create_map", refuse)
    monkeypatch.setattr("tracepipe.tracer.bpf.maps.os.close", lambda _: None)
    with pytest.raises(OSError, match="enough"):
        Maps(4096, 1, pairs=False, samples=True)
    numbered = sorted(re.findall(r"#define (\w+) MAP\((\d+)\)", SOURCE), key=lambda pair: int(pair[1]))
    assert [name.lower() for name, _ in numbered] == made
    assert [int(number) for _, number in numbered] == list(range(1, len(made) + 1))


def test_the_shipped_bytecode_is_of_this_source() -> None:
    shipped = json.loads(SHIPPED.read_text())
    assert shipped["source_sha256"] == source_digest(), (
        "python -m tracepipe.tracer.bpf.bytecode > probes.json, and put it there"
    )
    programs = {machine: tuple(found) for machine, found in shipped["programs"].items()}
    assert programs == dict.fromkeys(SYSCALLS, PROGRAMS)


PLACES = {
    "uprobe": FilePlace("/lib/x", 64),
    "kprobe": KernelPlace("f", "nvidia", 0),
    "tracepoint": TracepointPlace("irq/x"),
}


def probe(*arguments: Argument, target: str = "uprobe", layer: str = "userspace", **hook: object) -> Probe:
    made = Hook(target, "", "f", layer, Signature(arguments), **hook)  # type: ignore[arg-type]
    return Probe("f", "f", PLACES[target], made)


def unpacked(spec: bytes) -> tuple[bytes, bytes, tuple[int, ...]]:
    assert len(spec) == SPEC_BYTES == 40
    low, high, *rest = struct.unpack("<8s8s12B4xQ", spec)
    return low, high, tuple(rest)


def test_a_spec_states_what_is_read_from_where() -> None:
    made = probe(
        Argument("a", 0, "u64"),
        Argument("b", 2, "u32"),
        Argument("c", 5, "i32"),
        Argument("s", 3, "str"),
        Argument("o", 1, "u32", out=True),
    )
    low, high, (slots, layer, out, out_bytes, text, flags, *condition) = unpacked(spec_of(made, Filters()))
    assert (low, high, slots) == (bytes([1, 3, 0, 0, 0, 0, 0, 0]), bytes([0, 6, 0, 0, 0, 0, 0, 0]), 2)
    assert (layer, out, out_bytes, text, flags) == (0, 2, 4, 4, 1)
    assert not any(condition)


def test_a_spec_states_where_a_structure_is_that_is_hashed() -> None:
    by_value = probe(Argument("a", 0, "u32"), Argument("id", 6, "hash128"), Argument("b", 1, "u32"))
    pointed = probe(Argument("a", 0, "u64"), Argument("id", 4, "hash128*"))
    assert unpacked(spec_of(by_value, Filters()))[2][-3:] == (2, 7, 0)
    assert unpacked(spec_of(pointed, Filters()))[2][-3:] == (2, 0, 0)


def test_a_spec_has_its_condition() -> None:
    size = Argument("size", 1, "i32")
    made = probe(size, condition=Condition(size, ">=", -5))
    *_, condition, at, bits, signed, _, _, value = unpacked(spec_of(made, Filters()))[2]
    assert (condition, at, bits, signed, value) == (6, 2, 32, 1, (1 << 32) - 5)


@pytest.mark.parametrize(
    ("made", "filters", "paired"),
    [
        (probe(), Filters(), False),
        (probe(), Filters(min_duration_ns=1), True),
        (probe(), Filters(sample=2), True),
        (probe(Argument("o", 0, out=True)), Filters(), True),
        (probe(condition=Condition(Argument("x", 0), "==", 0)), Filters(), True),
        (probe(returns=False), Filters(min_duration_ns=1, sample=2), False),
        (probe(target="tracepoint", layer="scheduler"), Filters(min_duration_ns=1), False),
    ],
)
def test_a_return_knows_its_entry_only_where_it_must(made: Probe, filters: Filters, paired: bool) -> None:
    assert is_paired(made, filters) == paired
    assert unpacked(spec_of(made, filters))[2][5] & 1 == paired


@pytest.mark.parametrize(
    ("made", "flags"),
    [
        (probe(returns=False), 2),
        (probe(target="kprobe", layer="kernel"), 8),
        (probe(target="tracepoint", layer="scheduler", everywhere=True), 16),
        (probe(effect="alloc"), 32),
        (probe(effect="transfer"), 0),
    ],
)
def test_flags(made: Probe, flags: int) -> None:
    assert unpacked(spec_of(made, Filters()))[2][5] == flags


def test_items_of_the_drivers_queue_are_looked_into() -> None:
    made = probe(target="kprobe", layer="kernel")
    queues = Probe("nv_kthread_q_schedule_q_item", "x", made.place, made.hook)
    assert unpacked(spec_of(queues, Filters()))[2][5] == 8 | 4
