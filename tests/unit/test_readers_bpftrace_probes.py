"""Lines that bpftrace's one-liners print: instants of the right layer, and text that is not an event."""

from __future__ import annotations

import io
import json
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.batches import read_all
from tracepipe.errors import FormatError
from tracepipe.event.checks import first_fault
from tracepipe.event.model import Problem, Record
from tracepipe.hooks.probe_names import ProbeName, probe_named
from tracepipe.readers import READERS, bpftrace_probes, is_known, naming_others, recognise

FIXTURES = Path(__file__).parents[2] / "fixtures"
FIRST, LAST = b"[5000] kprobe:nv_bind_context\n", b"kprobe:nv_create_context called at 9000\n"


def read(data: bytes) -> tuple[list[Record], list[Problem]]:
    recording = bpftrace_probes.read(io.BytesIO(data))
    recording.batches = naming_others(recording.batches, READERS["bpftrace"])
    records, problems = read_all(recording)
    assert [first_fault(record) for record in records] == [None] * len(records)
    return records, problems


@pytest.mark.parametrize(
    ("text", "name", "layer"),
    [
        ("uprobe:/lib/x86_64-linux-gnu/libcuda.so:cuMemAlloc_v2", "cuMemAlloc_v2", "userspace"),
        ("uprobe:/usr/lib/libnccl.so.2:ncclAllReduce", "ncclAllReduce", "userspace"),
        ("kprobe:nvidia_ioctl", "nvidia_ioctl", "kernel"),
        ("fentry:nvidia:nv_mem_alloc", "nv_mem_alloc", "kernel"),
        ("kprobe:tcp_connect", "tcp_connect", "kernel"),
        ("kprobe:nv_schedule_work", "nv_schedule_work", "scheduler"),
        ("kprobe:nv_kthread_q_schedule_q_item", "nv_kthread_q_schedule_q_item", "scheduler"),
        ("tracepoint:sched:sched_switch", "sched_switch", "scheduler"),
        ("tracepoint:dma_fence:dma_fence_signaled", "dma_fence_signaled", "scheduler"),
        ("tracepoint:gpu_mem:gpu_mem_total", "gpu_mem_total", "kernel"),
        ("tracepoint:syscalls:sys_enter_ioctl", "ioctl", "syscall"),
    ],
)
def test_a_probe_is_of_the_layer_that_its_place_says(text: str, name: str, layer: str) -> None:
    assert probe_named(text) == ProbeName(name, layer, is_return=False)


@pytest.mark.parametrize(
    ("text", "name", "layer_name"),
    [
        ("usdt:/usr/bin/python3:python:gc__start", "gc__start", "python3"),
        ("uprobe:/lib/x86_64-linux-gnu/libc.so.6:getenv", "getenv", "libc.so.6"),
    ],
)
def test_a_library_that_is_not_cudas_has_a_layer_of_its_own(text: str, name: str, layer_name: str) -> None:
    assert probe_named(text) == ProbeName(name, "hook", False, layer_name)
    ((record,), _) = read(b"[5] " + text.encode() + b"\n")
    assert (record["type"], record["layer"]) == ("hook", layer_name)


@pytest.mark.parametrize(
    "text", ["uretprobe:/lib/libcuda.so:f", "kretprobe:f", "fexit:nvidia:f", "tracepoint:syscalls:sys_exit_f"]
)
def test_a_return_is_marked(text: str) -> None:
    probe = probe_named(text)
    assert (probe.name, probe.is_return) == ("f", True)


def test_every_form_of_a_dated_line_is_read() -> None:
    data = (FIXTURES / "bpftrace-probes" / "input.txt").read_bytes()
    assert recognise(data).name == "bpftrace"
    records, problems = read(data)
    events = [record for record in records if record["type"] != "loss"]
    assert [(r["type"], r["name"], r["ts_ns"] - 24573618140000) for r in events] == [
        ("userspace", "cuLaunchKernel", 5970),
        ("syscall", "ioctl", 6900),
        ("kernel", "nv_bind_context_dma", 7310),
        ("scheduler", "nv_schedule_work", 8020),
        ("scheduler", "nv_schedule_work returns", 9100),
        ("scheduler", "dma_fence_signaled", 10_000),
        ("syscall", "ioctl returns", 11_000),
        ("userspace", "cuLaunchKernel returns", 12_000),
    ]
    assert events[2]["args"] == {"probe": "kprobe:nv_bind_context_dma"}
    assert [record["count"] for record in records if record["type"] == "loss"] == [2]
    assert [(p.line, p.field, p.skipped) for p in problems] == [(12, "ts", True), (7, "", False)]
    assert problems[1].message == (
        "2 lines are text that the script or the traced program printed, not events: b'Hit' (2 times)"
    )


def test_names_without_times_keep_their_order_and_that_is_reported_once() -> None:
    data = (FIXTURES / "bpftrace-bare" / "input.txt").read_bytes()
    assert recognise(data).name == "bpftrace"
    records, problems = read(data)
    assert [(r["name"], r["ts_ns"], r["args"]["placed_by"]) for r in records] == [
        ("cuMemAlloc_v2", 0, "order"),
        ("cuLaunchKernel", 1000, "order"),
        ("cuLaunchKernel", 2000, "order"),
    ]
    assert [(p.line, p.field, p.skipped) for p in problems] == [(2, "ts", False)]
    assert "bpftrace -l" in problems[0].message


def test_a_program_that_only_prints_is_not_an_error() -> None:
    data = b"Attaching 1 probe...\n" + b"Scheduled!\n" * 3 + b"Hit\na\nb\n"
    assert recognise(data).name == "bpftrace"
    records, problems = read(data)
    assert (records, [problem.skipped for problem in problems]) == ([], [False, False])
    assert problems[1].message.endswith("b'Scheduled!' (3 times), b'Hit', b'a', …")


