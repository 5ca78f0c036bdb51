"""Runs the native core's functions under the address and undefined-behaviour sanitizers, on random input.

    python -m tests.native.sanitize                                # all, two minutes of processor time
    python -m tests.native.sanitize --only read_lines --seconds 600 --seed 7
    python -m tests.native.sanitize --only read_lines --seed 7 --case 1234     # one case again

The core is compiled anew with the sanitizers, and each target of targets.py runs in a process of its own with
the sanitizer's library loaded first. The first report of a sanitizer, or the first wrong result, ends that
process; this one then says how to run the case again and exits with 1.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.native.targets import TARGETS
from tests.support.program import PYTHONPATH
from tracepipe.native import build

ROOT = Path(__file__).parents[2]
FLAGS = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
MEMORY = ("-include", str(Path(__file__).with_name("failing_memory.h")))
# Beyond its time a process starts and finishes its case: Python and NumPy load slowly under a sanitizer. The
# limit is processor time, as a busy machine gives little of it. A process that waits for ever uses none.
GRACE_S = 60
WAITS_S = 1800


@dataclass(frozen=True)
class Sanitized:
    """A core with sanitizers, and the library that must be loaded before everything else."""

    core: Path
    runtime: Path

    def environment(self) -> dict[str, str]:
        """For a process that loads the core."""
        return os.environ | {
            "LD_PRELOAD": str(self.runtime),
            # Python itself leaks; worker.py looks for what grows.
            "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:detect_stack_use_after_return=1",
            "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
            # Each object of Python's in memory of its own, so that reading beyond one is seen.
            "PYTHONMALLOC": "malloc",
            "PYTHONPATH": PYTHONPATH,
        }


def sanitized(folder: Path) -> Sanitized:
    """Compile the core with sanitizers. Raises NotBuilt, and NoCompiler where there are none."""
    program = build.compiler()
    is_clang = "clang" in subprocess.run([*program, "--version"], capture_output=True, text=True).stdout
    name = f"libclang_rt.asan-{os.uname().machine}.so" if is_clang else "libasan.so"
    asked = subprocess.run([*program, f"-print-file-name={name}"], capture_output=True, text=True)
    runtime = Path(asked.stdout.strip())
    if not runtime.is_absolute():
        raise build.NoCompiler(f"{program[0]} has no {name}")
    flags = (*FLAGS, *MEMORY, *(["-shared-libasan"] if is_clang else []))
    return Sanitized(build.build(core=folder / build.NAME, flags=flags), runtime.resolve())


def run(made: Sanitized, target: str, seed: int, seconds: float, case: int | None) -> str:
    """Run one target; what went wrong, or "". Prints how it went."""
    place = made.core.with_name(f"{target}.case")
    command = [sys.executable, "-m", "tests.native.worker", str(made.core), target, str(seed), str(place)]
    command += ["--seconds", str(seconds)] if case is None else ["--case", str(case)]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=made.environment(),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=WAITS_S,
            preexec_fn=partial(_limit, int(seconds) + GRACE_S),
        )
        failed, messages = done.returncode != 0, done.stdout + done.stderr
        how = "it does not end" if done.returncode == -signal.SIGXCPU else f"exit status {done.returncode}"
    except subprocess.TimeoutExpired:
        failed, messages, how = True, "", "it does not end"
    at = place.read_text().strip() if place.exists() else "?"
    if not failed:
        print(f"  {target}: {messages.strip()}", flush=True)
        return ""
    again = f"python -m tests.native.sanitize --only {target} --seed {seed} --case {at}"
    return f"{_of_the_core(messages)}\n{target}: {how} in case {at}; again: {again}"


def _limit(seconds: int) -> None:
    """The processor time of this process, which a signal ends then."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _of_the_core(message: str) -> str:
    """A report without the interpreter's frames."""
    return "\n".join(
        line for line in message.splitlines() if not line.lstrip().startswith("#") or "/native/" in line
    )


def main() -> int:
    """Run the targets; 1 where one of them found something."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120, help="processor time for all targets")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=TARGETS, help="one target")
    parser.add_argument("--case", type=int, help="one case of it")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    if asked.case is not None and asked.only is None:
        parser.error("--case needs --only")
    chosen = [asked.only] if asked.only else list(TARGETS)
    each_s = asked.seconds / len(chosen)
    with tempfile.TemporaryDirectory() as folder:
        try:
            made = sanitized(Path(folder))
        except build.NoCompiler as e:
            print(f"sanitize: skipped: {e}")
            return 0
        except build.NotBuilt as e:
            print(f"sanitize: the core does not compile: {e}", file=sys.stderr)
            return 1
        print(f"sanitize: seed {asked.seed}, {each_s:.0f} s for each of {len(chosen)} targets", flush=True)
        with ThreadPoolExecutor(asked.jobs) as pool:
            results = list(pool.map(lambda name: run(made, name, asked.seed, each_s, asked.case), chosen))
    found = [result for result in results if result]
    for result in found:
        print(result, file=sys.stderr)
    print(f"sanitize: {len(found)} of {len(chosen)} targets failed" if found else "sanitize: nothing found")
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main())
