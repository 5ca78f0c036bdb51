"""Captures of real processes: the stand-in for CUDA, run by hand in a terminal would look the same."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.program import PYTHONPATH
from tests.support.standin import needs
from tests.support.waiting import wait_until
from tracepipe.errors import CaptureUnavailable, TracepipeError
from tracepipe.tracer import CaptureRequest, CaptureSummary, capture
from tracepipe.tracer.request import Filters, Limits

ROOT = Path(__file__).parents[2]
Event = dict[str, Any]


pytestmark = [pytest.mark.ebpf, needs("bcc")]


class Trace:
    """A captured file: the records of it, by layer."""

    def __init__(self, text: str) -> None:
        self.records: list[Event] = [json.loads(line) for line in text.splitlines()]
        self.header, self.footer = self.records[0], self.records[-1]
        self.events = [record for record in self.records if "phase" in record]

    def layer(self, name: str) -> list[Event]:
        return [event for event in self.events if event["type"] == name]

    def slices(self, layer: str) -> Iterator[tuple[Event, Event]]:
        """Each begin with its end, matched by nesting on its thread; a begin or end left over is an error.

        But for a switch-in that the kernel did not report: an end without its begin, which states it.
        """
        open_slices: dict[int, list[Event]] = defaultdict(list)
        for event in self.layer(layer):
            if event["phase"] == "B":
                open_slices[event["tid"]].append(event)
            elif event["phase"] == "E":
                if event.get("args", {}).get("began") == "not reported":
                    continue
                begin = open_slices[event["tid"]].pop()
                assert begin["name"] == event["name"]
                assert begin["ts_ns"] <= event["ts_ns"]
                yield begin, event
        assert not any(open_slices.values())


def run(tmp_path: Path, command: list[str], **options: Any) -> tuple[Trace, CaptureSummary, list[str]]:
    """One capture; with the shipped bytecode, which is there at once, unless a method is named."""
    options = {"method": "prebuilt", **options}
    messages: list[str] = []
    path = tmp_path / "run.jsonl"
    with path.open("wb") as sink:
        summary = capture(CaptureRequest(command, **options), sink, notify=messages.append)
    return Trace(path.read_text()), summary, messages


def calls_printed(output: str) -> int:
    return sum(int(line.split()[1]) for line in output.splitlines() if line.startswith("calls: "))


def test_every_call_is_there_with_its_result(
    tmp_path: Path, vec_add: str, capfd: pytest.CaptureFixture[str]
) -> None:
    trace, summary, _ = run(tmp_path, [vec_add, "-n", "1000", "-i", "3"], method="bcc")
    slices = list(trace.slices("userspace"))
    assert len(slices) == calls_printed(capfd.readouterr().out) == 27
    assert Counter(begin["name"] for begin, _ in slices)["cuLaunchKernel"] == 3
    assert {end["args"]["result_name"] for _, end in slices} == {"CUDA_SUCCESS"}
    launch = next(begin for begin, _ in slices if begin["name"] == "cuLaunchKernel")
    assert (launch["args"]["grid"], launch["args"]["block"]) == ([4, 1, 1], [256, 1, 1])
    copy = next(begin for begin, _ in slices if begin["name"] == "cuMemcpyHtoD_v2")
    assert copy["args"]["size_bytes"] == 4000
    assert summary.ended_by == trace.footer["ended_by"] == "exit 0"
    print(f"detached in {summary.detach_ns / 1e6:.1f} ms")


def test_the_file_is_complete_and_in_order(tmp_path: Path, vec_add: str) -> None:
    trace, summary, _ = run(tmp_path, [vec_add, "--threads", "3", "-i", "20"])
    assert trace.header["layers"]["got"] == ["userspace", "syscall", "scheduler"]
    counted = Counter(event["type"] for event in trace.events)
    assert trace.footer["counts"] == dict(counted) == summary.counts
    assert not trace.footer["losses"]
    last: dict[tuple[str, int], int] = {}
    for event in trace.events:
        key = event["type"], event["tid"]
        assert event["ts_ns"] >= last.get(key, 0)
        last[key] = event["ts_ns"]
    times = [event["ts_ns"] for event in trace.events]
    assert trace.header["start"]["monotonic_ns"] < min(times)
    assert max(times) < trace.footer["end"]["monotonic_ns"]


def test_each_driver_call_is_inside_the_call_that_made_it(tmp_path: Path, vec_add: str) -> None:
    trace, _, _ = run(tmp_path, [vec_add, "--threads", "2", "-i", "5"])
    calls = list(trace.slices("userspace"))
    commands = [(begin, end) for begin, end in trace.slices("syscall") if begin["name"] == "ioctl"]
    for begin, end in commands:
        around = [
            enter["name"]
            for enter, leave in calls
            if enter["tid"] == begin["tid"]
            and enter["ts_ns"] <= begin["ts_ns"]
            and end["ts_ns"] <= leave["ts_ns"]
        ]
        assert len(around) == 1, begin
    assert Counter(begin["args"]["request"] for begin, _ in commands)["NV_ESC_CHECK_VERSION_STR"] == 1
    assert {end["args"]["error"] for _, end in commands} == {"ENOTTY"}
    # cuMemAlloc makes two, on each of two threads three times.
    assert Counter(begin["args"]["request"] for begin, _ in commands)["NV_ESC_RM_MAP_MEMORY"] == 6


def test_threads_run_sleep_and_are_woken(tmp_path: Path, vec_add: str) -> None:
    trace, _, _ = run(tmp_path, [vec_add, "-i", "200", "-n", "100000"])
    intervals = [(begin, end) for begin, end in trace.slices("scheduler")]
    assert all(begin["name"] == "running" for begin, _ in intervals)
    assert all(begin["cpu"] == end["cpu"] for begin, end in intervals)
    names = {event["tid"]: event["comm"] for event in trace.events if "comm" in event}
    worker = next(event["tid"] for event in trace.events if event.get("comm") == "standin-gpu")
    assert "vec_add" in names.values()
    # The worker executes what the main thread launches; the main thread sleeps in cuCtxSynchronize meanwhile.
    assert any(begin["tid"] == worker for begin, _ in intervals)
    assert any(end["args"]["prev_state"] == "sleeping" for _, end in intervals)
    wakeups = [event for event in trace.layer("scheduler") if event["name"] == "wakeup"]
    assert any(event["args"]["by_tid"] == worker for event in wakeups)
    last_of_worker = [end for begin, end in intervals if begin["tid"] == worker][-1]
    assert last_of_worker["args"]["prev_state"] == "dead"


def test_what_calls_did_to_memory(tmp_path: Path, vec_add: str) -> None:
    trace, _, _ = run(tmp_path, [vec_add, "-n", "1000"])
    allocated = {
        e["args"]["address"]: e["args"]["size"] for e in trace.layer("memory") if e["name"] == "alloc"
    }
    assert list(allocated.values()) == [4000] * 3
    assert {e["args"]["address"] for e in trace.layer("memory") if e["name"] == "free"} == set(allocated)
    copies = [(event["name"], event["args"]["size"]) for event in trace.layer("transfer")]
    assert copies == [("HtoD", 4000), ("HtoD", 4000), ("DtoH", 4000)]
    launch = next(event for event in trace.events if event["name"] == "cuLaunchKernel")
    assert launch["args"]["kernel"] == "vectorAdd"


def test_children_are_followed(tmp_path: Path, vec_add: str, capfd: pytest.CaptureFixture[str]) -> None:
    trace, _, _ = run(
        tmp_path, ["/bin/sh", "-c", f"{vec_add} --fork -i 2; true"], libraries=(library_of(vec_add),)
    )
    begins = [event for event in trace.layer("userspace") if event["phase"] == "B"]
    assert len(begins) == calls_printed(capfd.readouterr().out)
    assert len({event["pid"] for event in begins}) == 2
    shell = trace.events[0]
    assert shell["comm"] == "sh"
    assert shell["pid"] not in {event["pid"] for event in begins}
    # The shell's child keeps its name until it execs.
    names = [event["comm"] for event in trace.events if event["tid"] == begins[-1]["tid"] and "comm" in event]
    assert names == ["sh", "vec_add"]


def library_of(vec_add: str) -> str:
    return str(Path(vec_add).with_name("libcuda.so.1"))


def test_only_the_layers_asked_for(tmp_path: Path, vec_add: str) -> None:
    trace, summary, _ = run(tmp_path, [vec_add, "--fork"], layers=("userspace",))
    assert set(summary.counts) == {"userspace", "memory", "transfer"}  # what the calls did
    assert trace.header["layers"] == {"asked": ["userspace"], "got": ["userspace"], "missing": {}}


def test_a_program_without_cuda_keeps_its_other_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracepipe.tracer.find.library.LibrarySearch.find", lambda *_: [])
    trace, summary, messages = run(tmp_path, ["true"])
    missing = trace.header["layers"]["missing"]["userspace"]
    assert any(missing in message for message in messages)
    assert summary.counts["syscall"] > 0
    assert "userspace" not in summary.counts


def test_a_missing_driver_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vec_add: str) -> None:
    trace, summary, messages = run(tmp_path, [vec_add], layers=("userspace", "kernel"))
    reason = trace.header["layers"]["missing"]["kernel"]
    assert f"no kernel layer: {reason}" in messages
    assert trace.header["layers"]["got"] == ["userspace"]
    assert "kernel" not in summary.counts


def test_a_crash_is_reported(tmp_path: Path, vec_add: str) -> None:
    trace, summary, _ = run(tmp_path, [vec_add, "--crash"])
    assert trace.footer["ended_by"] == "signal 11 (SIGSEGV)"
    assert summary.exit_code == 139
    assert trace.layer("userspace")[-1]["name"] == "cuLaunchKernel"


def test_an_exit_code_is_reported(tmp_path: Path) -> None:
    _, summary, _ = run(tmp_path, ["sh", "-c", "exit 7"])
    assert (summary.ended_by, summary.exit_code) == ("exit 7", 7)


def test_a_full_ring_counts_what_it_lost(
    tmp_path: Path, vec_add: str, capfd: pytest.CaptureFixture[str]
) -> None:
    trace, summary, _ = run(tmp_path, [vec_add, "--spin", "100000"], ring_bytes=4096)
    losses = [
        record for record in trace.records if record["type"] == "loss" and record.get("layer") == "userspace"
    ]
    made = 2 * calls_printed(capfd.readouterr().out)
    assert sum(loss["count"] for loss in losses) == summary.losses["userspace"] > 0
    assert summary.counts["userspace"] + summary.losses["userspace"] == made
    assert all(loss["dur_ns"] > 0 for loss in losses)


def test_single_probes_where_the_kernel_has_no_multi_link(
    tmp_path: Path, vec_add: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from tracepipe.tracer.bpf import bpf

    def too_old(*_: object) -> int:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(bpf, "link_uprobes", too_old)
    trace, summary, _ = run(tmp_path, [vec_add], layers=("userspace",))
    assert len(list(trace.slices("userspace"))) == calls_printed(capfd.readouterr().out)
    print(f"detached in {summary.detach_ns / 1e6:.1f} ms")


def test_the_shipped_bytecode_records_the_same(
    tmp_path: Path, vec_add: str, capfd: pytest.CaptureFixture[str]
) -> None:
    command = [vec_add, "-i", "3"]
    compiled, by_bcc, _ = run(tmp_path, command, method="bcc", layers=("userspace",))
    shipped, by_us, _ = run(tmp_path, command, method="prebuilt", layers=("userspace",))
    assert by_bcc.engine.split()[0] == "bcc"
    assert by_us.engine.split()[0] == "prebuilt"
    assert [(e["name"], e["phase"]) for e in shipped.events] == [
        (e["name"], e["phase"]) for e in compiled.events
    ]
    assert len(list(shipped.slices("userspace"))) == calls_printed(capfd.readouterr().out) / 2


def test_auto_reports_what_it_took_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, summary, messages = run(tmp_path, ["true"], layers=("syscall",), method="auto")
    assert messages == ["method bcc: compiles its probes here, at full rate"]

    def no_bcc() -> Any:
        raise CaptureUnavailable("BCC is not there.", "apt install python3-bpfcc")

    monkeypatch.setattr("tracepipe.tracer.engines.probes.import_bcc", no_bcc)
    _, summary, messages = run(tmp_path, ["true"], layers=("syscall",), method="auto")
    assert summary.engine.startswith("prebuilt ")
    assert messages == ["method prebuilt: no bcc: BCC is not there."]


@pytest.fixture
def running(vec_add: str) -> Iterator[subprocess.Popen[str]]:
    """A process of a name of its own that calls, computes and waits until it is ended."""
    program = renamed(vec_add, f"tp-{os.getpid()}")
    command = [program, "-i", "100000000", "-n", "100000", "--threads", "2"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "stand-in" in process.stderr.readline()
        yield process
        process.kill()


def renamed(program: str, name: str) -> str:
    """A copy beside the program, which finds its library there."""
    return shutil.copy(program, Path(program).with_name(name))


FOR_A_WHILE = Limits(duration_ns=300_000_000)


def test_a_running_process_with_all_its_threads(
    tmp_path: Path, vec_add: str, running: subprocess.Popen[str]
) -> None:
    trace, summary, _ = run(
        tmp_path, [], pids=(running.pid,), libraries=(library_of(vec_add),), limits=FOR_A_WHILE
    )
    tids = {int(name) for name in os.listdir(f"/proc/{running.pid}/task")}
    assert summary.ended_by == "duration"
    assert running.poll() is None
    assert {event["pid"] for event in trace.events} == {running.pid}
    assert {event["tid"] for event in trace.events} == tids
    assert {event.get("comm") for event in trace.events} >= {f"tp-{os.getpid()}", "standin-gpu"}
    launches = [begin for begin, _ in closed(trace, "userspace") if begin["name"] == "cuLaunchKernel"]
    assert len(launches) > 10
    # What it was in when recording began begins there, and is not an end without a begin.
    for layer in ("userspace", "syscall"):
        closed(trace, layer)


def closed(trace: Trace, layer: str) -> list[tuple[Event, Event]]:
    """Slices of a recording that ended in their middle: begins may be left over, ends may not."""
    open_slices: dict[int, list[Event]] = defaultdict(list)
    slices = []
    for event in trace.layer(layer):
        if event["phase"] == "B":
            open_slices[event["tid"]].append(event)
        elif event["phase"] == "E":
            begin = open_slices[event["tid"]].pop()
            assert begin["name"] == event["name"]
            slices.append((begin, event))
    return slices


def test_the_recording_of_a_process_ends_with_it(tmp_path: Path, running: subprocess.Popen[str]) -> None:
    process = start_capture(tmp_path, [], f"pids=({running.pid},), layers=('syscall',)")
    recording = tmp_path / "run.jsonl"
    wait_until(lambda: recording.exists() and recording.read_bytes().count(b"\n") > 1)  # an event
    running.kill()
    output, _ = process.communicate(timeout=30)
    assert output.splitlines()[-1] == "the processes ended"


def test_processes_by_name(tmp_path: Path, vec_add: str, running: subprocess.Popen[str]) -> None:
    trace, _, _ = run(tmp_path, [], comm=f"tp-{os.getpid()}", layers=("scheduler",), limits=FOR_A_WHILE)
    assert {event["pid"] for event in trace.events} == {running.pid}


@pytest.mark.parametrize(
    "name", [b"a\xffb", b"line\nend\r\n", b"fourteen bytes\xe2\x82\xac", b"\x1b[31m\"'\\"]
)
def test_processes_by_a_name_of_any_bytes(tmp_path: Path, name: bytes) -> None:
    script = "open('/proc/self/comm', 'wb').write(eval(input())); print(flush=True)"
    script = f"import time; {script}\nwhile True: time.sleep(1e-3)"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        print(repr(name), file=process.stdin, flush=True)
        process.stdout.readline()
        trace, _, _ = run(tmp_path, [], comm=os.fsdecode(name), layers=("syscall",), limits=FOR_A_WHILE)
        process.kill()
    names = {event.get("comm") for event in trace.events if event["pid"] == process.pid}
    assert names - {None} == {name[:15].decode(errors="replace")}


def test_a_process_of_that_name_that_comes_later(tmp_path: Path, vec_add: str) -> None:
    program = renamed(vec_add, f"later-{os.getpid()}")
    options = f"comm='later-{os.getpid()}', layers=('syscall',), limits=Limits(events=50)"
    process = start_capture(tmp_path, [], options)
    assert process.stdout is not None
    # It is run again and again, as the moment from which on it is seen cannot be seen from here.
    runs = []
    while process.poll() is None:
        with subprocess.Popen([program], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as started:
            runs.append(started.pid)
    trace = Trace((tmp_path / "run.jsonl").read_text())
    assert trace.footer["ended_by"] == "number of events"
    assert {event["pid"] for event in trace.events} <= set(runs)
    assert len(trace.events) == 50


def test_the_whole_system(tmp_path: Path, running: subprocess.Popen[str]) -> None:
    trace, _, _ = run(tmp_path, [], system=True, limits=FOR_A_WHILE)
    pids = {event["pid"] for event in trace.events}
    assert running.pid in pids
    assert len(pids) > 1
    assert os.getpid() not in pids


def test_a_thread_that_executes_another_program_has_its_processs_id_then(tmp_path: Path) -> None:
    script = "import os, threading; threading.Thread(target=os.execv, args=('/bin/true', ['true'])).start()"
    trace, _, _ = run(
        tmp_path, [sys.executable, "-c", f"{script}; threading.Event().wait()"], layers=("scheduler",)
    )
    slices = list(trace.slices("scheduler"))  # every one is closed
    (process,) = {event["pid"] for event in trace.events}
    (thread,) = {event["tid"] for event in trace.events} - {process}
    left = [end["args"]["prev_state"] for begin, end in slices if begin["tid"] == thread]
    assert left[-1] == "dead"
    assert max(end["ts_ns"] for _, end in slices) == max(
        end["ts_ns"] for begin, end in slices if begin["tid"] == process
    )


def test_children_are_left_out(tmp_path: Path, vec_add: str, capfd: pytest.CaptureFixture[str]) -> None:
    trace, _, _ = run(tmp_path, [vec_add, "--fork", "-i", "2"], children=False)
    assert len({event["pid"] for event in trace.events}) == 1
    assert 0 < len(list(trace.slices("userspace"))) < calls_printed(capfd.readouterr().out)


DAEMON = """
import os, sys
began, begun = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open("/proc/self/comm", "wb").write(b"dae\\xffmon")
        os.write(begun, b"x")
        open(sys.argv[1]).read()  # until somebody opens the other end
    os._exit(0)
