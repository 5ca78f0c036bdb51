"""The stacks of real processes, against what the processes say of themselves at the same moment."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.compiled import compiled
from tests.support.planted_causes import CAUSES
from tests.support.program import PYTHONPATH
from tests.support.pythons import VERSIONS, interpreter
from tests.support.standin import needs
from tracepipe.errors import CaptureUnavailable
from tracepipe.tracer import CaptureRequest, capture
from tracepipe.tracer.bpf import bpf
from tracepipe.tracer.find.elf import Elf
from tracepipe.tracer.request import Limits

pytestmark = [pytest.mark.ebpf, needs("bcc")]

Frames = list[dict[str, Any]]

# Each stack is printed on the line in which the thread then sleeps.
NESTED = """
import asyncio, json, threading, time, traceback
lock, printed = threading.Lock(), []

def here():
    frames = [[one.filename, one.lineno, one.name] for one in reversed(traceback.extract_stack()[:-1])]
    with lock:
        printed.append(frames)

def nested(depth):
    if depth:
        nested(depth - 1)
    else:
        here(), time.sleep(0.003)

def generator():
    for _ in range(2):
        here(), time.sleep(0.003)
        yield

class Model:
    def forward(self):
        (lambda: (here(), time.sleep(0.003)))()
        return [(here(), time.sleep(0.003)) for _ in range(2)]

async def waits():
    here(), time.sleep(0.003)
    await asyncio.sleep(0)
    here(), time.sleep(0.003)

def work():
    nested(0), nested(60), list(generator()), Model().forward(), asyncio.run(waits())

threads = [threading.Thread(target=work) for _ in range(3)]
for one in threads:
    one.start()
work()
for one in threads:
    one.join()
