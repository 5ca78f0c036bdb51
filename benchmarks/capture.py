"""What a probed call costs its program: untraced, with empty probes, with tracepipe, with a bpftrace script.

    sudo python benchmarks/capture.py [--quick] [--rounds N] [--calls N] [--methods bcc,bpftrace]

The program is the stand-in's vec_add (fixtures/standin; gcc), which calls one function again and again and
measures. Figures are nanoseconds of the calling thread's processor time a call, medians over rounds in which
the variants take turns, and ratios to the untraced call and to empty probes: programs of two instructions at
its entry and return, the least that a tracer with uprobes costs. That depends on the instruction that a probe
replaces, in which the functions differ. The second table is throughput: threads that call as fast as
they can, what the default ring lost, and the size of the recording, compressed or not. The third is the time
to attach to every function and to detach.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

FIVE_NOPS, NOP5 = b"\x90" * 5, b"\x0f\x1f\x44\x00\x00"
PLAIN = "bpftrace script"


@dataclass(frozen=True)
class Subject:
    """A called function in a build of the stand-in."""

    function: str
    build: Path
    first_instruction: str

    @property
    def library(self) -> str:
        return str(self.build / "libcuda.so.1")

    def command(self, calls: int, threads: int = 1) -> list[str]:
        command = [str(self.build / "vec_add"), "-n", "100", "--spin", str(calls), "--call", self.function]
        return [*command, "--threads", str(threads)]


@dataclass(frozen=True)
class Seen:
    """The results of a run of the program, and how long the tool took before and after it."""

    ns_a_call: float
    calls_a_second: float
    start_s: float = 0.0
    attach_s: float = 0.0
    detach_s: float = 0.0
    kept: int = 0
    lost: int = 0
    size_bytes: int = 0


def offsets_of(library: str) -> dict[str, int]:
    """The file offset of each exported cu* function, in bytes."""
    from tracepipe.tracer.find.elf import Elf

    with Elf(library) as elf:
        return {name: elf.file_offset(at) for name, at in elf.functions() if name.startswith("cu")}


def first_instruction(library: str, function: str) -> str:
    """The instruction as objdump names it, or its bytes without objdump."""
    if shutil.which("objdump") is None:
        with Path(library).open("rb") as file:
            file.seek(offsets_of(library)[function])
            return file.read(5).hex(" ")
    command = ["objdump", "-d", "--no-show-raw-insn", f"--disassemble={function}", library]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    instruction = lines[lines.index(next(line for line in lines if line.endswith(f"<{function}>:"))) + 1]
    return " ".join(instruction.split("\t")[1].split())


def build_subjects(folder: Path, quick: bool) -> list[Subject]:
    """The stand-in in several builds, one with the nop of five bytes that `-pg -mnop-mcount` inserts
    first.
    """
    subjects = []
    wanted = [
        ("plain", "", "cuCtxSetCurrent"),
        ("plain", "", "cuCtxGetCurrent"),  # the value behind its argument is recorded too
        ("plain", "", "cuDriverGetVersion"),
    ]
    if not quick and platform.machine() == "x86_64":
        wanted += [
            ("cet", "-fcf-protection=branch", "cuCtxGetCurrent"),
            ("nop", "-fpatchable-function-entry=1", "cuCtxGetCurrent"),
            ("nop5", "-fpatchable-function-entry=5", "cuCtxGetCurrent"),
        ]
    for name, prologue, function in wanted:
        build = folder / name
        make = ["make", "-s", "-C", str(ROOT / "fixtures/standin"), f"BUILD={build}", f"PROLOGUE={prologue}"]
        subprocess.run(make, check=True)
        library = str(build / "libcuda.so.1")
        if name == "nop5":
            with Path(library).open("r+b") as file:
                file.seek(offsets_of(library)[function])
                if file.read(5) != FIVE_NOPS:
                    raise SystemExit(f"{function} does not start with five nops")
                file.seek(-5, os.SEEK_CUR)
                file.write(NOP5)
        subjects.append(Subject(function, build, first_instruction(library, function)))
    return subjects


# ── ways to run the program ──


def measured(command: list[str]) -> Seen:
    """Run the program, alone or by a tool; times come from the lines that the program prints."""
    began_s = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    printed, started_s, ended_s = "", began_s, began_s
    for line in process.stderr:
        if "driver API" in line:
            started_s = time.monotonic()
        if "calls/s" in line:
            ended_s = time.monotonic()
        printed += line
    code = process.wait()
    cost, rate = re.search(r"([\d.]+) ns of processor", printed), re.search(r"(\d+) calls/s", printed)
    if code or cost is None or rate is None:
        raise SystemExit(f"{shlex.join(command)} ended with {code}:\n{printed}")
    before_s, after_s = started_s - began_s, time.monotonic() - ended_s
    return Seen(float(cost[1]), float(rate[1]), start_s=before_s, attach_s=before_s, detach_s=after_s)


def bare(subject: Subject, calls: int) -> Seen:
    return measured(subject.command(calls))


def with_empty_probes(subject: Subject, calls: int) -> Seen:
    """Two programs `return 0` on every exported function, attached as tracepipe does."""
    from tracepipe.tracer.bpf import bpf

    offsets = sorted(set(offsets_of(subject.library).values()))
    # An instruction: operation u8 │ registers u8 │ offset i16 │ value i32.  r0 = 0; exit
    code = struct.pack("<BBhi", 0xB7, 0, 0, 0) + struct.pack("<BBhi", 0x95, 0, 0, 0)
    program = bpf.load_program("empty", code, bpf.PROG_TYPE_KPROBE, bpf.UPROBE_MULTI)
    links = [
        bpf.link_uprobes(program, subject.library, offsets, [0] * len(offsets), returns)
        for returns in (True, False)
    ]
    try:
        return measured(subject.command(calls))
    finally:
        for descriptor in (program, *links):
            os.close(descriptor)


def with_tracepipe(command: list[str], method: str, layers: str, suffix: str = "") -> Seen:
    """Capture in a separate process, as a user would; compressed according to the suffix."""
    with tempfile.TemporaryDirectory() as folder:
        recording = Path(folder, f"run.jsonl{suffix}")
        options = [method, layers, str(recording)]
        seen = measured([sys.executable, str(Path(__file__).resolve()), "--side", *options, *command])
        summary = json.loads(Path(folder, "summary.json").read_text())
        size_bytes = recording.stat().st_size
    return Seen(
        seen.ns_a_call,
        seen.calls_a_second,
        seen.start_s,
        summary["attach_ns"] / 1e9,
        summary["detach_ns"] / 1e9,
        summary["counts"].get("userspace", 0),
        sum(summary["losses"].values()),
        size_bytes,
    )


def capture_side(method: str, layers: str, recording: str, command: list[str]) -> None:
    """The process of `with_tracepipe`: one capture, with its summary next to the recording."""
    from tracepipe.recording.outputs import written_recording
    from tracepipe.tracer import CaptureRequest, capture

    request = CaptureRequest(command, layers=tuple(layers.split(",")), method=method)
    with written_recording(recording, force=False) as sink:
        summary = capture(request, sink, notify=lambda message: print(message, file=sys.stderr))
    keys = ("attach_ns", "detach_ns", "counts", "losses")
    Path(recording).with_name("summary.json").write_text(
        json.dumps({key: getattr(summary, key) for key in keys})
    )


def bpftrace_script(library: str, functions: str) -> str:
    """A script that prints a line for each entry and return: time, process, thread, probe, result."""
    fields = "nsecs, pid, tid, probe"
    return (
        f'uprobe:{library}:{functions} {{ printf("%llu %d %d %s\\n", {fields}); }} '
        f'uretprobe:{library}:{functions} {{ printf("%llu %d %d %s %d\\n", {fields}, retval); }}'
    )


def with_bpftrace(subject: Subject, command: list[str], functions: str) -> Seen:
    """Run a bpftrace script that prints to a file."""
    with tempfile.TemporaryDirectory() as folder:
        printed = Path(folder, "printed")
        script = bpftrace_script(subject.library, functions)
        seen = measured(["bpftrace", "-o", str(printed), "-e", script, "-c", shlex.join(command)])
        kept = lost = 0
        with printed.open() as lines:
            for line in lines:
                if line.startswith("Lost "):
                    lost += int(line.split()[1])
                else:
                    kept += line[:1].isdigit()
    return replace(seen, kept=kept, lost=lost)


# ── the tables ──


def middle(seen: list[Seen], name: str) -> float:
    return float(statistics.median(getattr(one, name) for one in seen))


def cost_table(subjects: list[Subject], methods: list[str], calls: int, rounds: int) -> None:
    """A call's cost by first instruction and variant."""
    for subject in subjects:
        seen: dict[str, list[Seen]] = {}
        for _ in range(rounds):
            runs = {
                "untraced": bare(subject, 20 * calls),
                "empty probes": with_empty_probes(subject, calls),
            }
            for method in methods:
                few = calls // 10 if method == "bpftrace" else calls
                command = subject.command(few)
                runs[f"{method}, userspace"] = with_tracepipe(command, method, "userspace")
                runs[f"{method}, userspace, syscall, scheduler"] = with_tracepipe(
                    command, method, "userspace,syscall,scheduler"
                )
            if shutil.which("bpftrace"):
                command = subject.command(calls // 10)
                runs[PLAIN] = with_bpftrace(subject, command, subject.function)
            for name, run in runs.items():
                seen.setdefault(name, []).append(run)
        floor, empty = middle(seen["untraced"], "ns_a_call"), middle(seen["empty probes"], "ns_a_call")
        print(f"\n{subject.function}, first instruction `{subject.first_instruction}`, ns a call")
        print(f"  {'':<42}{'median':>9}{'min':>9}{'max':>9}{'× untraced':>11}{'× empty':>9}")
        for name, some in seen.items():
            ns = middle(some, "ns_a_call")
            low, high = min(one.ns_a_call for one in some), max(one.ns_a_call for one in some)
            ratios = f"{ns / floor:>11.1f}{ns / empty:>9.2f}"
            print(f"  {name:<42}{ns:>9.1f}{low:>9.1f}{high:>9.1f}{ratios}", flush=True)


def throughput_table(subject: Subject, methods: list[str], calls: int, rounds: int) -> None:
    """Events per second from several threads, losses with the default ring, and the size of a recording."""
    processors = os.cpu_count() or 1
    forms = [(method, "") for method in methods]
    forms += [(method, suffix) for method in methods if method != "bpftrace" for suffix in (".zst", ".gz")]
    forms += [(PLAIN, "")] if shutil.which("bpftrace") else []
    print(f"\nas fast as it goes, `{subject.first_instruction}`, userspace only, default ring")
    print(f"  {'':<24}{'threads':>8}{'calls/s':>12}{'events/s':>12}{'kept':>12}{'lost':>10}{'MB':>8}")
    for threads in sorted({1, 2, processors, 2 * processors}):
        for method, suffix in forms:
            few = calls // 10 if "bpftrace" in method else calls
            some = []
            for _ in range(rounds):
                command = subject.command(max(1, few // threads), threads)
                if method == PLAIN:
                    some.append(with_bpftrace(subject, command, subject.function))
                else:
                    some.append(with_tracepipe(command, method, "userspace", suffix))
            rate, lost = middle(some, "calls_a_second"), sum(one.lost for one in some)
            kept = sum(one.kept for one in some)
            share = kept / (kept + lost)
            row = f"{threads:>8}{rate:>12.0f}{2 * rate * share:>12.0f}{kept:>12}{lost:>10}"
            size = f"{middle(some, 'size_bytes') / 1e6:>8.1f}"
            print(f"  {method + suffix.replace('.', ', '):<24}{row}{size}", flush=True)


def start_and_end_table(subject: Subject, methods: list[str], rounds: int) -> None:
    """The time until the program runs, the part for attaching to every cu* function, and the time to
    detach.
    """
    print("\nentry and return of every cu* function, milliseconds")
    print(f"  {'':<24}{'until it runs':>14}{'attach':>9}{'detach':>9}")
    for method in [*methods, *([PLAIN] if shutil.which("bpftrace") else [])]:
        command = subject.command(1000)
        some = []
        for _ in range(1 if "bpftrace" in method else rounds):
            if method == PLAIN:
                some.append(with_bpftrace(subject, command, "cu*"))
            else:
                some.append(with_tracepipe(command, method, "userspace"))
        start, attach, detach = (middle(some, name) * 1e3 for name in ("start_s", "attach_s", "detach_s"))
        print(f"  {method:<24}{start:>14.1f}{attach:>9.1f}{detach:>9.1f}", flush=True)


def methods_here(asked: str) -> list[str]:
    """The requested methods, or all that work on this machine; `prebuilt` has the programs of `bcc`."""
    from tracepipe.errors import CaptureUnavailable
    from tracepipe.tracer import ENGINES

    works = []
    for name in asked.split(",") if asked else [name for name in ENGINES if name != "prebuilt"]:
        try:
            print(f"{name} {ENGINES[name]().check()}")
            works.append(name)
        except CaptureUnavailable as unavailable:
            print(f"no {name}: {unavailable.message}")
    return works


def main() -> None:
    """Run one capture (for `with_tracepipe`) or the whole comparison."""
    if sys.argv[1:2] == ["--side"]:
        method, layers, recording, *command = sys.argv[2:]
        capture_side(method, layers, recording, command)
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer functions, rounds and calls")
    parser.add_argument("--rounds", type=int, help="rounds, of which the median is printed (5; quick: 3)")
    parser.add_argument(
        "--calls", type=int, help="calls in a run, a tenth with bpftrace (200000; quick: 100000)"
    )
    parser.add_argument("--methods", default="", help="comma-separated (all that work here)")
    options = parser.parse_args()
    rounds = options.rounds or (3 if options.quick else 5)
    calls = options.calls or (100_000 if options.quick else 200_000)
    machine = f"Linux {platform.release()} {platform.machine()}, {os.cpu_count()} processors"
    print(f"python {platform.python_version()}, {machine}")
    methods = methods_here(options.methods)
    attached = methods if options.methods else [*methods, *methods_here("prebuilt")]
    with tempfile.TemporaryDirectory() as folder:
        subjects = build_subjects(Path(folder), options.quick)
        cost_table(subjects, methods, calls, rounds)
        throughput_table(subjects[0], methods, 4 * calls, min(rounds, 3))
        start_and_end_table(subjects[0], attached, rounds)


if __name__ == "__main__":
    main()
