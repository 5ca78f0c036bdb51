"""Measures what windows cost a program: before, in, between and after them.

    sudo python benchmarks/windows.py [--windows N]

A program makes a thousand calls of a probed function and a thousand system calls by turns, and measures their
processor time. It is run natively, then with windows of 0.5 s, 1.5 s apart. Figures are medians of
nanoseconds a call; those of the time in which probes are attached ahead of a window are left out. Then how
late windows begin that a call begins: the 500th, which is expected, and the first one after a second.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DETACHING_NS = 700_000_000
LEAD_NS = 350_000_000
LIBRARY = """
int probed(int a) {
    __asm__ volatile("push %%rbp; pop %%rbp" ::: "memory");  // what a probe replaces
    return a + 1;
}
int step(int a) {
    __asm__ volatile("push %%rbp; pop %%rbp" ::: "memory");
    return a + 1;
}
"""
PROGRAM = r"""
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>
#include <sys/syscall.h>
int probed(int), step(int);
static long long now(clockid_t clock) {
    struct timespec at;
    clock_gettime(clock, &at);
    return at.tv_sec * 1000000000ll + at.tv_nsec;
}
int main(int count, char **words) {
    long long end = now(CLOCK_MONOTONIC) + atoll(words[1]) * 1000000;
    volatile int sum = 0;
    while (now(CLOCK_MONOTONIC) < end) {
        sum += step(0);
        long long began = now(CLOCK_MONOTONIC), at = now(CLOCK_THREAD_CPUTIME_ID);
        for (int i = 0; i < 1000; i++)
            sum += probed(i);
        long long between = now(CLOCK_THREAD_CPUTIME_ID);
        for (int i = 0; i < 1000; i++)
            syscall(SYS_getppid);
        long long calls = now(CLOCK_THREAD_CPUTIME_ID);
        printf("%lld %lld %.1f %.1f\n", began, now(CLOCK_MONOTONIC), (between - at) / 1e3,
               (calls - between) / 1e3);
    }
    return 0;
}
"""


def measured(command: list[str], output: Path) -> list[list[float]]:
    """Rows of a run: begin and end, ns, and what a call and a system call took."""
    with output.open("w") as stream:
        subprocess.run(command, check=True, stdout=stream)
    return [[float(word) for word in line.split()] for line in output.read_text().splitlines()]


def part_of(begun: float, ended: float, windows: list[tuple[int, int]]) -> str:
    """In which part of the recording a row was measured; "" in none alone."""
    first, last = windows[0][0], windows[-1][1]
    for begin, end in windows:
        if begin <= begun and ended <= end:
            return "in a window"
        if begin - LEAD_NS < ended and begun < end:
            return ""
        if end <= begun < end + DETACHING_NS:
            return "0.7 s after"
    return "before" if ended < first else "after the last" if begun > last else "between"


def windows_of(recording: Path) -> list[dict[str, Any]]:
    """Its records of windows, begin and end by turns."""
    return [record for record in map(json.loads, recording.open()) if record["type"] == "window"]


def late(what: str, capture: list[str], run: list[str], place: Path) -> None:
    """Say how late windows of such a capture began."""
    measured([*capture, "--force", "-o", str(place / "late.jsonl"), "--", *run], place / "captured")
    begins = windows_of(place / "late.jsonl")[::2]
    waits = sorted(begin.get("waited_ns", 0) / 1e6 for begin in begins)
    spread = f"{waits[0]:.1f} to {waits[-1]:.1f}, median {statistics.median(waits):.1f}"
    print(f"{what}: {len(waits)} windows began {spread} ms late")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--windows", type=int, default=3)
    repeat = options.parse_args().windows
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "lib.c").write_text(LIBRARY)
        (place / "main.c").write_text(PROGRAM)
        flags = ["-O1", "-fcf-protection=none"] if os.uname().machine == "x86_64" else ["-O1"]
        subprocess.run(
            ["gcc", *flags, "-shared", "-fPIC", "-o", place / "libx.so", place / "lib.c"], check=True
        )
        link = [f"-L{place}", "-lx", f"-Wl,-rpath,{place}"]
        subprocess.run(["gcc", *flags, "-o", place / "main", place / "main.c", *link], check=True)
        native = measured([str(place / "main"), "1500"], place / "native")
        run = [str(place / "main"), str(2000 * repeat + 4000)]
        capture = [sys.executable, "-m", "tracepipe", "capture", "--method", "prebuilt", "--gpu", "off"]
        capture += ["--layers", "syscall,scheduler", "--hook", f"uprobe:{place}/libx.so:probed"]
        capture += ["--repeat", str(repeat)]
        by_time = [*capture, "--delay", "1500ms", "--duration", "500ms"]
        rows = measured([*by_time, "-o", str(place / "run.jsonl"), "--", *run], place / "captured")
        times = [record["ts_ns"] for record in windows_of(place / "run.jsonl")]
        step = f"call:{place}/libx.so:step"
        expected = [*capture, "--start-on", f"{step}#500", "--stop-on", f"{step}#20"]
        late("by the 500th call", expected, run, place)
        asked = [*capture, "--start-on", step, "--delay", "1s", "--duration", "100ms"]
        late("by the next call", asked, run, place)
    windows = list(zip(times[::2], times[1::2], strict=True))
    parts = defaultdict(list, {"natively": native})
    for row in rows:
        parts[part_of(row[0], row[1], windows)].append(row)
    for name in ("natively", "before", "in a window", "0.7 s after", "between", "after the last"):
        if not parts[name]:
            continue
        call, system_call = (statistics.median(row[at] for row in parts[name]) for at in (2, 3))
        rows_text = f"({len(parts[name])} rows)"
        print(f"{name:15} {call:8.1f} ns a call {system_call:8.1f} ns a system call   {rows_text}")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