def test_lines_may_be_wrapped_as_json() -> None:
    printed = [{"type": "printf", "data": text} for text in ("[5] kprobe:", "f\n", "Hit\n")]
    own = [{"type": "attached_probes", "data": {"probes": 1}}, {"type": "lost_events", "data": {"events": 3}}]
    data = "".join(f"{json.dumps(record)}\n" for record in [own[0], *printed, own[1]]).encode()
    assert recognise(data).name == "bpftrace"
    records, problems = read(data)
    assert [record.get("ts_ns", record.get("count")) for record in records] == [5, 3]
    assert [(p.line, p.skipped) for p in problems] == [(4, False)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"kprobe:nv_x\n", "is missing: the line has no place in time"),
        (b"[99999999999999999999] kprobe:nv_x\n", "must be at most 4611686018427387903, not 9999999999999"),
        (b'{"ts":1,"type":"kernel","name":"f"}\n', "is not bpftrace's: --from layered reads it"),
    ],
)
def test_only_the_bad_line_is_lost(line: bytes, message: str) -> None:
    records, problems = read(FIRST + line + LAST)
    assert [record["ts_ns"] for record in records] == [5000, 9000]
    assert [(p.line, p.skipped) for p in problems] == [(2, True)]
    assert message in problems[0].message


def test_a_time_among_lines_without_is_named() -> None:
    many = b"kprobe:f\n" * (bpftrace_probes.HEAD_BYTES // 9 + 1)
    _, problems = read(many + FIRST)
    assert [(p.line, p.field) for p in problems if p.skipped] == [(many.count(b"\n") + 1, "ts")]


def test_a_bare_name_among_times_is_placed_between_them_where_asked() -> None:
    data = b"kprobe:a\n" + FIRST + b"kprobe:b\nkprobe:c\n" + LAST + b"kprobe:d\n"
    records, problems = read_all(bpftrace_probes.read(io.BytesIO(data), between=True))
    assert [record["ts_ns"] for record in records] == [5000, 5000, 6333, 7666, 9000, 9000]
    assert records[2]["args"] == {"placed": "between lines", "probe": "kprobe:b"}
    assert [(p.line, p.skipped) for p in problems] == [(1, False)]


def test_a_line_that_the_input_ends_with_may_not_be_whole() -> None:
    records, problems = read(FIRST + LAST[:-3])
    assert [record["ts_ns"] for record in records] == [5000, 90]
    assert [(p.line, p.skipped) for p in problems] == [(2, False)]


@given(st.lists(st.one_of(st.binary(max_size=40), st.sampled_from([FIRST, LAST, b"kprobe:f", b"Hit", b"{"]))))
def test_no_input_raises(parts: list[bytes]) -> None:
    data = b"\n".join(parts)
    records, problems = read(data)
    assert len(records) + sum(problem.skipped for problem in problems) <= data.count(b"\n") + 1


def test_the_first_line_of_bpftrace_does_not_decide_the_format() -> None:
    head = b"Attaching 3 probes...\n"
    assert not is_known(head + b"Tracing CUDA\n")
    assert recognise(head).name == "bpftrace"
    assert is_known(head + FIRST)


@pytest.mark.parametrize(
    "head", [b"hello\n", b"Hit\n", b"see kprobe:f\n", b'{"type":"printf","data":"Hit\\n"}\n']
)
def test_other_content_is_not_claimed(head: bytes) -> None:
    with pytest.raises(FormatError):
        recognise(head)


@pytest.mark.parametrize(
    "data",
    [
        b"Attaching 2 probes...\n@usecs[cuInit]:\n[1]      2 |@@@@   |\n\n@count[cuInit]: 1\n",
        b'{"type": "map", "data": {"@count": {"cuInit": 3}}}\n',
        b'{"type": "hist", "data": {"@usecs": [{"min": 0, "max": 0, "count": 4}]}}\n',
    ],
)
def test_an_input_with_maps_alone_says_so(data: bytes) -> None:
    source = recognise(data)
    records, problems = read_all(source.read(io.BytesIO(data), "skip"))
    assert (source.name, records) == ("bpftrace", [])
    assert [problem.message[:48] for problem in problems] == [
        "has only maps and histograms that bpftrace print"
    ]


@pytest.mark.parametrize("seed", range(4))
def test_lines_that_are_read_at_once_give_what_each_alone_gives(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = Random(seed)
    odd = (
        b"", b"Lost 3 events", b"[6] kprobe:a b", b"[7]  kprobe:nv_f", b"[8] kprobe:nv_f\r", b"\xff",
        b"[1_0] kprobe:nv_f", b"[99999999999999999999] kprobe:nv_f", b"[000000000000000000007] kprobe:nv_f",
        b"[9] nv_f", b"kprobe:nv_f", b"kprobe:nv_f called at 9", b"[5]", b"kprobe:nv_f [5] kprobe:nv_f",
        b"@: 5", b"(5) kprobe:nv_f",
    )  # fmt: skip
    usual = [b"[%d] %b" % (at, rng.choice((b"kprobe:nv_f", b"uprobe:/lib/a.so:f"))) for at in range(3000)]
    lines = [rng.choice(odd) if rng.random() < 0.005 else line for line in usual]
    monkeypatch.setattr(bpftrace_probes._ProbeLines, "chunk_bytes", rng.choice((1000, 1 << 18)))
    at_once = read(b"\n".join(lines) + b"\n")
    monkeypatch.setattr(bpftrace_probes._ProbeLines, "usual", lambda *_: None)
    assert read(b"\n".join(lines) + b"\n") == at_once
    assert len(at_once[0]) > 2900
