"""The bpftrace engine's script and its lines, without bpftrace."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

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
from tracepipe.tracer.engines import bpftrace
from tracepipe.tracer.engines.bpftrace import IDLE, BpftraceEngine, Clock, Lines, Script, comparison
from tracepipe.tracer.machine.facts import Machine
from tracepipe.tracer.records import record
from tracepipe.tracer.records.record import RECORD
from tracepipe.tracer.request import Filters, Plan, Scope

END = "\x1fend"


def function(*arguments: Argument, result: str = "i32", **hook: Any) -> Probe:
    made = Hook("uprobe", "libx.so", "f", "userspace", Signature(arguments, result), **hook)
    return Probe("f", "f", FilePlace("/lib/libx.so", 0x1000), made)


def in_kernel(symbol: str = "nv_f", address: int = 0xFFFF0000) -> Probe:
    hook = Hook("kprobe", "", symbol, "kernel", Signature((Argument("size_bytes", 0),), "i32"))
    return Probe(symbol, symbol, KernelPlace(symbol, "nvidia", address), hook)


def tracepoint() -> Probe:
    arguments = Argument("irq", 8, "i32"), Argument("ret", 12, "i32")
    hook = Hook("tracepoint", "", "irq:irq_handler_exit", "kernel", Signature(arguments), everywhere=True)
    return Probe("irq/irq_handler_exit", "irq", TracepointPlace("irq/irq_handler_exit"), hook)


def plan(*probes: Probe, own: tuple[str, ...] = (), **options: Any) -> Plan:
    scope = options.pop("scope", Scope("command", (77,)))
    return Plan(("userspace", *own), own, list(probes), scope, Filters(**options), 1 << 20)


def script(of: Plan, **options: Any) -> str:
    return Script(of, 99, ("/lib/libc.so.6", "lldiv"), END, [0, 16], **options).text()


def lines(*probes: Probe) -> Lines:
    return Lines(probes, END)


def records(chunk: bytes) -> list[tuple[int, ...]]:
    """Kind, time, tid, tgid, id, torn, a[0..3]."""
    return [
        (kind, ts_ns, tid, tgid, number, torn, *a)
        for ts_ns, tid, tgid, number, kind, torn, _, *a in RECORD.iter_unpack(chunk)
    ]


@pytest.mark.parametrize(
    ("kind", "operator", "value", "test"),
    [
        ("u32", ">=", 4096, "(arg0 & (uint64)0xffffffff) >= (uint64)0x1000"),
        ("u64", "==", 1 << 63, "(arg0) == (((uint64)0x80000000 << 32) | (uint64)0x0)"),
        ("u8", "&", 6, "((arg0 & (uint64)0xff) & (uint64)0x6) != 0"),
        ("i32", "<", -1, "((arg0 & (uint64)0xffffffff) ^ (uint64)0x80000000) < (uint64)0x7fffffff"),
        ("CUresult", "!=", 0, "(arg0 & (uint64)0xffffffff) != (uint64)0x0"),
    ],
)
def test_conditions_compare_the_bits_that_mean_something(
    kind: str, operator: str, value: int, test: str
) -> None:
    assert comparison(Condition(Argument("x", 0, kind), operator, value), "arg0") == test


def test_arguments_come_from_registers_then_the_stack() -> None:
    arguments = [Argument(f"n{position}", position) for position in (0, 5, 6, 7)]
    text = script(plan(function(*arguments)))
    assert (
        '(uint64)arg0, (uint64)arg5, *(uint64*)uptr((uint64)reg("sp") + 8), '
        '*(uint64*)uptr((uint64)reg("sp") + 16));' in text
    )


def test_two_small_arguments_share_a_word() -> None:
    text = script(plan(function(Argument("a", 1, "u32"), Argument("b", 2, "u32"))))
    assert "(((uint64)arg1 & 0xffffffff) | ((uint64)arg2 << 32))" in text


def test_nothing_of_a_path_or_name_gets_out_of_its_quotes() -> None:
    place = FilePlace('/tmp/a" { system("x"); } \\/é.so', 0)
    text = script(plan(Probe("f", "f", place, function().hook), scope=Scope("comm", comm='"\n$(x)')))
    assert r'uprobe:"/tmp/a\042 { system(\042x\042); } \134/\303\251.so":"f"' in text
    assert r'comm == "\042\012$(x)"' in text
    text = script(
        plan(Probe("f", "f", place, function().hook), scope=Scope("comm", comm=os.fsdecode(b"\xff")))
    )
    assert r'comm == "\377"' in text


def test_control_probes_stand_at_both_ends() -> None:
    blocks = [line for line in script(plan(function())).splitlines() if line.startswith(("u", "t", "k"))]
    control = 'uprobe:"/lib/libc.so.6":"lldiv" /pid == 99/ {'
    assert [blocks[0], blocks[-1]] == [control, control]


def test_a_probe_that_was_refused_is_left_out() -> None:
    assert "libx.so" not in script(plan(function()), without=frozenset({0}))


def test_names_and_allocations_are_kept_whole() -> None:
    entry = "% 5 == 0"
    assert entry in script(plan(function(), sample=5))
    assert entry not in script(plan(function(effect="alloc"), sample=5))


def test_attach_points_are_counted() -> None:
    made = Script(plan(function(), in_kernel()), 99, ("/lib/libc.so.6", "lldiv"), END, [])
    text = made.text()
    heads = [line for line in text.splitlines() if line.endswith("{") and not line.startswith(" ")]
    assert len(made.blocks) == len(heads) + text.count("BEGIN")


def test_an_entry_with_everything_it_can_have() -> None:
    arguments = [Argument(f"n{position}", position) for position in range(6)]
    read = lines(function(*arguments, Argument("said", 6, "str")))
    read.feed(f"d 0 64 1 5 0 0 two\nlines{END}\nd 0 64 1 5 0 1 rubbish{END}\n".encode())
    read.feed(b"1 0 65 1 5 0 0 5 4 0 0 a b c d e f\n")
    text = struct.unpack("<4Q", b"two\nlines".ljust(32, b"\0"))
    assert records(read.release()) == [
        (record.MORE, 0x65, 5, 4, 0, 0, 0xE, 0xF, 0, 0),
        (record.TEXT, 0x65, 5, 4, 0, 0, *text),
        (record.CALL_ENTER, 0x65, 5, 4, 0, 0, 0xA, 0xB, 0xC, 0xD),
    ]


def test_an_entry_whose_text_was_lost_is_torn() -> None:
    read = lines(function(Argument("said", 0, "str")))
    # The texts of entry 0, which was lost itself, are not those of entry 1.
    read.feed(f"d 0 64 1 5 0 0 old{END}\nd 0 64 1 5 0 1 {END}\n1 0 70 1 5 1 0 5 4 0 0\n".encode())
    assert records(read.release()) == [(record.CALL_ENTER, 0x70, 5, 4, 0, 1, 0, 0, 0, 0)]


def test_a_long_text_is_put_together_from_both_pieces() -> None:
    read = lines(function(Argument("said", 0, "str")))
    read.feed(f"d 0 64 1 5 0 0 {'x' * 124}{END}\nd 0 64 1 5 0 1 {'y' * 3}{END}\n".encode())
    read.feed(b"1 0 65 1 5 0 0 5 4 0 0\n")
    chunk = read.release()
    texts = [struct.pack("<4Q", *a)[:31] for kind, *_, a in chunks_of(chunk) if kind == record.TEXT]
    assert b"".join(texts).rstrip(b"\0") == b"x" * 124 + b"y" * 3


def chunks_of(chunk: bytes) -> list[tuple[int, tuple[int, ...]]]:
    return [(kind, tuple(a)) for _, _, _, _, kind, _, _, *a in RECORD.iter_unpack(chunk)]


def test_a_line_may_come_in_parts() -> None:
    read = lines(function())
    for part in (b"1 0 6", b"5 1 5 ", b"0 0 5 4 0 0", b"\n3 0 66 1 5 1 0 5 4 0 0 ffffffffffffffff\n"):
        read.feed(part)
    assert [kind for kind, *_ in records(read.release())] == [record.CALL_ENTER, record.CALL_RETURN]


def test_deferred_entries_have_their_own_time_and_the_returns_place() -> None:
    read = lines(function())
    read.feed(b"4 1 50 0 5 0 50 5 4 10 0 0 0 0 0\n1 0 60 0 5 0 40 5 4 0 0\n3 0 61 0 5 1 0 5 4 0 0 0\n")
    assert [(kind, ts_ns) for kind, ts_ns, *_ in records(read.release())] == [
        (record.SYSCALL_ENTER, 0x50),
        (record.CALL_ENTER, 0x40),
        (record.CALL_RETURN, 0x61),
    ]


def test_the_process_that_a_worker_serves_is_printed_before_entry_and_return() -> None:
    read = lines(in_kernel())
    read.feed(b"1 2 60 0 5 0 0 5 5 0 700000008 1000\n3 2 61 0 5 1 0 5 5 0 700000008 0\n")
    assert [(kind, a0) for kind, _, _, _, _, _, a0, *_ in records(read.release())] == [
        (record.SERVED, 7 << 32 | 8),
        (record.CALL_ENTER, 0x1000),
        (record.SERVED, 7 << 32 | 8),
        (record.CALL_RETURN, 0),
    ]


def test_what_happens_everywhere_is_of_no_thread() -> None:
    made = script(plan(tracepoint()), tracepoint_fields={0: ["irq", "ret"]})
    assert r'"e 2 %lx %lx %lx %lx 0 0 0 0 0 %lx %lx\n"' in made
    read = lines(tracepoint())
    read.feed(b"e 2 60 3 5 0 0 0 0 0 0 2b 1\n")
    assert records(read.release()) == [(record.EVENT, 0x60, 0, 0, 0, 0, 0x2B, 1, 0, 0)]


def test_texts_of_a_tracepoint_are_printed_before_it() -> None:
    arguments = (
        Argument("driver", 8, "str", text_form="__data_loc"),
        Argument("seqno", 20, "u32"),
        Argument("comm", 24, "str", text_form="array", size_bytes=16),
    )
    hook = Hook("tracepoint", "", "dma_fence:fence", "kernel", Signature(arguments), everywhere=True)
    probe = Probe("fence", "fence", TracepointPlace("dma_fence/fence"), hook)
    made = script(plan(probe), tracepoint_fields={0: ["driver", "seqno", "comm"]})
    first, second = made.index("str(args->driver)"), made.index(", args->comm)")
    assert first < second < made.index("args->seqno")
    read = lines(probe)
    # Two processors' idle threads have sequences of their own.
    for cpu, driver in ((0, "one"), (3, "two")):
        who = f"{IDLE + cpu:x}"
        read.feed(f"d 2 60 {cpu} {who} 0 0 {driver}{END}\nd 2 60 {cpu} {who} 0 1 idle{END}\n".encode())
    for ts_ns, cpu, number, seqno in ((0x61, 3, 0, 7), (0x62, 0, 0, 8), (0x63, 0, 1, 9)):
        read.feed(f"e 2 {ts_ns:x} {cpu} {IDLE + cpu:x} {number} 0 0 0 0 0 0 {seqno} 0\n".encode())
    taken = records(read.release())
    assert [(kind, torn) for kind, _, _, _, _, torn, *_ in taken] == [
        *[(record.TEXT, 0), (record.TEXT, 0), (record.EVENT, 0)] * 2,
        (record.EVENT, 1),
    ]
    assert struct.pack("<Q", taken[0][6]).rstrip(b"\0") == b"two"
    assert [a1 for kind, *_, a1, _, _ in taken if kind == record.EVENT] == [7, 8, 9]


def test_lines_wait_for_those_of_other_processors() -> None:
    read = lines()
    read.feed(b"5 1 3000000 0 5 0 0 5 4 1 0 0\n5 1 5000000 0 5 1 0 5 4 1 0 0\n")
    assert read.release(min(read.newest_ns.get(cpu, 0) for cpu in (0, 1))) == b""
    read.feed(b"5 1 2000000 1 6 0 0 6 4 1 0 0\n5 1 6000000 1 6 1 0 6 4 1 0 0\n")
    taken = records(read.release(min(read.newest_ns[cpu] for cpu in (0, 1))))
    assert [ts_ns for _, ts_ns, *_ in taken] == [0x2000000, 0x3000000]
    assert [ts_ns for _, ts_ns, *_ in records(read.release())] == [0x5000000, 0x6000000]


def test_a_gap_counts_what_was_lost_of_which_layer_and_when() -> None:
    read = lines(function())
    read.feed(b"1 0 60 0 5 0 0 5 4 0 0\n3 0 90 0 5 3 0 5 4 0 0 0\n")
    read.feed(b"5 1 70 0 5 1 0 5 4 10 0 0\n4 1 95 0 5 2 0 5 4 10 0 0 0 0 0\n")
    read.release()
    found = sorted((loss.layer, loss.count, loss.start_ns, loss.end_ns) for loss in read.losses)
    assert found == [("syscall", 1, 0x70, 0x70), ("userspace", 2, 0x60, 0x90)]


def test_losses_at_the_end_are_counted_too() -> None:
    read = lines(function())
    read.feed(b"1 0 60 0 5 0 0 5 4 0 0\n@s[5, 0]: 4\n@s[6, 3]: 2\n@s[7, 7]: 1\n@f[5, 0]: 8\n@f[6, 0]: 2\n")
    read.release()
    read.finish(0x10, 0x100)
    found = {(loss.layer, loss.count, loss.start_ns, loss.end_ns) for loss in read.losses}
    assert found == {("userspace", 3, 0x60, 0x100), ("scheduler", 2, 0x10, 0x100), (None, 1, 0x10, 0x100)}
    assert read.filtered == {0: 10}


def test_idle_threads_of_two_processors_have_sequences_of_their_own() -> None:
    read = lines()
    for ts_ns, cpu, number in ((0x60, 0, 0), (0x61, 1, 0), (0x62, 1, 1)):
        read.feed(f"7 3 {ts_ns:x} {cpu} {IDLE + cpu:x} {number} 0 5 4 0 0 0 0\n".encode())
    read.release()
    assert read.losses == []


@pytest.mark.parametrize(
    "line",
    [
        b"1 0 60 0 5 0 0 5 4 9 0",
        b"1 0 60 0 5 0 0 5 4 0",
        b"1 0 xx 0 5 0 0 5 4 0 0",
        b"what is this",
        b"5 1 2",
        b"@z[1]: 2",
        b"\xff\xfe",
    ],
)
def test_a_bad_line_is_counted_and_the_others_are_read(line: bytes) -> None:
    read = lines(function())
    read.feed(line + b"\n1 0 60 0 5 0 0 5 4 0 0\n")
    assert len(records(read.release())) == 1
    read.finish(1, 2)
    assert [(loss.layer, loss.count) for loss in read.losses] == [(None, 1)]
    assert line[:3].decode(errors="replace") in read.losses[0].reason


def test_a_threads_name_may_be_anything() -> None:
    read = lines()
    read.feed(f"c 7 60 0 5 0 0 5 4 0 0 a\nb c{END}\n".encode())
    ((kind, _, tid, tgid, *_, low, high, _, _),) = records(read.release())
    assert (kind, tid, tgid) == (record.THREAD_NAME, 5, 4)
    assert struct.pack("<QQ", low, high).rstrip(b"\0") == b"a\nb c"


def test_a_clock_that_runs_on_while_the_machine_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    second_ns = 10**9
    now_ns, slept_ns = [100 * second_ns], [5 * second_ns]
    monkeypatch.setattr("time.monotonic_ns", lambda: now_ns[0])
    monkeypatch.setattr("time.clock_gettime_ns", lambda _: now_ns[0] + slept_ns[0])
    clock = Clock(True)
    now_ns[0] += 1_000_000
    slept_ns[0] += 60 * second_ns
    clock.follow()
    assert clock.monotonic_ns(105 * second_ns + 400_000) == 100 * second_ns + 400_000
    assert clock.monotonic_ns(165 * second_ns + 900_000) == 100 * second_ns + 900_000
    assert Clock(False).monotonic_ns(7) == 7


@pytest.mark.parametrize(
    ("shown", "message"),
    [("bpftrace v0.13.1", "bpftrace 0.13.1 is too old"), ("no such thing", "does not show its version")],
)
def test_a_bpftrace_that_cannot_do_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: str, message: str
) -> None:
    program = tmp_path / "bpftrace"
    program.write_text(f"#!/bin/sh\necho '{shown}'\n")
    program.chmod(0o755)
    usable(monkeypatch, tmp_path)
    with pytest.raises(CaptureUnavailable, match=message):
        BpftraceEngine().check()


def test_a_machine_without_bpftrace_gets_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usable(monkeypatch, tmp_path)
    with pytest.raises(CaptureUnavailable) as caught:
        BpftraceEngine().check()
    assert caught.value.hint == "apt install bpftrace"


def test_a_locked_down_kernel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bpftrace"
    program.write_text("#!/bin/sh\necho bpftrace v0.17.0\n")
    program.chmod(0o755)
    usable(monkeypatch, tmp_path)
    monkeypatch.setattr(
        bpftrace, "this_machine", lambda: Machine("Linux", "6.1", "x86_64", lockdown="confidentiality")
    )
    with pytest.raises(CaptureUnavailable, match="locked down"):
        BpftraceEngine().check()
    monkeypatch.setattr(
        bpftrace, "this_machine", lambda: Machine("Linux", "6.1", "x86_64", lockdown="integrity")
    )
    assert BpftraceEngine().check() == "0.17.0"


def usable(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A machine that has all but a good bpftrace."""
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(bpftrace, "check_machine", lambda: None)
    monkeypatch.setattr(bpftrace, "own_namespace", lambda: None)
    monkeypatch.setattr(bpftrace, "tracing_folder", lambda: folder)