os.wait()
os.read(began, 1)
os._exit(3)
"""


@pytest.mark.parametrize("ends", ["command", "interrupt", "duration", "daemon"])
def test_a_daemon_that_outlives_the_command_is_named_or_waited_for(
    tmp_path: Path, ends: str, method: str = "prebuilt"
) -> None:
    fifo, said, released = tmp_path / "fifo", list[str](), list[bool]()
    os.mkfifo(fifo)

    def release() -> None:
        if not released:
            os.close(os.open(fifo, os.O_WRONLY))
            released.append(True)

    def notify(message: str) -> None:
        said.append(message)
        if "waiting for" in message and ends == "daemon":
            release()
        elif "waiting for" in message and ends == "interrupt":
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    request = CaptureRequest(
        [sys.executable, "-c", DAEMON, str(fifo)],
        ("syscall",),
        method=method,
        wait_children=ends != "command",
        limits=Limits(duration_ns=10**9 if ends == "duration" else None),
    )
    with (tmp_path / "run.jsonl").open("w+b") as sink:
        summary = capture(request, sink, notify=notify)
        sink.seek(0)
        trace = Trace(sink.read().decode())
    release()
    assert summary.exit_code == 3
    assert summary.ended_by == {"command": "exit 3", "daemon": "exit 3"}.get(ends, ends)
    assert any("waiting for 1 process" in message for message in said) == (ends != "command")
    left = [message for message in said if "still run" in message]
    if ends == "daemon":
        assert not left and not summary.running and "running" not in trace.footer
        (pid,) = {event["pid"] for event in trace.events if event.get("comm") == "dae\ufffdmon"}
        assert trace.events[-1]["pid"] == pid
    else:
        (pid,) = summary.running
        assert summary.running == {pid: "dae\ufffdmon"} == trace.footer["running_processes"]
        assert trace.footer["running"] == 1
        assert len(left) == 1 and f": dae\ufffdmon ({pid})" in left[0]
        assert ("--wait-children" in left[0]) == (ends == "command")


def test_short_calls_are_left_out_and_counted(
    tmp_path: Path, vec_add: str, capfd: pytest.CaptureFixture[str]
) -> None:
    filters = Filters(min_duration_ns=50_000)
    trace, summary, _ = run(tmp_path, [vec_add, "-i", "50", "-n", "100000"], filters=filters)
    made = 2 * calls_printed(capfd.readouterr().out)
    assert summary.counts["userspace"] + summary.filtered["userspace"] == made
    assert trace.footer["filtered"] == summary.filtered
    kept_whole = {"cuMemAlloc_v2", "cuMemFree_v2", "cuModuleGetFunction"}
    for layer in ("userspace", "syscall"):
        for begin, end in trace.slices(layer):
            assert end["ts_ns"] - begin["ts_ns"] >= 50_000 or begin["name"] in kept_whole
    assert any(begin["name"] == "cuCtxSynchronize" for begin, _ in trace.slices("userspace"))
    times = [event["ts_ns"] for event in trace.events if event["phase"] != "X"]
    assert times == sorted(times)


def test_one_call_in_some(tmp_path: Path, vec_add: str, capfd: pytest.CaptureFixture[str]) -> None:
    trace, summary, _ = run(
        tmp_path, [vec_add, "-i", "100"], layers=("userspace",), filters=Filters(sample=10)
    )
    made = 2 * calls_printed(capfd.readouterr().out)
    assert summary.counts["userspace"] + summary.filtered["userspace"] == made
    launches = [begin for begin, _ in trace.slices("userspace") if begin["name"] == "cuLaunchKernel"]
    # One in ten of those on each processor, the first one of each included.
    assert 10 <= len(launches) <= 10 + (os.cpu_count() or 1)
    assert any(begin["name"] == "cuInit" for begin, _ in trace.slices("userspace"))


def test_a_command_continues_after_the_recording(tmp_path: Path, vec_add: str) -> None:
    command = ["sh", "-c", f"{vec_add} -i 10; echo started; sleep 0.5; exit 3"]
    trace, summary, messages = run(
        tmp_path, command, layers=("syscall",), limits=Limits(duration_ns=100_000_000)
    )
    assert (summary.ended_by, summary.exit_code) == ("duration", 3)
    assert any("continues" in message for message in messages)
    assert summary.wall_ns >= 100_000_000
    assert trace.footer["ended_by"] == "duration"


def test_a_recording_ends_at_its_size(tmp_path: Path, vec_add: str) -> None:
    limits = Limits(size_bytes=1_000_000)
    trace, _, _ = run(tmp_path, [vec_add, "--spin", "300000"], layers=("userspace",), limits=limits)
    lines = sum(len(line) for line in (tmp_path / "run.jsonl").read_bytes().splitlines(keepends=True)[1:-1])
    assert 999_000 < lines <= 1_000_000
    assert sum(trace.footer["counts"].values()) == len(trace.events)


def test_a_recording_ends_at_its_number_of_events(tmp_path: Path, vec_add: str) -> None:
    trace, summary, _ = run(tmp_path, [vec_add, "--spin", "300000"], limits=Limits(events=12345))
    assert len(trace.events) == sum(summary.counts.values()) == 12345


def test_in_a_pid_namespace_of_its_own(tmp_path: Path, vec_add: str) -> None:
    output = tmp_path / "run.jsonl"
    subprocess.run(
        [
            "unshare",
            "--pid",
            "--fork",
            "--mount-proc",
            sys.executable,
            "-c",
            CAPTURE,
            str(output),
            "",
            vec_add,
        ],
        check=True,
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    )
    trace = Trace(output.read_text())
    assert len(list(trace.slices("userspace"))) > 10
    # Process 1 of the namespace is the capture; the command is its first child.
    assert {event["pid"] for event in trace.events} == {2}
    assert min(event["tid"] for event in trace.events) == 2
    assert all(event["args"]["by_tid"] < 20 for event in trace.events if event["name"] == "wakeup")


@pytest.mark.parametrize("layer", ["syscall", "userspace"])  # of the latter it has no events
def test_children_that_are_waited_for_in_a_pid_namespace(layer: str, tmp_path: Path) -> None:
    options, end = f"wait_children=True, layers={(layer,)}", tmp_path / "end"
    os.mkfifo(end)
    capturing = [sys.executable, "-c", CAPTURE, str(tmp_path / "run.jsonl"), options]
    with subprocess.Popen(
        ["unshare", "--pid", "--fork", "--mount-proc", *capturing, "sh", "-c", f"setsid cat {end} &"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    ) as process:
        assert process.stdout is not None
        for printed in process.stdout:
            if printed.startswith("sh ended; waiting for 1 process that was started: "):
                break
        end.write_bytes(b"")
        output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (0, "exit 0\n")
    assert "running" not in Trace((tmp_path / "run.jsonl").read_text()).footer


def test_running_processes_in_a_pid_namespace(tmp_path: Path, vec_add: str) -> None:
    output = tmp_path / "run.jsonl"
    script = f"""
{vec_add} -i 100000000 >/dev/null 2>&1 &
{sys.executable} -c '{CAPTURE}' {output} "pids=($!,), limits=Limits(duration_ns=200_000_000)"
kill $!
"""
    subprocess.run(
        ["unshare", "--pid", "--fork", "--mount-proc", "bash", "-c", script],
        check=True,
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    )
    trace = Trace(output.read_text())
    assert {event["pid"] for event in trace.events} == {2}
    assert {event.get("comm") for event in trace.events} >= {"vec_add", "standin-gpu"}
    assert closed(trace, "syscall")


CAPTURE = """
import sys
from tracepipe.tracer import CaptureRequest, capture
from tracepipe.tracer.request import Limits
options = {"method": "prebuilt", **eval("dict(" + sys.argv[2] + ")")}
def say(text):
    print(text, flush=True)
