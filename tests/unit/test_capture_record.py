"""Records as the kernel side writes them, and the lines that they become."""

from __future__ import annotations

import json
import os
import re
import struct
import sys
from typing import Any, get_type_hints

import pytest

from tracepipe.event.checks import first_fault
from tracepipe.event.model import Event
from tracepipe.hooks.hook import Argument, FilePlace, Hook, KernelPlace, Probe, Signature, TracepointPlace
from tracepipe.tracer.bpf.bytecode import SHIPPED
from tracepipe.tracer.records import line as writing
from tracepipe.tracer.records import record
from tracepipe.tracer.records.line import COMM, Head, Lines
from tracepipe.tracer.records.record import DROP_LAYERS, RECORD, UNSEEN, Loss, event_count, loss_record
from tracepipe.tracer.records.render import RecordRenderer
from tracepipe.tracer.records.syscalls import SYSCALLS

NUMBER = {name: number for number, name in SYSCALLS["x86_64"].items()}
HEADER = struct.pack("<II", 56, 0)
VALUES = {"CUresult": {0: "CUDA_SUCCESS", 700: "CUDA_ERROR_ILLEGAL_ADDRESS"}}


def function(name: str, *arguments: Argument, result: str = "CUresult", **hook: Any) -> Probe:
    made = Hook("uprobe", "libcuda.so.1", name, "userspace", Signature(arguments, result), **hook)
    return Probe(name, name, FilePlace("/lib/libcuda.so.1", 64), made)


def driver_function(name: str, *arguments: Argument, result: str = "i32") -> Probe:
    made = Hook("kprobe", "", name, "kernel", Signature(arguments, result))
    return Probe(name, name, KernelPlace(name, "nvidia", 0), made)


PROBES = [
    function("cuInit"),
    function(
        "cuLaunchKernel",
        Argument("function", 0, "ptr"),
        *(Argument(f"grid.{axis}", 1 + i, "u32") for i, axis in enumerate("xyz")),
        *(Argument(f"block.{axis}", 4 + i, "u32") for i, axis in enumerate("xyz")),
        Argument("shared_bytes", 7, "u32"),
        Argument("stream", 8, "ptr"),
    ),
    function("cuMemcpyHtoD_v2", Argument("to", 0), Argument("from", 1), Argument("size_bytes", 2)),
    function("cuMemAlloc_v2", Argument("address", 0, "ptr", out=True), Argument("size_bytes", 1)),
    function(
        "cuModuleGetFunction",
        Argument("handle", 0, "ptr", out=True),
        Argument("symbol", 2, "str"),
        effect="name",
    ),
    function(
        "__cudaGetKernel",
        Argument("handle", 0, "ptr", out=True),
        Argument("function", 1, "ptr"),
        effect="name",
    ),
    driver_function("nvidia_unlocked_ioctl", Argument("cmd", 1, "ioctl")),
    driver_function("nv_execute_work", result=""),
    Probe(
        "irq_handler_entry",
        "gpu_complete",
        TracepointPlace("irq/irq_handler_entry"),
        Hook(
            "tracepoint", "", "irq:irq_handler_entry", "scheduler", Signature((Argument("irq", 8, "i32"),)),
            everywhere=True,
        ),
    ),
    Probe(
        "dma_fence_signaled",
        "dma_fence_signaled",
        TracepointPlace("dma_fence/dma_fence_signaled"),
        Hook(
            "tracepoint", "", "dma_fence:dma_fence_signaled", "hook",
            Signature((
                Argument("driver", 8, "str", text_form="__data_loc"), Argument("seqno", 20, "u32"),
                Argument("comm", 24, "str", text_form="array", size_bytes=16),
            )),
            layer_name="fences",
        ),
    ),
]  # fmt: skip
PLACE = {probe.symbol: index for index, probe in enumerate(PROBES)}


def raw(
    kind: int,
    number: int | str = 0,
    *words: int,
    ts_ns: int = 1000,
    tid: int = 12,
    tgid: int = 11,
    cpu: int = 3,
    torn: int = 0,
) -> bytes:
    padded = (*words, 0, 0, 0, 0)[:4]
    number = PLACE[number] if isinstance(number, str) else number
    return HEADER + struct.pack(
        "<QIIIBBH4Q", ts_ns, tid, tgid if tid else 0, number, kind, torn, cpu, *padded
    )


def text(number: str, content: bytes, **where: Any) -> bytes:
    """The records of a text, as the kernel side cuts it: 31 bytes and a NUL each, the last one shorter."""
    chunks = [content[at : at + 31] for at in range(0, len(content) + 1, 31)][:8]
    return b"".join(
        raw(record.TEXT, number, *struct.unpack("<4Q", chunk.ljust(32, b"\0")), **where) for chunk in chunks
    )


