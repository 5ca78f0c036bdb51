"""Captures with bpftrace: the same events as by the other method, and every lost one counted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_capture import (
    Trace,
    calls_printed,
    library_of,
    run,
)
from tests.integration.test_capture import (
    test_a_daemon_that_outlives_the_command_is_named_or_waited_for as follow_a_daemon,
)
from tests.support import held_reader
from tests.support.program import PYTHONPATH
from tests.support.standin import needs
from tests.support.waiting import wait_until
from tracepipe.tracer.request import Filters, Limits

ROOT = Path(__file__).parents[2]
# Few functions: the kernel needs 0.1 s a probe to detach bpftrace's, and attaches none meanwhile.
ONLY = ("cuMem*", "cuLaunchKernel", "cuModuleGetFunction", "cuCtxSynchronize")
Picture = dict[str, dict[int, list[tuple[str, ...]]]]


pytestmark = [pytest.mark.ebpf, needs("bpftrace")]


def by_bpftrace(tmp_path: Path, command: list[str], **options: Any) -> Any:
    return run(tmp_path, command, **{"method": "bpftrace", "only": ONLY, **options})


def test_a_daemon_is_waited_for(tmp_path: Path) -> None:
    follow_a_daemon(tmp_path, "daemon", method="bpftrace")


LAST_CPU = (os.cpu_count() or 1) - 1


def picture(trace: Trace) -> Picture:
    """What each thread did, layer by layer: names, phases and arguments; addresses and ids are left open."""
    ranks: dict[int, int] = {}
    seen: Picture = defaultdict(lambda: defaultdict(list))
    for event in trace.events:
        ranks.setdefault(event["tid"], len(ranks))
    names = {event["tid"]: event["comm"] for event in trace.events if "comm" in event}
    for event in trace.events:
        if event["type"] == "scheduler" or event["name"] in ("futex", "mmap", "munmap"):
            continue  # how often a thread waits, and maps memory for it, is a matter of timing
        arguments = {name: shown(value) for name, value in event.get("args", {}).items()}
        thread = ranks[event["tid"]]
        what = (event["name"], event["phase"], names.get(event["tid"], ""), json.dumps(arguments))
        seen[event["type"]][thread].append(what)
    return {layer: dict(threads) for layer, threads in seen.items()}


def shown(value: object) -> object:
    return "large" if isinstance(value, int) and value > 1 << 26 else value


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"filters": Filters(sample=3)},
        {"filters": Filters(min_duration_ns=1)},
        {"hooks": ("uprobe:libcuda.so.1:cuMemcpy*(_, _, size_bytes: u64) -> CUresult if size_bytes > 4000",)},
        {
            "layers": ("userspace",),
            "hooks": ("tracepoint:task:task_rename(pid, oom_score_adj, newcomm)",),
            "children": False,
        },
    ],
    ids=["plain", "sample", "duration", "condition", "tracepoint"],
)
def test_both_methods_record_the_same(tmp_path: Path, vec_add: str, options: dict[str, Any]) -> None:
    # On one processor: which calls a sample has depends on where they run.
    command = ["taskset", "-c", "0", vec_add, "-n", "1000", "-i", "4"]
    one, first, _ = by_bpftrace(tmp_path, command, **options)
    other, second, _ = by_bpftrace(tmp_path, command, **options, method="prebuilt")
    assert picture(one) == picture(other)
    assert picture(one)["userspace"]
    assert first.filtered.get("userspace") == second.filtered.get("userspace")
    assert one.header["layers"] == other.header["layers"]
    assert not first.losses | second.losses


def test_lines_of_all_processors_are_in_order(
    tmp_path: Path, vec_add: str, capfd: pytest.CaptureFixture[str]
) -> None:
    one, other = (f"taskset -c {cpu} {vec_add} --threads 2 -i 50 -n 1000" for cpu in (0, LAST_CPU))
    trace, summary, _ = by_bpftrace(
        tmp_path, ["sh", "-c", f"{one} & {other}; wait"], libraries=(library_of(vec_add),)
    )
    # What a call did to memory is written when it returns, with the time at which it began.
    events = [event for event in trace.events if event["type"] not in ("memory", "transfer")]
    assert {event["cpu"] for event in events} >= {0, LAST_CPU}
    times = [event["ts_ns"] for event in events]
    assert times == sorted(times)
    assert trace.header["start"]["monotonic_ns"] < times[0]
    assert times[-1] < trace.footer["end"]["monotonic_ns"]
    # Every begin has its end.
    slices = [begin["name"] for begin, _ in trace.slices("userspace")]
    assert Counter(slices)["cuLaunchKernel"] == 200
    assert summary.counts == dict(Counter(event["type"] for event in trace.events))
    assert len(slices) < calls_printed(capfd.readouterr().out)


def test_switches_and_calls_nest(tmp_path: Path, vec_add: str) -> None:
    trace, _, _ = by_bpftrace(tmp_path, [vec_add, "-i", "50"])
    running = list(trace.slices("scheduler"))
    assert all(begin["cpu"] == end["cpu"] for begin, end in running)
    assert {event["name"] for event in trace.layer("scheduler")} >= {"running", "wakeup"}
    calls = list(trace.slices("userspace"))
    for begin, end in trace.slices("syscall"):
        if begin["name"] == "ioctl":
            around = [
                call
                for call, leave in calls
                if call["tid"] == begin["tid"]
                and call["ts_ns"] < begin["ts_ns"] < end["ts_ns"] < leave["ts_ns"]
            ]
            assert len(around) <= 1


def test_full_buffers_count_what_they_lost(
    tmp_path: Path, vec_add: str, capfd: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, held_reader.__file__, vec_add, "--spin", "100000"]
    options = {"ring_bytes": 4096, "only": ("cuCtxGetCurrent",), "libraries": (library_of(vec_add),)}
    trace, summary, _ = by_bpftrace(tmp_path, command, layers=("userspace",), **options)
    assert "ok" in capfd.readouterr().out
    losses = [record for record in trace.records if record["type"] == "loss"]
    assert sum(loss["count"] for loss in losses) == summary.losses["userspace"] > 0
    assert summary.counts["userspace"] + summary.losses["userspace"] == 2 * 100_000
    first = trace.events[0]["ts_ns"]
    assert all(first <= loss["ts_ns"] and loss["dur_ns"] > 0 for loss in losses)


@pytest.mark.alone  # among all processes of the system, another test's bpftrace would be one
def test_a_running_process_and_its_name(tmp_path: Path) -> None:
    code = "import time\nprint('ready', flush=True)\nwhile True: time.sleep(0.001)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        name = Path(f"/proc/{process.pid}/comm").read_text().strip()
        limits, layers = Limits(duration_ns=200_000_000), ("syscall", "scheduler")
        trace, summary, _ = by_bpftrace(tmp_path, [], pids=(process.pid,), limits=limits, layers=layers)
        system, _, _ = by_bpftrace(tmp_path, [], system=True, limits=limits, layers=layers)
        process.kill()
    assert summary.ended_by == "duration"
    assert {event["pid"] for event in trace.events} == {process.pid}
    # Told with its first event; another processor's may be as early.
    assert [event["comm"] for event in trace.events[:3] if "comm" in event] == [name]
    # The recording can end in the middle of one.
    assert sum(event["phase"] == "E" for event in trace.layer("scheduler")) > 5
    pids = {event["pid"] for event in system.events}
    assert process.pid in pids
    assert os.getpid() not in pids
    # bpftrace itself is never among them: each line would make another. One that an earlier test killed, and
    # that the kernel still takes down, makes no system calls.
    tracers = {event["pid"] for event in system.events if event.get("comm") == "bpftrace"}
    assert not tracers & {event["pid"] for event in system.layer("syscall")}


def test_texts_with_anything_in_them(tmp_path: Path) -> None:
    """A hook on a program's own function; its texts end lines, are no UTF-8, and are too long."""
    texts = [b"plain", b"two\nlines", b"\xff\xfe \x1f", b"", b"x" * 124, b"y" * 125, b"z" * 300]
    code = ",".join('"' + "".join(f'\\x{byte:02x}""' for byte in text) + '"' for text in texts)
    source = tmp_path / "texts.c"
    source.write_text(
        f"const char *texts[] = {{{code}}};\n"
        "__attribute__((noinline)) "
        "int say(int a, int b, int c, int d, int e, int f, int g, const char *text)\n"
        '{ __asm__ volatile("" ::: "memory"); return a + g + text[0]; }\n'
        # A program of the kernel reads no page that is not in memory yet: touch them.
        f"int main(void) {{ for (volatile int i = 0, n; i < {len(texts)}; i++) n = texts[i][0];\n"
        f"for (int i = 0; i < {len(texts)}; i++) say(i, 0, 0, 0, 0, 0, -i, texts[i]); }}\n"
    )
    program = tmp_path / "it's a program"
    subprocess.run(["gcc", "-O1", "-o", program, source], check=True)
    hook = f"uprobe:{program}:say(number: i32, _, _, _, _, _, last: i32, said: str) -> i32"
    options = {"layers": ("userspace",), "hooks": (hook,), "only": ("say",)}
    trace, _, _ = by_bpftrace(tmp_path, [str(program)], **options)
    arguments = [begin["args"] for begin, _ in trace.slices("hook")]
    assert [args.get("said", "") for args in arguments] == [
        text[:248].decode(errors="replace") for text in texts
    ]
    assert [(args["number"], args["last"]) for args in arguments] == [(n, -n) for n in range(len(texts))]
    other, _, _ = by_bpftrace(tmp_path, [str(program)], **options, method="prebuilt")
    assert [begin["args"] for begin, _ in other.slices("hook")] == arguments


