"""One target in a process of its own, as sanitize.py starts it: case after case until its time is over."""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import random
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from tests.native.targets import TARGETS
from tracepipe.native.signatures import declare

_REPEATED = 40
_WARM_RUNS = 20
_OUT_OF_MEMORY = 0.1  # of the cases
_NOISE_BYTES = 8 << 10  # of Python's and NumPy's own


def main() -> None:
    """Run cases, numbered from 0 on; each has its own random numbers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("core", type=Path)
    parser.add_argument("target")
    parser.add_argument("seed", type=int)
    parser.add_argument("place", type=Path, help="where to write which case runs")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--case", type=int)
    asked = parser.parse_args()
    core = declare(ctypes.CDLL(str(asked.core)))
    target = TARGETS[asked.target]
    place = os.open(asked.place, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)

    left = ctypes.c_long.in_dll(core, "allocations_left")

    def run(case: int) -> None:
        os.pwrite(place, f"{case:<12}".encode(), 0)
        rng = random.Random(f"{asked.seed} {asked.target} {case}")
        if rng.random() > _OUT_OF_MEMORY:
            target(core, rng)
            return
        # The result is wrong then, but nothing else may happen.
        left.value = rng.randrange(rng.choice((4, 20, 200)))
        try:
            with suppress(AssertionError, MemoryError):
                target(core, rng)
        finally:
            left.value = -1

    if asked.case is not None:
        run(asked.case)
        print("nothing found")
        return
    end, case = time.monotonic() + asked.seconds, 0
    while time.monotonic() < end:
        run(case)
        case += 1
    _expect_no_leak(run, min(case, _REPEATED))
    print(f"{case:,} cases")


def _expect_no_leak(run: Callable[[int], None], count: int) -> None:
    """The same cases take no more memory each time. Once they may: a module is loaded when it is needed."""
    allocated = ctypes.CDLL(None).__sanitizer_get_current_allocated_bytes
    allocated.restype = ctypes.c_size_t
    sizes = []
    # On a slow machine few cases ran: caches of a bounded size, which a run adds to, are not full yet.
    for at in range(_WARM_RUNS if count else 0):
        run(at % count)
    for _ in range(5):
        for case in range(count):
            run(case)
        gc.collect()
        sizes.append(allocated())
    more = min(after - before for before, after in pairwise(sizes))
    assert more < _NOISE_BYTES, f"{more:,} bytes more are allocated each time that the same cases run"


if __name__ == "__main__":
    main()
