"""Measures what a long capture loses, uses and leaves behind: at full rate, and with ten captures at once.

    sudo python benchmarks/soak.py [--seconds 60] [--methods bcc,bpftrace] [--outputs jsonl.zst] [--many 10]
                                   [--rate 20000] [--threads 64]

The program (soak.c; gcc) calls a function from two threads, or --threads, and forks ten times a second, for
an hour unless --seconds says otherwise, and says in the end how many calls it made. Of every capture:

    exact    kept + lost = made: lines in the recording, what its footer counts as lost, twice the calls
    flat     resident memory of all processes of the capture together, without the program and what is of
             files: the medians of the second quarter of its time and of the last are at most 8 MB and 3%
             apart, 32 MB where that is less than ten minutes, and the end takes at most 64 MB more
    clean    nothing is there afterwards that was not before: processes, names in /tmp, /dev/shm and $TMPDIR,
             probes of tracefs, a breakpoint in the program, BPF programs, maps and links. Those that another
             process has open are left out; better let nothing else that uses BPF run

`behind` is the most that the temporary file held: events that were not lines yet. It exits with 1 where a sum
is not exact, memory grows or something is left. Rates are this machine's and nothing to compare with others.
On a machine that others use, --rate bounds the calls a second of one capture; `nice` alone does not where the
kernel groups processes by session (sched_autogroup_enabled): there,
`setsid -w sh -c 'echo 5 >/proc/self/autogroup; exec python …'`.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import os
import platform
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

MARK = "TRACEPIPE_SOAK"  # in the environment of all processes that are started here
SAMPLE_S = 0.25
SETTLE_S = 120.0  # after a bpftrace the kernel removes probes one by one
GROWS_BYTES, GROWS_SHARE, END_BYTES = 8 << 20, 0.03, 64 << 20
MANY_RATE = 4000  # calls a second of each of many captures
LINE_BYTES = 130
EVENTS_A_SECOND = 1_200_000  # more than two processors make
LONG_S = 600.0
PLACES = ("/tmp", "/dev/shm")
UPROBE_EVENTS = Path("/sys/kernel/tracing/uprobe_events")
SYSCALL_BPF = {"x86_64": 321, "aarch64": 280}[platform.machine()]
BPF_NEXT_ID = {"program": 11, "map": 12, "link": 31}  # commands of bpf(2)
IDS = (("program", "prog_id:"), ("map", "map_id:"), ("link", "link_id:"))  # of fdinfo
CALL = b'"type":"hook"'
libc = ctypes.CDLL(None, use_errno=True)


# ── what there is on the machine ──


def bpf_objects() -> Iterator[str]:
    """Every BPF program, map and link, as `program 17`."""
    for kind, command in BPF_NEXT_ID.items():
        #  0 start │ 4 next │ 8 flags
        attributes = ctypes.create_string_buffer(struct.pack("<III", 0, 0, 0), 12)
        while not libc.syscall(SYSCALL_BPF, command, attributes, 12):
            found = struct.unpack_from("<I", attributes, 4)[0]
            yield f"BPF {kind} {found}"
            struct.pack_into("<I", attributes, 0, found)


def held_by_others(mark: str) -> set[str]:
    """The BPF objects that are open in processes not started here."""
    ours = set(marked(mark))
    found = set()
    for path in Path("/proc").glob("[0-9]*/fdinfo/*"):
        if int(path.parts[2]) not in ours:
            with suppress(OSError):
                words = path.read_text().split()
                found |= {f"BPF {kind} {words[words.index(name) + 1]}" for kind, name in IDS if name in words}
    return found


def marked(mark: str) -> Iterator[int]:
    """The processes started here, and those that they started."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"{MARK}={mark}".encode() in path.read_bytes().split(b"\0"):
                yield int(path.parent.name)


def there(temporary: Path, mark: str) -> set[str]:
    """Everything that a capture could leave behind."""
    found = {f"process {pid} {name_of(pid)}" for pid in marked(mark)}
    found |= set(bpf_objects())
    found |= {str(path) for path in temporary.iterdir()}
    found |= {str(path) for place in PLACES for path in Path(place).glob("*tracepipe*")}
    if UPROBE_EVENTS.exists():
        found |= {f"probe {line}" for line in UPROBE_EVENTS.read_text().splitlines()}
    return found


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


# ── a capture ──


