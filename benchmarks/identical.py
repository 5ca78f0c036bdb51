"""Compares the output of the native core with that of its reference in Python, for a million events.

    python benchmarks/identical.py [EVENTS]        default: 1000000

Each conversion runs in a separate process, and prints the length and hash of its output and what it found.
The exit code is 1 if two differ. The tests compare smaller and more unusual recordings.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path.insert(0, str(HERE.parents[1]))

from benchmarks.recordings import write_lone_warps, write_mixed, write_threads, write_warps  # noqa: E402

CORES = {"native": "0", "pure": "1"}
RECORDINGS: dict[str, Callable[[Path, int], None]] = {
    "mixed": write_mixed,
    "unique": lambda path, events: write_mixed(path, events // 5, unique=True),
    "warps": write_warps,
    "lone": lambda path, events: write_lone_warps(path, events // 10),
    "threads": lambda path, events: write_threads(path, events // 10),
}
FORMATS = ("perfetto", "chrome")


class _Hashing:
    """A stream that keeps the length and the hash of its data."""

    def __init__(self) -> None:
        self._hash, self._bytes = hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        self._bytes += len(data)
        return len(data)

    def digest(self) -> str:
        return f"{self._bytes} bytes, sha256 {self._hash.hexdigest()}"


def convert(source: str, to: str) -> None:
    """Print the result of a conversion in this process."""
    from tracepipe.converters import CONVERTERS
    from tracepipe.native import state
    from tracepipe.recording.account import account_lines
    from tracepipe.recording.convert import Conversion, ConversionOptions

    out = _Hashing()
    account = Conversion(source, CONVERTERS[to], ConversionOptions()).run(out)  # type: ignore[arg-type]
    print(state(), out.digest(), *account_lines(account), sep="\n")


def outcome(core: str, source: Path, to: str) -> list[str]:
    """The result of a conversion with one core, in a separate process."""
    command = [sys.executable, str(HERE), "--convert", str(source), to]
    environment = os.environ | {"TRACEPIPE_PURE": CORES[core]}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    state, *lines = done.stdout.splitlines()
    if not state.startswith(core):
        sys.exit(f"there is nothing to compare: {state}")
    return lines


def main() -> int:
    """Compare all; 1 where outputs differ."""
    if sys.argv[1:2] == ["--convert"]:
        convert(*sys.argv[2:])
        return 0
    events, differ = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000, 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        asked: list[tuple[str, str, list[Future[list[str]]]]] = []
        for name, write in RECORDINGS.items():
            source = Path(folder, f"{name}.jsonl")
            write(source, events)
            asked += [
                (name, to, [pool.submit(outcome, core, source, to) for core in CORES]) for to in FORMATS
            ]
        for name, to, outcomes in asked:
            native, pure = (one.result() for one in outcomes)
            print(f"{name:<8} {to:<9} {'the same' if native == pure else 'DIFFER'}: {native[0]}", flush=True)
            if native != pure:
                differ += 1
                print("native:", *native, "pure:", *pure, sep="\n    ")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