with open(sys.argv[1], "wb") as sink:
    print(capture(CaptureRequest(sys.argv[3:], **options), sink, notify=say).ended_by, flush=True)
"""


def start_capture(tmp_path: Path, command: list[str], options: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CAPTURE, str(tmp_path / "run.jsonl"), options, *command],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    )


def wait_for_line(process: subprocess.Popen[str], wanted: str) -> None:
    assert process.stdout is not None
    while (line := process.stdout.readline()) != wanted:
        assert line


@pytest.mark.usefixtures("hangup")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_keeps_what_was_recorded(tmp_path: Path, number: signal.Signals) -> None:
    process = start_capture(tmp_path, ["sh", "-c", "echo started; exec sleep 60"])
    assert process.stdout is not None
    wait_for_line(process, "started\n")
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (0, "interrupt\n")
    trace = Trace((tmp_path / "run.jsonl").read_text())
    assert trace.footer["ended_by"] == "interrupt"
    assert trace.footer["counts"] == dict(Counter(event["type"] for event in trace.events))


def test_a_target_that_ignores_the_interrupt_is_killed(tmp_path: Path) -> None:
    process = start_capture(tmp_path, ["sh", "-c", "trap '' INT; echo started; while :; do sleep 60; done"])
    assert process.stdout is not None
    wait_for_line(process, "started\n")
    process.send_signal(signal.SIGINT)
    # The shell's sleep outlives it and holds the pipe: do not wait for the end of the output.
    left = "the recording ended while 1 process that was started still runs: sleep "
    assert process.stdout.readline().startswith(left)
    assert process.stdout.readline() == "interrupt\n"
    assert process.wait(timeout=30) == 0


@pytest.mark.parametrize("command", ["./no-such-program", "no-such-program", "/etc/passwd", "/tmp"])
def test_a_target_that_cannot_be_run_is_an_error(tmp_path: Path, command: str) -> None:
    notified: list[str] = []
    with pytest.raises(TracepipeError) as caught, (tmp_path / "run.jsonl").open("wb") as sink:
        capture(CaptureRequest([command]), sink, notify=notified.append)
    assert command in caught.value.message
    assert caught.value.hint
    assert (tmp_path / "run.jsonl").read_bytes() == b""
    assert notified == []


def test_an_exec_that_fails_is_an_error(tmp_path: Path) -> None:
    program = tmp_path / "not-a-program"
    program.write_bytes(b"\x7fELF, it says")
    program.chmod(0o755)
    with pytest.raises(TracepipeError, match="Exec format error"):
        run(tmp_path, [str(program)])
    assert (tmp_path / "run.jsonl").read_bytes() == b""


def test_under_sudo_the_target_is_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SUDO_UID", "65534")
    monkeypatch.setenv("SUDO_GID", "65534")
    for name, value in {"HOME": "/root", "USER": "root", "LOGNAME": "kept"}.items():
        monkeypatch.setenv(name, value)
    run(tmp_path, ["sh", "-c", "id; echo $HOME $USER $LOGNAME"])
    who, names = capfd.readouterr().out.splitlines()
    assert who.startswith("uid=65534(nobody) gid=65534(nogroup)")
    assert names == "/nonexistent nobody kept"