@dataclass
class Capture:
    """A capture of the program, and the figures of it."""

    method: str
    output: str
    folder: Path
    layers: str = "userspace"
    threads: int = 2
    rate: int = 0
    memory: list[tuple[float, int]] = field(default_factory=list)
    behind_bytes: int = 0
    ran_s: tuple[float, float] = (0.0, 0.0)
    error: str = ""
    made: int = 0
    calls_a_second: float = 0.0
    kept: int = 0
    footer: dict[str, object] = field(default_factory=dict)

    @property
    def program(self) -> Path:
        """A separate copy of the program, as probes are on a file."""
        return self.folder / "soak"

    @property
    def recording(self) -> Path:
        return self.folder / f"run.{self.output}"

    def start(self, mark: str, seconds: float) -> None:
        temporary = self.folder / "temporary"
        temporary.mkdir()
        options = ["--method", self.method, "--layers", self.layers, "--gpu", "off"]
        options += ["--hook", f"uprobe:{self.program}:turn(n: u64) -> u64", "-o", str(self.recording)]
        command = [str(self.program), str(seconds), str(self.threads), str(self.rate)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tracepipe", "capture", *options, "--", *command],
            env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary), MARK: mark},
            stdout=(self.folder / "output").open("wb"),
            stderr=(self.folder / "messages").open("wb"),
        )

    def is_over(self) -> bool:
        return self.process.poll() is not None

    def sample(self) -> None:
        """Examine its processes."""
        total = 0
        now_s = time.monotonic()
        for pid in self._own():
            with suppress(OSError, IndexError):
                rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
                total += int(rollup.partition("\nPss_Anon:")[2].split()[0]) << 10
        if total:
            self.memory.append((now_s, total))
        self.behind_bytes = max(self.behind_bytes, self._held_bytes())
        if self._program_runs():
            self.ran_s = self.ran_s[0] or now_s, now_s

    def _own(self) -> list[int]:
        """Its processes without the program and those that it forks."""
        found, new = [], [self.process.pid]
        while new:
            found += new
            new = [
                int(child)
                for pid in new
                for path in Path(f"/proc/{pid}/task").glob("*/children")
                for child in _read(path).split()
                if _exe(int(child)) != str(self.program)
            ]
        return found

    def _program_runs(self) -> bool:
        return any(
            _exe(int(child)) == str(self.program)
            for child in _read(Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")).split()
        )

    def _held_bytes(self) -> int:
        """The disk space of its unnamed temporary file."""
        held = 0
        for descriptor in Path(f"/proc/{self.process.pid}/fd").glob("*"):
            with suppress(OSError):
                if str(descriptor.readlink()).startswith(str(self.folder / "temporary")):
                    held += descriptor.stat().st_blocks * 512
        return held

    def end(self) -> None:
        """Read the program's output, and the recording."""
        code = self.process.wait()
        output = (self.folder / "output").read_text()
        if code or not output:
            self.error = f"exit {code}: {(self.folder / 'messages').read_text()[-300:]}"
            return
        answer = json.loads(output)
        self.made, self.calls_a_second = 2 * answer["calls"], answer["calls_a_second"]
        from tracepipe.recording.files import open_input

        rest = last = b""
        with open_input(str(self.recording)) as stream:
            while chunk := stream.read(1 << 22):
                lines, _, rest = (rest + chunk).rpartition(b"\n")
                self.kept += lines.count(CALL)
                last = lines.rpartition(b"\n")[2] or last
        self.footer = json.loads(last)
        self.recording.unlink()

    @property
    def lost(self) -> int:
        losses = self.footer.get("losses", {})
        assert isinstance(losses, dict)
        return int(losses.get("hook", 0))

    @property
    def is_exact(self) -> bool:
        counts = self.footer.get("counts", {})
        assert isinstance(counts, dict)
        return bool(self.made) and self.kept == counts.get("hook") == self.made - self.lost

    def quarters(self) -> tuple[float, float, float]:
        """Memory in the second quarter of the program's time, in the last one, and the most after it."""
        began, ended = self.ran_s
        length = ended - began

        def between(first: float, last: float) -> list[int]:
            return [size for at, size in self.memory if began + first * length <= at <= began + last * length]

        second, last = between(0.25, 0.5), between(0.75, 1)
        after = [size for at, size in self.memory if at > ended]
        if not second or not last:
            return 0.0, 0.0, 0.0
        return statistics.median(second), statistics.median(last), float(max(after, default=last[-1]))

    @property
    def is_flat(self) -> bool:
        second, last, after = self.quarters()
        settles = 4 if self.ran_s[1] - self.ran_s[0] < LONG_S else 1  # a heap finds its size first
        room_bytes = settles * GROWS_BYTES + GROWS_SHARE * second
        return second > 0 and last - second <= room_bytes and after - last <= END_BYTES


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _exe(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/exe").readlink())
    except OSError:
        return ""


# ── the table ──


HEAD = f"{'':<22}{'calls/s':>10}{'made':>13}{'kept':>13}{'lost':>11}{'kept':>7}"
HEAD += f"{'2nd MB':>9}{'last MB':>9}{'ratio':>7}{'end MB':>8}{'behind MB':>11}  verdict"


def row(capture: Capture) -> str:
    """A line with the figures of a capture."""
    name = f"{capture.method}, {capture.output}"
    if capture.error:
        return f"{name:<22}FAILED: {capture.error}"
    second, last, after = (size / 1e6 for size in capture.quarters())
    verdicts = ["exact" if capture.is_exact else f"NOT EXACT by {capture.made - capture.kept - capture.lost}"]
    verdicts.append("flat" if capture.is_flat else "MEMORY GROWS" if second else "MEMORY NOT SEEN")
    share = capture.kept / capture.made if capture.made else 0
    text = f"{name:<22}{capture.calls_a_second:>10.0f}"
    text += f"{capture.made:>13}{capture.kept:>13}{capture.lost:>11}{share:>7.1%}"
    text += f"{second:>9.1f}{last:>9.1f}{last / second if second else 0:>7.2f}{after:>8.1f}"
    return f"{text}{capture.behind_bytes / 1e6:>11.1f}  {', '.join(verdicts)}"


def soak(captures: list[Capture], seconds: float) -> bool:
    """Run captures at the same time, and print their figures; whether all is well."""
    mark = f"{os.getpid()}-{captures[0].folder.name}"
    before = there(captures[0].folder, mark)
    for capture in captures:
        capture.start(mark, seconds)
    while not all(capture.is_over() for capture in captures):
        for capture in captures:
            capture.sample()
        time.sleep(SAMPLE_S)
    for capture in captures:
        capture.end()
        print(row(capture), flush=True)
    left = what_stays(captures, mark, before)
    for what in left:
        print(f"{'':<22}LEFT: {what}")
    print(f"{'':<22}{'clean' if not left else 'NOT CLEAN'}", flush=True)
    return not left and all(capture.is_exact and capture.is_flat for capture in captures)


def what_stays(captures: list[Capture], mark: str, before: set[str]) -> list[str]:
    """What exists that did not before, after the kernel has had time to remove it."""
    give_up_s = time.monotonic() + SETTLE_S
    while True:
        left = {text for capture in captures for text in there(capture.folder / "temporary", mark)} - before
        for capture in captures:
            answer = subprocess.run([str(capture.program)], capture_output=True, text=True, check=True).stdout
            if json.loads(answer)["probed"]:
                left.add(f"a breakpoint in {capture.program}")
        left -= held_by_others(mark)
        if not left or time.monotonic() > give_up_s:
            return sorted(left)
        time.sleep(SAMPLE_S)


def copies(program: Path, folder: Path, captures: list[Capture]) -> list[Capture]:
    for number, capture in enumerate(captures):
        capture.folder = Path(tempfile.mkdtemp(prefix=f"{number}-", dir=folder))
        shutil.copy(program, capture.program)
    return captures


def has_room(capture: Capture, folder: Path, seconds: float) -> bool:
    """Whether the disk has room for an uncompressed recording."""
    events = seconds * (2 * capture.rate or EVENTS_A_SECOND)
    needed = int(events * LINE_BYTES) if capture.output == "jsonl" else 0
    if needed <= shutil.disk_usage(folder).free:
        return True
    print(f"{capture.method}, {capture.output:<12}left out: it may need {needed / 1e9:.0f} GB")
    return False


def methods_here() -> list[str]:
    from tracepipe.errors import CaptureUnavailable
    from tracepipe.tracer import ENGINES

    works = []
    for name, make in ENGINES.items():
        try:
            make().check()
            works.append(name)
        except CaptureUnavailable as unavailable:
            print(f"no {name}: {unavailable.message}")
    return works


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=3600, help="of each capture (3600)")
    parser.add_argument("--methods", default="", help="comma-separated (all that work here)")
    parser.add_argument("--outputs", default="jsonl,jsonl.zst", help="comma-separated (jsonl,jsonl.zst)")
    parser.add_argument("--rate", type=int, default=0, help="calls a second, one at a time (0: any)")
    parser.add_argument("--threads", type=int, default=2, help="of one capture's program (2)")
    parser.add_argument("--many", type=int, default=10, help="captures at once (10; 0: none)")
    parser.add_argument("--folder", default=None, help="for recordings ($TMPDIR)")
    options = parser.parse_args()
    print(f"Linux {platform.release()} {platform.machine()}, {os.cpu_count()} processors", end="; ")
    print(f"python {platform.python_version()}; {options.seconds:.0f} s each")
    methods = options.methods.split(",") if options.methods else methods_here()
    outputs = options.outputs.split(",")
    good = True
    with tempfile.TemporaryDirectory(prefix="soak-", dir=options.folder) as name:
        folder = Path(name)
        program = folder / "soak"
        compiler = os.environ.get("CC", "gcc")
        source = Path(__file__).with_suffix(".c")
        flags = ["-fcf-protection=none"] if platform.machine() == "x86_64" else []
        subprocess.run([compiler, *flags, "-O2", "-pthread", str(source), "-o", str(program)], check=True)
        rate = f"at {options.rate} calls/s" if options.rate else "as fast as the program goes"
        print(f"\none at a time, {rate}, userspace\n{HEAD}")
        for method, output in itertools.product(methods, outputs):
            capture = Capture(method, output, folder, threads=options.threads, rate=options.rate)
            if has_room(capture, folder, options.seconds):
                good &= soak(copies(program, folder, [capture]), options.seconds)
        if options.many:
            pairs = itertools.cycle(itertools.product(methods, outputs))
            layers = "userspace,syscall,scheduler"
            many = [
                Capture(method, output, folder, layers, rate=MANY_RATE)
                for method, output in itertools.islice(pairs, options.many)
            ]
            print(f"\n{options.many} at once, each at {MANY_RATE} calls/s, {layers}\n{HEAD}")
            good &= soak(copies(program, folder, many), options.seconds)
    if not good:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