CAPTURE = """
import sys
from tracepipe.tracer import CaptureRequest, capture
with open(sys.argv[1], "wb") as sink:
    request = CaptureRequest(sys.argv[2:], method="bpftrace", layers=("syscall",))
    print(capture(request, sink, notify=print).ended_by, flush=True)
"""


def start_capture(tmp_path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            CAPTURE,
            str(tmp_path / "run.jsonl"),
            "sh",
            "-c",
            "echo started; exec sleep 60",
        ],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    )
    assert process.stdout is not None
    # A slow attachment is reported before.
    while (line := process.stdout.readline()) != "started\n":
        assert "attaching" in line
    return process


def test_an_interrupt_keeps_what_was_recorded(tmp_path: Path) -> None:
    process = start_capture(tmp_path)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (0, "interrupt\n")
    trace = Trace((tmp_path / "run.jsonl").read_text())
    assert trace.footer["counts"] == dict(Counter(event["type"] for event in trace.events))
    assert trace.footer["losses"] == {}


def children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [child for child in map(int, text.split()) if name_of(child) == "bpftrace"]


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def test_bpftrace_does_not_outlive_a_killed_capture(tmp_path: Path) -> None:
    process = start_capture(tmp_path)
    (engine,) = children_of(process.pid)
    assert os.sched_getscheduler(engine) == os.SCHED_BATCH
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()
    wait_until(lambda: name_of(engine) != "bpftrace")