def rendered(*records: bytes, **options: Any) -> list[dict[str, Any]]:
    renderer = RecordRenderer(PROBES, SYSCALLS["x86_64"], VALUES, **options)
    chunk = b"".join(records)
    renderer.learn(chunk)
    made = renderer.render(chunk)
    lines = [json.loads(line) for line in made.texts]
    assert [first_fault(line) for line in lines] == [None] * len(lines)
    assert sum(made.counts().values()) == len(lines)
    return lines


def test_a_call_is_begun_and_ended() -> None:
    begin, end = rendered(
        raw(record.CALL_ENTER, "cuMemcpyHtoD_v2", 0x7000, 0x8000, 4096),
        raw(record.CALL_RETURN, "cuMemcpyHtoD_v2", 700, ts_ns=1500),
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


LAUNCH = (
    raw(record.MORE, "cuLaunchKernel", 512, 0x57),
    raw(record.CALL_ENTER, "cuLaunchKernel", 0xF00, 10 | 20 << 32, 30 | 256 << 32, 2 | 1 << 32),
)


def test_a_launch_has_its_grid_and_block_and_stream() -> None:
    (launch,) = rendered(*LAUNCH)
    assert launch["name"] == "cuLaunchKernel"
    assert launch["args"] == {
        "function": 0xF00,
        "grid": [10, 20, 30],
        "block": [256, 2, 1],
        "shared_bytes": 512,
        "stream": 0x57,
    }


def test_arguments_of_another_call_are_not_taken_for_this_ones() -> None:
    more, enter = LAUNCH
    (launch,) = rendered(more, raw(record.CALL_ENTER, "cuLaunchKernel", 0xF00, torn=1))
    assert launch["args"]["args_lost"] is True
    assert launch["args"]["stream"] == 0
    other = raw(record.MORE, "cuInit", 1, 2, 3, 4)
    assert rendered(other, enter)[0]["args"]["stream"] == 0


def test_what_an_argument_points_to_is_on_the_end_of_a_call_that_succeeded() -> None:
    begin, end, _, failed = [
        line
        for line in rendered(
            raw(record.CALL_ENTER, "cuMemAlloc_v2", 4096),
            raw(record.CALL_RETURN, "cuMemAlloc_v2", 0, 0x7F0000),
            raw(record.CALL_ENTER, "cuMemAlloc_v2", 4096),
            raw(record.CALL_RETURN, "cuMemAlloc_v2", 700, 0x7F0000),
        )
        if line["type"] == "userspace"
    ]
    assert begin["args"] == {"size_bytes": 4096}
    assert end["args"] == {"result": 0, "result_name": "CUDA_SUCCESS", "address": 0x7F0000}
    assert "address" not in failed["args"]


@pytest.mark.parametrize("symbol", [b"add", b"x" * 31, b"_Z9vectorAddPKfS0_Pf" * 4, b'sy"m\\\xff'])
def test_a_kernel_has_the_name_that_its_handle_was_asked_for(symbol: bytes) -> None:
    asked, _, launch, other = rendered(
        text("cuModuleGetFunction", symbol),
        raw(record.CALL_ENTER, "cuModuleGetFunction"),
        raw(record.CALL_RETURN, "cuModuleGetFunction", 0, 0xF00),
        *LAUNCH,
        raw(record.CALL_ENTER, "cuLaunchKernel", 0xF01),
    )
    shown = symbol.decode(errors="replace")
    assert asked["args"] == {"symbol": shown}
    assert launch["args"]["kernel"] == shown
    assert "kernel" not in other["args"]


def test_another_handle_of_a_kernel_has_its_name() -> None:
    _, _, asked, _, launch, refused, _, other = rendered(
        text("cuModuleGetFunction", b"add"),
        raw(record.CALL_ENTER, "cuModuleGetFunction"),
        raw(record.CALL_RETURN, "cuModuleGetFunction", 0, 0xF00),
        raw(record.CALL_ENTER, "__cudaGetKernel", 0xF00),
        raw(record.CALL_RETURN, "__cudaGetKernel", 0, 0xE00),
        raw(record.CALL_ENTER, "cuLaunchKernel", 0xE00),
        raw(record.CALL_ENTER, "__cudaGetKernel", 0xF00),
        raw(record.CALL_RETURN, "__cudaGetKernel", 700, 0xD00),
        raw(record.CALL_ENTER, "cuLaunchKernel", 0xD00),
    )
    assert asked["args"] == {"function": 0xF00, "kernel": "add"}
    assert launch["args"]["kernel"] == refused["args"]["kernel"] == "add"
    assert "kernel" not in other["args"]


def test_a_forked_process_has_the_names_of_its_parents_kernels() -> None:
    launched = rendered(
        raw(record.THREAD_NAME, 0, 0x61),
        text("cuModuleGetFunction", b"add"),
        raw(record.CALL_ENTER, "cuModuleGetFunction"),
        raw(record.CALL_RETURN, "cuModuleGetFunction", 0, 0xF00),
        raw(record.THREAD_NEW, 12, 0x62, tid=20, tgid=20),
        raw(record.THREAD_NEW, 20, 0x63, tid=30, tgid=30),
        *(raw(record.CALL_ENTER, "cuLaunchKernel", 0xF00, tid=tid, tgid=tid) for tid in (20, 30, 40)),
    )[2:]
    assert [event["args"].get("kernel") for event in launched] == ["add", "add", None]


def test_an_ioctl_is_decoded() -> None:
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
    begin, end = rendered(
        raw(record.CALL_ENTER, "nvidia_unlocked_ioctl", 0xC020462A),
        raw(record.CALL_RETURN, "nvidia_unlocked_ioctl", (1 << 64) - 22),
    )
    assert (begin["type"], begin["name"], begin["phase"]) == ("kernel", "nvidia_unlocked_ioctl", "B")
    assert begin["args"]["request"] == "NV_ESC_RM_CONTROL"
    assert (end["phase"], end["args"]) == ("E", {"result": -22})


def test_a_worker_names_the_process_that_it_works_for() -> None:
    begin, end, other = rendered(
        raw(record.SERVED, "nv_execute_work", 11 << 32 | 12, tid=90),
        raw(record.CALL_ENTER, "nv_execute_work", tid=90),
        raw(record.SERVED, "nv_execute_work", 11 << 32 | 12, tid=90),
        raw(record.CALL_RETURN, "nv_execute_work", 99, tid=90),
        raw(record.CALL_ENTER, "nv_execute_work", tid=90),
    )
    assert begin["args"] == end["args"] == {"for_pid": 11, "for_tid": 12}
    assert "args" not in other


def test_an_event_of_no_thread_has_none() -> None:
    (event,) = rendered(raw(record.EVENT, "irq_handler_entry", 33, tid=0))
    assert event == {
        "ts_ns": 1000, "type": "scheduler", "name": "gpu_complete", "phase": "I", "cpu": 3,
        "args": {"irq": 33},
    }  # fmt: skip


@pytest.mark.parametrize("driver", [b"nvidia", b"x" * 31, b"x" * 62, b"x" * 300, b""])
def test_texts_of_a_tracepoint(driver: bytes) -> None:
    name = "dma_fence_signaled"
    (event,) = rendered(text(name, driver), text(name, b"main\0 of 20 bytes"), raw(record.EVENT, name, 0, 7))
    assert event == {
        "ts_ns": 1000, "type": "hook", "layer": "fences", "name": name, "phase": "I", "pid": 11, "tid": 12,
        "cpu": 3, "args": {"seqno": 7, "driver": driver[:248].decode(), "comm": "main"},
    }  # fmt: skip


def test_texts_of_nobodys_events_are_those_of_the_processor() -> None:
    name = "dma_fence_signaled"
    events = rendered(
        *(
            text(name, printed, tid=0, cpu=cpu)
            for printed, cpu in ((b"one", 0), (b"two", 1), (b"a", 0), (b"b", 1))
        ),
        *(raw(record.EVENT, name, tid=0, cpu=cpu) for cpu in (1, 0)),
        text(name, b"stale", tid=0, cpu=0),  # of an event that was lost
        *(text(name, printed, tid=0, cpu=0) for printed in (b"three", b"c" * 20)),
        raw(record.EVENT, name, tid=0, cpu=0),
        raw(record.EVENT, name, tid=0, cpu=0, torn=1),
    )
    assert [event["args"] for event in events] == [
        {"seqno": 0, "driver": "two", "comm": "b"},
        {"seqno": 0, "driver": "one", "comm": "a"},
        {"seqno": 0, "driver": "three", "comm": "c" * 16},
        {"seqno": 0, "args_lost": True},
    ]


@pytest.mark.parametrize(
    ("state", "why"),
    [(0, "runnable"), (1, "sleeping"), (2, "disk"), (0x100, "preempted"), (0x10, "dead"), (0x81, "sleeping")],
)
def test_why_a_thread_left(state: int, why: str) -> None:
    running, left = rendered(raw(record.SWITCH_IN), raw(record.SWITCH_OUT, 0, state))
    assert (running["name"], running["phase"]) == ("running", "B")
    assert (left["phase"], left["args"]) == ("E", {"prev_state": why})


@pytest.mark.parametrize("state", [0x10, 0x20])
def test_nothing_of_a_thread_that_ended_is_kept(state: int) -> None:
    renderer = RecordRenderer(PROBES, SYSCALLS["x86_64"], VALUES, 500, {12: "worker"})

    def kept() -> int:
        found = [*vars(renderer).values(), *vars(renderer._calls).values()]
        return sum(len(one) for one in found if isinstance(one, (dict, set)))

    def lives(tid: int) -> list[str]:
        name = int.from_bytes(b"worker\0\0", "little")
        its = (
            raw(record.THREAD_NEW, 11, name, tid=tid),
            raw(record.SWITCH_IN, tid=tid),
            raw(record.MORE, "cuLaunchKernel", tid=tid),
            text("cuModuleGetFunction", b"left behind"),
            raw(record.SYSCALL_ENTER, NUMBER["futex"], 0, tid=tid),
            raw(record.SWITCH_OUT, 0, state, tid=tid),
        )
        return renderer.render(b"".join(its)).texts

    before = kept()
    lives(12)
    after_one = kept()
    for tid in [*range(100, 200), 100]:
        assert '"comm":"worker"' in lives(tid)[0]  # also where an ended one had its number
    lives(12)
    assert kept() == after_one <= before + 1  # how that state is written


def test_a_switch_that_the_kernel_did_not_report_is_noted_and_is_not_a_loss() -> None:
    left, again = rendered(
        raw(record.SWITCH_OUT, 0, 1, ts_ns=500), raw(record.SWITCH_OUT, 0, 1, 1, ts_ns=900)
    )
    assert (left["phase"], again["phase"]) == ("E", "E")
    assert again["args"] == {"prev_state": "sleeping", "began": "not reported"}
    _, end, begin = rendered(raw(record.SWITCH_IN), raw(record.SWITCH_IN, 0, 0, 1))
    assert (end["phase"], begin["phase"]) == ("E", "B")
    assert end["args"] == {"prev_state": "not reported"}


def test_records_that_cannot_be_written_are_counted_by_layer() -> None:
    renderer = RecordRenderer(PROBES, SYSCALLS["x86_64"], VALUES)
    chunk = b"".join(
        (
            *LAUNCH,
            raw(record.CALL_RETURN, "cuLaunchKernel"),
            text("cuModuleGetFunction", b"x" * 40),
            raw(record.CALL_ENTER, "cuModuleGetFunction"),
            raw(record.CALL_ENTER, "nvidia_unlocked_ioctl"),
            raw(record.EVENT, "irq_handler_entry", 33, tid=0),
            raw(record.THREAD_NEW, 11),
            raw(record.SYSCALL_ENTER, NUMBER["futex"]),
            raw(record.SWITCH_OUT),
            raw(record.WAKEUP),
        )
    )
    assert renderer.counts(chunk) == {"userspace": 3, "kernel": 1, "scheduler": 3, "syscall": 1}
    assert renderer.counts(chunk) == renderer.render(chunk).counts()


def test_what_was_under_way_begins_with_the_recording() -> None:
    lines = rendered(
        raw(record.SWITCH_OUT, 0, 1, 2),
        raw(record.SYSCALL_EXIT, NUMBER["futex"], 0),
        raw(record.SYSCALL_ENTER, NUMBER["futex"], 0),
        raw(record.SYSCALL_EXIT, NUMBER["futex"], 0),
        start_ns=700,
        names={12: "worker"},
    )
    assert [(line["name"], line["phase"], line["ts_ns"]) for line in lines[:4]] == [
        ("running", "B", 700), ("running", "E", 1000), ("futex", "B", 700), ("futex", "E", 1000)
    ]  # fmt: skip
    assert lines[0]["args"] == lines[2]["args"] == {"began": "before the recording"}
    assert [line["phase"] for line in lines[4:]] == ["B", "E"]
    assert [line.get("comm") for line in lines].count("worker") == 1


def test_in_a_pid_namespace_the_ids_are_those_of_the_namespace() -> None:
    lines = rendered(
        raw(record.SWITCH_IN),
        raw(record.THREAD_IDS, 0, 2 << 32 | 3),
        raw(record.THREAD_IDS, 0, 2 << 32 | 4, tid=13),
        raw(record.WAKEUP, 13, 1),
        raw(record.WAKEUP, 4711, 1),
        names={3: "shown"},
    )
    assert [(line["pid"], line["tid"]) for line in lines] == [(2, 3)] * 3
    assert [line["args"]["by_tid"] for line in lines[1:]] == [4, 0]
    assert lines[0]["comm"] == "shown"


def test_a_migration_names_both_processors() -> None:
    (moved,) = rendered(raw(record.MIGRATE, 0, 1, 5))
    assert (moved["name"], moved["phase"], moved["args"]) == ("migrate", "I", {"from_cpu": 1, "to_cpu": 5})


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
    line: dict[str, Any] = loss_record(Loss("syscall", 7, 100, 300, "the ring buffer was full", 2))
    assert first_fault(line) is None
    assert line == {
        "type": "loss",
        "layer": "syscall",
        "cpu": 2,
        "ts_ns": 100,
        "dur_ns": 200,
        "count": 7,
        "reason": "the ring buffer was full",
    }
    assert "layer" not in loss_record(Loss(None, 1, 0, 0, "?"))


def test_only_events_are_counted() -> None:
    chunk = b"".join((*LAUNCH, text("cuModuleGetFunction", b"x"), raw(record.SWITCH_IN)))
    assert event_count(chunk) == 2


def made() -> Lines:
    """Lines of every kind."""
    lines = Lines()
    lines.event(1, Head("syscall", "read", "I"), 0, 0, 2)
    lines.record({"type": "clock", "clock": "globaltimer:0"})
    lines.record({"type": "gpu_warp", "name": "f", "warp": [1, 2, 3]}, 3)
    lines.span(4, 5, Head("transfer", "copy", "X"), (7, 8, 9), '"size":1')
    return lines


@pytest.mark.parametrize("without", ["", "orjson"])
def test_arguments_and_paths_need_not_be_utf_8(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if without:
        monkeypatch.setitem(sys.modules, without, None)
    command = [os.fsdecode(b"caf\xe9"), "é"]
    text = writing.record_line({"command": command, "libraries": (command[0],), "layers": {command[0]: 1}})
    cut = "caf\\udce9"
    assert json.loads(text.encode()) == {"command": [cut, "é"], "libraries": [cut], "layers": {cut: 1}}


def test_lines_are_cut_where_there_is_no_more_room() -> None:
    assert made().counts() == {"syscall": 1, "gpu_warp": 3, "transfer": 1}
    whole = made().encoded()
    for lines, size_bytes, left in (
        (3, len(whole), 4),
        (2, len(whole), 3),
        (0, 99, 0),
        (9, len(whole) - 1, 3),
    ):
        some = made()
        some.cut(lines, size_bytes)
        assert some.texts == made().texts[:left]
        assert some.counts().get("gpu_warp", 0) == (3 if left >= 3 else 0)


def test_a_line_has_the_fields_of_the_model_alone() -> None:
    lines = Lines()
    lines.event(1, Head("kernel", 'a"b', "B"), 11, 12, 3, '"a":1', COMM % '"sh"')
    lines.event(1, Head("userspace", "f", "E"), 11, 12, 3, "", writing.LAUNCH % 9)
    lines.span(1, 2, Head("transfer", "HtoD", "X"), (11, 12, 3), '"size":1')
    for line in lines.texts:
        event = json.loads(line)
        assert first_fault(event) is None
        assert event.keys() <= get_type_hints(Event).keys()


SOURCE = SHIPPED.with_name("probes.bpf.c").read_text()


def test_the_kernel_side_has_the_same_kinds() -> None:
    kinds = dict(
        re.findall(r"^    ([A-Z_]+) = (\d+), +/\*", SOURCE.partition("enum kind")[2].partition("};")[0], re.M)
    )
    assert len(kinds) == 19
    assert {name: int(value) for name, value in kinds.items()} == {
        name: getattr(record, name) for name in kinds
    }
    assert RECORD.size == 8 + struct.calcsize("=QIIIBBH4Q")


def test_the_kernel_side_counts_losses_in_the_same_order() -> None:
    names = re.search(r"enum layer \{ (.*), THREADS, HOST_SAMPLE, UNSEEN, LAYERS \};", SOURCE)
    assert names is not None
    assert tuple(name.lower() for name in names[1].split(", ")) == DROP_LAYERS[:-3]
    assert DROP_LAYERS[-3:] == (None, "host_sample", "scheduler")
    assert len(DROP_LAYERS) - 1 == UNSEEN


def test_the_kernels_own_calls_are_not_calls_of_the_target() -> None:
    assert not {335, 336} & SYSCALLS["x86_64"].keys()
    assert all(0 <= number < 512 for table in SYSCALLS.values() for number in table)
