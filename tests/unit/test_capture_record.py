"""Records as the kernel side writes them, and the lines that they become."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest

import tracepipe.capture
from tracepipe.capture import record
from tracepipe.capture.engine import DriverFunction, Loss
from tracepipe.capture.record import RECORD, RecordRenderer, loss_line
from tracepipe.capture.syscalls import SYSCALLS
from tracepipe.validate import first_fault

FUNCTIONS = ["cuInit", "cuLaunchKernel", "cuMemcpyHtoD_v2"]
DRIVER = [
    DriverFunction("nvidia_unlocked_ioctl", "nvidia", 0, ("_", "cmd"), True),
    DriverFunction("nv_execute_work", "nvidia", 0),
    DriverFunction("nv_alloc_pages", "nvidia", 0, ("_", "page_count"), True),
]
NUMBER = {name: number for number, name in SYSCALLS["x86_64"].items()}
HEADER = struct.pack("<II", 56, 0)


def raw(kind: int, number: int = 0, *registers: int, ts_ns: int = 1000, tid: int = 12, cpu: int = 3) -> bytes:
    padded = (*registers, 0, 0, 0, 0)[:4]
    return HEADER + struct.pack("<QIIIBBH4Q", ts_ns, tid, 11, number, kind, 0, cpu, *padded)


def rendered(*records: bytes) -> list[dict[str, Any]]:
    renderer = RecordRenderer(FUNCTIONS, SYSCALLS["x86_64"], DRIVER)
    lines = [json.loads(line) for line in renderer.render(b"".join(records)).splitlines()]
    assert [first_fault(line) for line in lines] == [None] * len(lines)
    assert sum(renderer.counts.values()) == len(lines)
    return lines


def test_a_call_is_begun_and_ended() -> None:
    begin, end = rendered(
        raw(record.CALL_ENTER, 2, 0x7000, 0x8000, 4096), raw(record.CALL_RETURN, 2, 700, ts_ns=1500)
    )
    assert begin == {
        "type": "userspace",
        "name": "cuMemcpyHtoD_v2",
        "phase": "B",
        "ts_ns": 1000,
        "pid": 11,
        "tid": 12,
        "cpu": 3,
        "args": {"to": 0x7000, "from": 0x8000, "size_bytes": 4096},
    }
    assert list(begin) == ["ts_ns", "type", "name", "phase", "pid", "tid", "cpu", "args"]
    assert (end["phase"], end["ts_ns"]) == ("E", 1500)
    assert end["args"] == {"result": 700, "result_name": "CUDA_ERROR_ILLEGAL_ADDRESS"}


def test_the_upper_half_of_a_result_is_nothing() -> None:
    first, second = rendered(
        raw(record.CALL_RETURN, 0, 0xDEADBEEF << 32), raw(record.CALL_RETURN, 0, 0xFFFFFFFF)
    )
    assert first["args"] == {"result": 0, "result_name": "CUDA_SUCCESS"}
    assert second["args"] == {"result": -1}


def test_a_launch_has_its_grid_and_block() -> None:
    (launch,) = rendered(raw(record.LAUNCH_ENTER, 1, 0xF00, 10 | 20 << 32, 30 | 256 << 32, 2 | 1 << 32))
    assert launch["name"] == "cuLaunchKernel"
    assert launch["args"] == {"function": 0xF00, "grid": [10, 20, 30], "block": [256, 2, 1]}


def test_an_ioctl_is_taken_apart() -> None:
    begin, end = rendered(
        raw(record.SYSCALL_ENTER, NUMBER["ioctl"], 5, 0xC020462A),
        raw(record.SYSCALL_EXIT, NUMBER["ioctl"], (1 << 64) - 25),
    )
    assert begin["args"] == {
        "fd": 5,
        "cmd": 0xC020462A,
        "dir": "read_write",
        "type": "F",
        "nr": 0x2A,
        "size_bytes": 32,
        "request": "NV_ESC_RM_CONTROL",
    }
    assert end["args"] == {"result": -25, "error": "ENOTTY"}


@pytest.mark.parametrize(
    ("name", "registers", "args"),
    [
        ("futex", (64, 128 | 9, 7), {"address": 64, "op": "WAIT_BITSET", "value": 7}),
        ("futex", (64, 99, 7), {"address": 64, "op": 99, "value": 7}),
        ("read", (3, 0x1000, 512), {"fd": 3, "count_bytes": 512}),
        ("sched_yield", (), None),
    ],
)
def test_arguments_of_system_calls(
    name: str, registers: tuple[int, ...], args: dict[str, Any] | None
) -> None:
    (begin,) = rendered(raw(record.SYSCALL_ENTER, NUMBER[name], *registers))
    assert (begin["name"], begin.get("args")) == (name, args)


@pytest.mark.parametrize(
    ("register", "args"),
    [
        (4095, {"result": 4095}),
        ((1 << 64) - 4096, {"result": (1 << 64) - 4096}),
        ((1 << 64) - 110, {"result": -110, "error": "ETIMEDOUT"}),
        ((1 << 64) - 516, {"result": -516, "error": "restarted"}),
    ],
)
def test_results_of_system_calls(register: int, args: dict[str, Any]) -> None:
    (end,) = rendered(raw(record.SYSCALL_EXIT, NUMBER["futex"], register))
    assert end["args"] == args


def test_a_driver_function_has_what_is_declared_of_it() -> None:
    begin, pages, end = rendered(
        raw(record.DRIVER_ENTER, 0, 0xFFFF888000000000, 0xC020462A, 7),
        raw(record.DRIVER_ENTER, 2, 0xFFFF888000000000, 16, 7),
        raw(record.DRIVER_RETURN, 0, (1 << 64) - 22),
    )
    assert (begin["type"], begin["name"], begin["phase"]) == ("kernel", "nvidia_unlocked_ioctl", "B")
    assert begin["args"]["request"] == "NV_ESC_RM_CONTROL"
    assert not {0xFFFF888000000000, 7} & set(begin["args"].values())
    assert pages["args"] == {"page_count": 16}
    assert (end["phase"], end["args"]) == ("E", {"result": -22})


def test_a_worker_names_whom_it_works_for() -> None:
    begin, end = rendered(
        raw(record.DRIVER_ENTER, 1, 5, 6, 7, 11 << 32 | 12, tid=90),
        raw(record.DRIVER_RETURN, 1, 99, 0, 0, 11 << 32 | 12, tid=90),
    )
    assert begin["args"] == end["args"] == {"for_pid": 11, "for_tid": 12}


@pytest.mark.parametrize(
    ("state", "why"),
    [(0, "runnable"), (1, "sleeping"), (2, "disk"), (0x100, "preempted"), (0x10, "dead"), (0x81, "sleeping")],
)
def test_why_a_thread_left(state: int, why: str) -> None:
    running, left = rendered(raw(record.SWITCH_IN), raw(record.SWITCH_OUT, 0, state))
    assert (running["name"], running["phase"]) == ("running", "B")
    assert (left["phase"], left["args"]) == ("E", {"prev_state": why})


def test_a_wakeup_names_who_woke_it() -> None:
    (woken,) = rendered(raw(record.WAKEUP, 77, 1))
    assert (woken["phase"], woken["tid"], woken["args"]) == ("I", 12, {"by_tid": 77, "target_cpu": 1})


def test_a_name_is_written_once_and_again_when_it_changes() -> None:
    def named(name: bytes, kind: int = record.THREAD_NAME) -> bytes:
        return raw(kind, 0, *struct.unpack("<QQ", name.ljust(16, b"\0")))

    event = raw(record.SWITCH_IN)
    lines = rendered(
        *(named(b"sh", record.THREAD_NEW), event, event),
        *(named(b"sh"), event),
        *(named(b'we"ird\xff'), event, raw(record.SWITCH_IN, tid=13)),
    )
    assert [line.get("comm") for line in lines] == ["sh", None, None, 'we"ird�', None]


def test_a_loss_is_a_record() -> None:
    line = json.loads(loss_line(Loss("syscall", 7, 100, 300, "the ring buffer was full")))
    assert first_fault(line) is None
    assert line == {
        "type": "loss",
        "layer": "syscall",
        "ts_ns": 100,
        "dur_ns": 200,
        "count": 7,
        "reason": "the ring buffer was full",
    }
    assert "layer" not in json.loads(loss_line(Loss(None, 1, 0, 0, "?")))


def test_the_kernel_side_has_the_same_kinds_in_the_same_order() -> None:
    source = Path(tracepipe.capture.__file__).with_name("probes.bpf.c").read_text()
    kinds = dict(re.findall(r"^    ([A-Z_]+) = (\d+),", source, re.MULTILINE))
    assert len(kinds) == 12
    assert {name: int(value) for name, value in kinds.items()} == {
        name: getattr(record, name) for name in kinds
    }
    assert RECORD.size == 8 + struct.calcsize("=QIIIBBH4Q")


def test_the_kernels_own_calls_are_no_calls_of_the_target() -> None:
    assert not {335, 336} & SYSCALLS["x86_64"].keys()
    assert all(0 <= number < 512 for table in SYSCALLS.values() for number in table)