def test_a_killed_bpftrace_is_reported(tmp_path: Path) -> None:
    process = start_capture(tmp_path)
    (engine,) = children_of(process.pid)
    os.kill(engine, signal.SIGKILL)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert output.splitlines()[-1] == "interrupt"
    losses = [r for r in Trace((tmp_path / "run.jsonl").read_text()).records if r["type"] == "loss"]
    assert "bpftrace ended" in losses[-1]["reason"]


def test_a_function_that_cannot_be_probed_leaves_the_others(tmp_path: Path) -> None:
    """The kernel refuses a probe on a locked instruction in a file that is mapped."""
    source = tmp_path / "locked.c"
    source.write_text(
        '__asm__(".globl locked\\n.type locked,@function\\n'
        'locked: .byte 0xf0,0xff,0x00\\nret\\n.size locked,.-locked");\n'
        "#include <unistd.h>\n__attribute__((noinline)) int plain(void)"
        '{ __asm__ volatile("" ::: "memory"); return 1; }\n'
        "int main(int n, char **v) { (void)v; plain(); if (n > 1) { write(1, v[1], 1); pause(); } }\n"
    )
    program = tmp_path / "locked"
    subprocess.run(["gcc", "-O1", "-w", "-o", program, source], check=True)
    with subprocess.Popen([str(program), "x"], stdout=subprocess.PIPE) as mapped:
        assert mapped.stdout is not None
        mapped.stdout.read(1)
        hooks = (f"uprobe:{program}:locked()", f"uprobe:{program}:plain() -> i32")
        options = {"layers": ("userspace",), "hooks": hooks, "only": ("locked", "plain")}
        trace, _, messages = by_bpftrace(tmp_path, [str(program)], **options)
        mapped.kill()
    assert [begin["name"] for begin, _ in trace.slices("hook")] == ["plain"]
    assert any("locked" in message for message in messages)
