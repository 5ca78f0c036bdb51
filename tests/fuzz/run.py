"""Runs mutated recordings through every reader, converter, report and command; or mutated programs.

    python -m tests.fuzz.run                                # 75 seconds, as `make test` does
    python -m tests.fuzz.run --seconds 3600 --seed 7
    python -m tests.fuzz.run --programs                     # and of ELF files, cubins and fat binaries
    python -m tests.fuzz.run --seed 7 --case 1234           # one case again
    python -m tests.fuzz.run --seed 7 --case 1234 --keep NAME

Processes share the cases, and each ends with the first that fails; this one then says how to run it again.
`--keep` takes lines away as long as the case fails in the same way, and puts the rest into finds/. The files
there are cases of test_finds.py, and recordings to start from, as those of fixtures/ are.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import FrameType

from tests.fuzz import programs
from tests.fuzz.judge import Asked, judge
from tests.fuzz.mutations import FINDS, recording
from tests.support.program import PYTHONPATH

ROOT = Path(__file__).parents[2]
# Of processor time: the slowest case takes about a second of it, loading the libraries included.
CASE_SECONDS, PROGRAM_SECONDS = 60.0, 10.0
GRACE_S = 180.0
_CUTS_MAX = 400


class TooMuchWork(BaseException):
    """A case that does not end. No Exception, so that nothing takes it for an error of its own."""


def _stop(number: int, frame: FrameType | None) -> None:
    raise TooMuchWork(f"more than {CASE_SECONDS:g} s of processor time")


def run_case(seed: int, case: int, path: Path, *, is_program: bool = False) -> None:
    """Make a case and judge it. Raises what it finds."""
    rng = Random(f"{seed} {case}")
    path.unlink(missing_ok=True)  # it may be a pipe by now
    path.write_bytes(programs.program(rng) if is_program else recording(rng))
    _judge(path, rng, is_program=is_program)


def _judge(path: Path, rng: Random, *, is_program: bool = False) -> None:
    signal.signal(signal.SIGPROF, _stop)
    signal.setitimer(signal.ITIMER_PROF, PROGRAM_SECONDS if is_program else CASE_SECONDS)
    try:
        programs.judge(path, rng) if is_program else judge(path, Asked(rng))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _failure(attempt: Callable[[], None]) -> tuple[str, str, int] | None:
    """In which way an attempt fails: what is raised, and where."""
    try:
        attempt()
    except (Exception, TooMuchWork) as e:
        last = traceback.extract_tb(e.__traceback__)[-1]
        return type(e).__name__, last.filename, last.lineno or 0
    return None


def reduced(seed: int, case: int, path: Path) -> bytes:
    """The recording of a failing case with as few lines as fail in the same way."""
    rng = Random(f"{seed} {case}")
    lines = recording(rng).split(b"\n")
    state = rng.getstate()

    def failure(some: list[bytes]) -> tuple[str, str, int] | None:
        path.write_bytes(b"\n".join(some))
        rng.setstate(state)
        return _failure(lambda: _judge(path, rng))

    wanted, cuts, size = failure(lines), 0, max(1, len(lines) // 2)
    assert wanted is not None, "the case does not fail"
    while size and cuts < _CUTS_MAX:
        at = 0
        while at < len(lines) and cuts < _CUTS_MAX:
            cuts += 1
            fewer = lines[:at] + lines[at + size :]
            if failure(fewer) == wanted:
                lines = fewer
            else:
                at += size
        size //= 2
    return b"\n".join(lines)


def work(asked: argparse.Namespace) -> None:
    """Every `jobs`-th case from `--first` on, until the time is over."""
    end, case = time.monotonic() + asked.seconds, asked.first
    place = os.open(asked.place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with tempfile.TemporaryDirectory() as folder:
        while time.monotonic() < end:
            os.pwrite(place, f"{case:<12}".encode(), 0)
            run_case(asked.seed, case, Path(folder, "input.jsonl"), is_program=asked.programs)
            case += asked.jobs
    print((case - asked.first) // asked.jobs)


def share(asked: argparse.Namespace) -> int:
    """Run the cases in several processes; 1 where one of them found something."""
    print(f"fuzz: seed {asked.seed}, {asked.seconds:g} s in {asked.jobs} processes", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder, str(first)) for first in range(asked.jobs)]
        common = [f"--{name}={getattr(asked, name)}" for name in ("seconds", "seed", "jobs")]
        command = [sys.executable, "-m", "tests.fuzz.run", *common, *["--programs"] * asked.programs]
        started = [
            subprocess.Popen(
                [*command, f"--first={first}", f"--place={place}"],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
                cwd=ROOT, env=os.environ | {"PYTHONPATH": PYTHONPATH},
            )
            for first, place in enumerate(places)
        ]  # fmt: skip
        results = [_result(*one, asked) for one in zip(started, places, strict=True)]
    for found in results:
        if isinstance(found, str):
            print(found, file=sys.stderr)
    count = sum(result for result in results if isinstance(result, int))
    failed = sum(isinstance(result, str) for result in results)
    print(f"fuzz: {failed} failing cases" if failed else f"fuzz: nothing found in {count:,} cases")
    return bool(failed)


def _result(process: subprocess.Popen[str], place: Path, asked: argparse.Namespace) -> int | str:
    """How many cases a process ran, or what it found."""
    try:
        out, err = process.communicate(timeout=asked.seconds + GRACE_S)
        how = f"exit status {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        (out, err), how = process.communicate(), "it does not end"
    if process.returncode == 0:
        return int(out)
    case, words = place.read_text().strip() if place.exists() else "?", " --programs" * asked.programs
    return f"{err}\n{how}; again: python -m tests.fuzz.run{words} --seed {asked.seed} --case {case}"


def main() -> int:
    """Run the cases that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=75)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--case", type=int, help="one case, in this process")
    parser.add_argument("--keep", metavar="NAME", help="with --case: make it small and keep it")
    parser.add_argument("--programs", action="store_true", help="programs and libraries, not recordings")
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.keep and asked.programs:
        parser.error("--keep is for recordings")
    if asked.first is not None:
        work(asked)
        return 0
    if asked.case is None:
        return share(asked)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "input.jsonl")
        if asked.keep:
            kept = FINDS / f"{asked.keep}.jsonl"
            kept.write_bytes(reduced(asked.seed, asked.case, path))
            print(f"kept {kept}")
        else:
            run_case(asked.seed, asked.case, path, is_program=asked.programs)
            print("nothing found")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