print(json.dumps(printed), flush=True)
time.sleep(0.3)  # code that was not read when a process ends is not known
"""

SPINNING = """
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
volatile unsigned long kept;
__attribute__((noinline)) void inner(void) { for (int i = 0; i < 1000; i++) kept += i; }
__attribute__((noinline)) void outer(double s) {
    struct timespec a, b;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &a);
    do { for (int i = 0; i < 1000; i++) inner(); clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &b); }
    while (b.tv_sec - a.tv_sec + (b.tv_nsec - a.tv_nsec) / 1e9 < s);
    kept++;
}
int main(int count, char **words) { outer(atof(words[1])); kept++; return 0; }
"""

# Machine code without a file, as a just-in-time compiler makes it: it counts down a number.
GENERATED = """
#include <string.h>
#include <sys/mman.h>
int main(void) {
    static const unsigned char code[] = {0x48, 0xff, 0xcf, 0x75, 0xfb, 0xc3};  /* dec rdi; jnz; ret */
    void *at = mmap(0, 4096, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memcpy(at, code, sizeof code);
    ((void (*)(unsigned long))at)(800000000);
    return 0;
}
"""

# It plays the GPU: a kernel runs for 3 ms after each launch, whatever the program does then. It writes these
# events, and how long each cause lasted while no kernel ran.
PLANTED = (
    f"""
import gc, json, multiprocessing, os, sys, threading, time
{CAUSES}"""
    + """
launches, ends = [], [0]

def launch():
    begun = now()
    start = max(now(), ends[0])
    ends[0] = start + 3_000_000
    launches.append((begun, start, ends[0]))

def collects():
    repeat(14, gc.collect)

def waits():
    asked.put(1), given.get()

def worker(asked, given):
    while (one := asked.get()) is not None:
        time.sleep(0.015), given.put(one)

asked, given = multiprocessing.Queue(), multiprocessing.Queue()
child = multiprocessing.Process(target=worker, args=(asked, given))
child.start(), threading.Thread(target=holder).start()
waits()
causes = []
for _ in range(15):
    for cause in (parses, sleeps, locks, collects, waits, computes):
        launch()
        begun = now()
        cause()
        causes.append((cause.__name__, begun, now()))
launch()
running = False
go.set(), asked.put(None), child.join()
pid, tid = os.getpid(), threading.get_native_id()
with open(sys.argv[1], "w") as out:
    for number, (begun, start, end) in enumerate(launches, 1):
        of = {"pid": pid, "launch": number, "phase": "X"}
        call = {"type": "userspace", "name": "cuLaunchKernel", "ts_ns": begun, "dur_ns": 100, "tid": tid}
        kernel = {"type": "gpu_kernel", "name": "k", "ts_ns": start, "dur_ns": end - start, "gpu": 0}
        out.write(json.dumps(call | of) + "\\n" + json.dumps(kernel | of) + "\\n")
idle = [(a[2], b[1]) for a, b in zip(launches, launches[1:]) if b[1] > a[2]]
sums = {}
for name, begun, ended in causes:
    for start, end in idle:
        sums[name] = sums.get(name, 0) + max(0, min(ended, end) - max(begun, start))
print(json.dumps({"idle_ns": sum(end - start for start, end in idle), "causes": sums}))
"""
)


def refuse(_: str) -> None:
    """What `choose` does without root."""
    raise CaptureUnavailable("Capture with eBPF needs root.", "sudo")


def recorded(tmp_path: Path, command: list[str], **options: Any) -> list[dict[str, Any]]:
    """The records of a command, whose standard output is in the file `out`."""
    path = tmp_path / "run.jsonl"
    with path.open("wb") as sink, (tmp_path / "out").open("wb") as out:
        request = CaptureRequest(
            command, layers=("host_sample",), method="prebuilt", stdout=out.fileno(), **options
        )
        capture(request, sink, notify=lambda _: None)
    return [json.loads(line) for line in path.read_text().splitlines()]


def stacks_of(records: list[dict[str, Any]], name: str) -> list[Frames]:
    """The frames of the stacks of all events of a name that have one."""
    frames = {record["id"]: record["frames"] for record in records if record["type"] == "stack"}
    events = (one for one in records if one["type"] == "host_sample" and one["name"] == name)
    return [frames[one["stack"]] for one in events if "stack" in one]


def python_of(frames: Frames) -> list[list[Any]]:
    """The frames of Python, as `traceback` has them: names without their classes."""
    return [[one["file"], one["line"], one["function"].rpartition(".")[2]] for one in frames if "line" in one]


def test_stacks_are_those_of_traceback(tmp_path: Path) -> None:
    script = tmp_path / "nested.py"
    script.write_text(NESTED)
    records = recorded(tmp_path, [sys.executable, str(script)])
    printed = json.loads((tmp_path / "out").read_text())
    found = {json.dumps(python_of(frames)) for frames in stacks_of(records, "off-CPU")}
    missing = [frames for frames in printed if json.dumps(frames) not in found]
    assert len(printed) == 4 * 9
    assert not missing
    sleeping = [frames for frames in stacks_of(records, "off-CPU") if python_of(frames) in printed]
    # The innermost native function is that which waits, for the time or for the interpreter's lock.
    names = [frames[0]["function"] for frames in sleeping]
    assert sum("nanosleep" in name or "select" in name for name in names) >= 20


def test_native_stacks_by_frame_pointers_are_those_of_perf(tmp_path: Path) -> None:
    (tmp_path / "spinning.c").write_text(SPINNING)
    flags = ["gcc", "-O0"]
    program = compiled([*flags, str(tmp_path / "spinning.c")], tmp_path / "spinning")
    records = recorded(tmp_path, [str(program), "1.5"])
    stacks = [[one["function"] for one in frames] for frames in stacks_of(records, "on-CPU")]
    spinning = [names for names in stacks if "main" in names]
    chains = Counter(tuple(names[: names.index("main") + 1]) for names in spinning)
    assert 100 < len(spinning) <= 1.6 * 199
    assert chains.most_common(1)[0][0] == ("inner", "outer", "main")
    perf = ["perf", "record", "-q", "-e", "cpu-clock", "-F", "199", "-g", "-o", str(tmp_path / "perf.data")]
    subprocess.run([*perf, str(program), "1.5"], check=True, capture_output=True)
    script = ["perf", "script", "-F", "ip,sym", "-i", str(tmp_path / "perf.data")]
    text = subprocess.run(script, check=True, capture_output=True, text=True).stdout
    by_perf: Counter[tuple[str, ...]] = Counter()
    for block in text.split("\n\n"):
        names = [line.split(maxsplit=1)[1] for line in block.splitlines() if len(line.split()) > 1]
        if "main" in names and "inner" in names:
            by_perf[tuple(names[names.index("inner") : names.index("main") + 1])] += 1
    assert by_perf.most_common(1)[0][0] == ("inner", "outer", "main")
    assert chains["inner", "outer", "main"] > 0.9 * sum(chains.values())


@pytest.mark.parametrize("is_root", [True, pytest.param(False, marks=pytest.mark.alone)])
def test_planted_causes_are_found_within_two_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_root: bool
) -> None:
    within = 0.02
    if not is_root:  # this process samples, and gets a processor late where others want them too
        monkeypatch.setattr("tracepipe.tracer.choose", refuse)
        within = 0.04
    script = tmp_path / "planted.py"
    script.write_text(PLANTED)
    recorded(tmp_path, [sys.executable, str(script), str(tmp_path / "gpu.jsonl")])
    truth = json.loads((tmp_path / "out").read_text())
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    gpu = (tmp_path / "gpu.jsonl").read_text().splitlines()
    (tmp_path / "both.jsonl").write_text("\n".join([*lines[:-1], *gpu, lines[-1]]) + "\n")
    gaps = [sys.executable, "-m", "tracepipe", "gaps", str(tmp_path / "both.jsonl"), "--json", "--top", "0"]
    shown = subprocess.run(
        gaps, check=True, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": PYTHONPATH}
    )
    places = json.loads(shown.stdout)["places"]
    # What each is, and in which function the line is that says it.
    causes = {"json.loads": "parses", "garbage collection": "collects"}  # the latter as root alone
    functions = ("sleeps", "locks", "waits", "computes", "parses", "collects")
    found: Counter[str] = Counter()
    for row in places:
        line = row["line"] or ""
        by_cause = next((name for text, name in causes.items() if line.startswith(text)), None)
        # Both are called in `repeat`, whose own line cannot say which.
        found[by_cause or next((name for name in functions if line.endswith(name)), line)] += row["idle_ns"]
    repeat = sum(ns for line, ns in found.items() if line.endswith(" repeat"))
    for name in ("sleeps", "locks", "waits", "computes"):
        assert found[name] / truth["idle_ns"] == pytest.approx(
            truth["causes"][name] / truth["idle_ns"], abs=within
        )
    together = (found["parses"] + found["collects"] + repeat) / truth["idle_ns"]
    expected = (truth["causes"]["parses"] + truth["causes"]["collects"]) / truth["idle_ns"]
    assert together == pytest.approx(expected, abs=within)
    assert found["parses"] > 0.6 * truth["causes"]["parses"]
    named_ns = sum(row["idle_ns"] for row in places if row["line"])
    assert named_ns >= 0.95 * truth["idle_ns"]


def test_forks_programs_without_symbols_and_generated_code(tmp_path: Path) -> None:
    for name, source, flags in (
        ("spinning", SPINNING, ["-O1", "-fno-omit-frame-pointer", "-s"]),
        ("generated", GENERATED, ["-O1"]),
    ):
        (tmp_path / f"{name}.c").write_text(source)
        compiled(["gcc", *flags, str(tmp_path / f"{name}.c")], tmp_path / name)
    script = tmp_path / "forks.py"
    script.write_text(
        "import os, time\n"
        "def child():\n"
        "    end = time.process_time() + 0.3\n"
        "    while time.process_time() < end: pass\n"
        "if (pid := os.fork()) == 0:\n"
        "    child()\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        f"os.spawnv(os.P_WAIT, {str(tmp_path / 'generated')!r}, ['generated'])\n"
        f"os.execv({str(tmp_path / 'spinning')!r}, ['spinning', '0.4'])\n"
    )
    records = recorded(tmp_path, [sys.executable, str(script)])
    assert records[-1]["ended_by"] == "exit 0"
    running = stacks_of(records, "on-CPU")
    of_child = [frames for frames in running if any(one[2] == "child" for one in python_of(frames))]
    generated = [frames for frames in running if frames[0].get("file") == "[generated]"]
    stripped = [frames for frames in running if frames[0].get("file") == str(tmp_path / "spinning")]
    assert len(of_child) > 25
    assert {frames[-1]["function"] for frames in of_child} == {"<module>"}
    assert len(generated) > 10
    assert {frames[0]["function"] for frames in generated} == {"unknown"}
    assert len(stripped) > 35
    assert {frames[0]["function"] for frames in stripped} == {"unknown"}


def test_five_hundred_threads(tmp_path: Path) -> None:
    script = tmp_path / "threads.py"
    script.write_text(
        "import threading, time\n"
        "def waits():\n"
        "    time.sleep(0.2)\n"
        "threads = [threading.Thread(target=waits) for _ in range(500)]\n"
        "for one in threads: one.start()\n"
        "for one in threads: one.join()\n"
    )
    records = recorded(tmp_path, [sys.executable, str(script)])
    stacks = {record["id"]: record["frames"] for record in records if record["type"] == "stack"}
    waiting = {
        record["tid"]
        for record in records
        if record["type"] == "host_sample" and "stack" in record
        if [str(script), 3, "waits"] in python_of(stacks[record["stack"]])
    }
    assert len(waiting) == 500
    assert records[-1]["losses"].get("host_sample", 0) == 0


def test_a_process_that_runs_already(tmp_path: Path) -> None:
    script = tmp_path / "runs.py"
    script.write_text(
        "import time\nprint(1, flush=True)\nwhile time.process_time() < 100:\n    sum(range(9))\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        path = tmp_path / "run.jsonl"
        with path.open("wb") as sink:
            request = CaptureRequest(
                layers=("host_sample", "scheduler"),
                method="prebuilt",
                pids=(process.pid,),
                limits=Limits(duration_ns=3 * 10**9),
            )
            capture(request, sink, notify=lambda _: None)
        process.kill()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    lines = {one[1] for frames in stacks_of(records, "on-CPU") for one in python_of(frames)}
    assert lines <= {3, 4} and len(stacks_of(records, "on-CPU")) > 40
    assert any(record["type"] == "scheduler" for record in records)


def test_every_version_of_python_here(tmp_path: Path) -> None:
    """The layouts of the versions that are installed next to this one."""
    script = tmp_path / "sleeps.py"
    script.write_text(
        "import time\n\ndef inner():\n    time.sleep(0.05)\n\ndef outer():\n    inner()\n\nouter()\n"
    )
    programs = [python for version in VERSIONS if (python := interpreter(version)) is not None]
    for program in programs:
        records = recorded(tmp_path, [program, str(script)])
        assert [[str(script), 4, "inner"], [str(script), 7, "outer"], [str(script), 9, "<module>"]] in [
            python_of(frames) for frames in stacks_of(records, "off-CPU")
        ]


def test_without_root_stacks_of_python_are_read_from_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tracepipe.tracer.choose", refuse)
    script = tmp_path / "nested.py"
    script.write_text(NESTED.replace("0.003", "0.03"))
    records = recorded(tmp_path, [sys.executable, str(script)])
    printed = json.loads((tmp_path / "out").read_text())
    found = {json.dumps(python_of(frames)) for frames in stacks_of(records, "sampled")}
    assert records[0]["layers"]["got"] == ["host_sample"]
    assert not [frames for frames in printed if json.dumps(frames) not in found]
    assert {record["phase"] for record in records if record["type"] == "host_sample"} == {"I"}


def test_where_the_kernel_refuses_the_programs_the_rest_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = bpf.load_program

    def refused(name: str, *arguments: Any) -> int:
        if name == "host_sample":
            raise OSError(errno.E2BIG, "Argument list too long: BPF program is too large")
        return load(name, *arguments)

    monkeypatch.setattr(bpf, "load_program", refused)
    messages: list[str] = []
    path = tmp_path / "run.jsonl"
    with path.open("wb") as sink:
        request = CaptureRequest(["true"], layers=("host_sample", "scheduler"), method="prebuilt")
        capture(request, sink, notify=messages.append)
    header = json.loads(path.read_text().splitlines()[0])
    assert header["layers"]["got"] == ["scheduler"]
    assert "too large" in header["layers"]["missing"]["host_sample"]
    assert any(message.startswith("no host_sample layer: ") for message in messages)


def test_names_of_a_stripped_program_by_its_build_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spinning.c").write_text(SPINNING)
    program = compiled(["gcc", "-O0", "-Wl,--build-id", str(tmp_path / "spinning.c")], tmp_path / "spinning")
    with Elf(str(program)) as elf:
        build_id = elf.build_id()
    assert len(build_id) == 40
    debug = tmp_path / "debug" / build_id[:2] / f"{build_id[2:]}.debug"
    debug.parent.mkdir(parents=True)
    subprocess.run(["objcopy", "--only-keep-debug", str(program), str(debug)], check=True)
    subprocess.run(["strip", str(program)], check=True)
    monkeypatch.setattr("tracepipe.tracer.engines.host_stacks._DEBUG_FILES", tmp_path / "debug")
    stacks = stacks_of(recorded(tmp_path, [str(program), "0.5"]), "on-CPU")
    names = Counter(tuple(one["function"] for one in frames[:3]) for frames in stacks)
    assert names.most_common(1)[0][0] == ("inner", "outer", "main")


WAITING = """
import json, os, queue, select, socket, sys, threading, time
lock, got, ends = threading.Lock(), queue.Queue(), socket.socketpair()
lock.acquire()
ways = {
    "sleeps": lambda: time.sleep(100), "locks": lock.acquire, "gets": got.get,
    "receives": lambda: ends[0].recv(1), "selects": lambda: select.select([ends[0]], [], []),
}
for name, way in ways.items():
    threading.Thread(target=way, name=name, daemon=True).start()
while b"S" * len(ways) != b"".join(
    open(f"/proc/self/task/{one.native_id}/stat", "rb").read().rsplit(b") ")[1][:1]
    for one in threading.enumerate()[1:]
):
    time.sleep(0.01)
print(json.dumps({one.name: one.native_id for one in threading.enumerate()[1:]}), flush=True)
sys.stdin.readline()
os._exit(0)
"""


def test_waiting_threads_are_where_a_debugger_finds_them(tmp_path: Path) -> None:
    """At the same moment: their innermost native functions. GDB shows inlined ones too."""
    gdb = shutil.which("gdb") or pytest.skip("there is no gdb")
    script, path = tmp_path / "waiting.py", tmp_path / "run.jsonl"
    script.write_text(WAITING)
    capture = [sys.executable, "-m", "tracepipe", "capture", "--layers", "host_sample,scheduler"]
    with subprocess.Popen(
        [*capture, "-o", str(path), "--", sys.executable, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    ) as running:
        assert running.stdin is not None and running.stdout is not None
        threads: dict[str, int] = json.loads(running.stdout.readline())
        process = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()[0]
        asked = [gdb, "-p", process, "-batch", "-ex", "thread apply all backtrace 2"]
        answer = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
        running.communicate(b"\n")
    seen = {}
    for part in answer.split("\nThread ")[1:]:
        found = re.search(r"LWP (\d+)", part)
        assert found is not None
        functions = re.findall(r"^#\d+ +(?:0x\w+ in )?(\w+)", part, re.MULTILINE)
        seen[int(found[1])] = {name.removeprefix("__GI_") for name in functions}
    records = [json.loads(line) for line in path.read_text().splitlines()]
    frames = {one["id"]: one["frames"] for one in records if one["type"] == "stack"}
    last = {
        one["tid"]: frames[one["stack"]] for one in records if one["type"] == "host_sample" and "stack" in one
    }
    for name, tid in threads.items():
        assert last[tid][0]["function"].removeprefix("__GI_") in seen[tid], name
