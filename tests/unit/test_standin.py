"""The stand-ins are what the captures are checked against: their counts and symbols are checked here."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

LEGACY, PER_THREAD = 1, 2
SUCCESS, NOT_FOUND, VERSION_NOT_SUFFICIENT = 0, 1, 2

pytestmark = pytest.mark.skipif(
    not (shutil.which("gcc") and shutil.which("make")), reason="there is no gcc or no make"
)


def run(*command: str | Path) -> str:
    done = subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True)
    assert "\nok: " in "\n" + done.stdout
    return done.stdout


def count(output: str, what: str) -> int:
    return sum(int(n) for n in re.findall(rf"^{what}: (\d+)$", output, re.MULTILINE))


def counts(output: str) -> tuple[int, int, int]:
    return count(output, "calls"), count(output, "driver calls"), count(output, "hidden driver calls")


@pytest.mark.parametrize("program", ["vec_add_runtime", "vec_add_static", "vec_add_stripped"])
def test_a_runtime_call_is_one_driver_call_and_a_hidden_one_for_each_allocation(
    standin: Path, program: str
) -> None:
    once = counts(run(standin / program, "-n", "100", "-i", "2"))
    assert once[2] == 3
    # cudaLaunchKernelExC and the next cudaLaunchKernel; cudaGetLastError calls nothing.
    more = counts(run(standin / program, "-n", "100", "-i", "4"))
    assert [after - before for before, after in zip(once, more, strict=True)] == [6, 4, 0]


def test_the_per_thread_default_stream_has_functions_of_its_own(standin: Path) -> None:
    # Three allocations, two launches of which one is cuLaunchKernelEx, two waits.
    assert counts(run(standin / "vec_add_runtime", "-i", "2", "--per-thread"))[2] == 3 + 1 + 2


def test_each_thread_and_child_counts(standin: Path) -> None:
    assert count(run(standin / "vec_add", "-n", "1000", "-i", "3"), "calls") == 27
    assert count(run(standin / "vec_add", "-n", "1000", "-i", "3", "--threads", "2"), "calls") == 27 + 17
    assert count(run(standin / "vec_add", "-n", "1000", "-i", "3", "--fork"), "calls") == 2 * 27


def test_nccl_calls_are_copies_of_the_driver(standin: Path) -> None:
    output = run(standin / "vec_add", "-n", "1000", "-i", "3", "--nccl")
    assert count(output, "nccl calls") == 3 + 2
    assert count(output, "calls") == 27 + 3


def test_a_paced_run_makes_as_many_events_as_asked_for_and_no_faster(standin: Path) -> None:
    command = [str(standin / "vec_add"), "--threads", "2", "--spin", "5000", "--rate", "100000"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert re.findall(r"thread (\d): (\d+) calls", done.stdout) == [("0", "5000"), ("1", "5000")]
    achieved = re.search(r"(\d+) calls/s", done.stderr)
    # The last call is due at (n - 1) / rate seconds.
    assert achieved is not None
    assert int(achieved[1]) <= 100_000 * 10_000 / 9_999 + 1


def symbols(path: Path, *options: str) -> set[str]:
    listing = subprocess.run(["nm", *options, str(path)], check=False, capture_output=True, text=True)
    return {line.split()[-1] for line in listing.stdout.splitlines()}


def address_of(library: ctypes.CDLL, symbol: str, version: int, flags: int) -> tuple[int | None, int]:
    function, status = ctypes.c_void_p(), ctypes.c_int(-1)
    result = library.cuGetProcAddress_v2(
        symbol.encode(), ctypes.byref(function), version, ctypes.c_ulonglong(flags), ctypes.byref(status)
    )
    assert result == 0
    return function.value, status.value


def test_addresses_are_given_by_name_version_and_stream(standin: Path) -> None:
    library = ctypes.CDLL(str(standin / "libcuda.so.1"), mode=os.RTLD_NOW)

    def exported(symbol: str) -> int | None:
        return ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value

    assert address_of(library, "cuMemFree", 12040, LEGACY) == (exported("cuMemFree_v2"), SUCCESS)
    assert address_of(library, "cuStreamDestroy", 3020, LEGACY) == (exported("cuStreamDestroy"), SUCCESS)
    assert address_of(library, "cuStreamDestroy", 4000, LEGACY) == (exported("cuStreamDestroy_v2"), SUCCESS)
    assert address_of(library, "cuMemAlloc", 12020, LEGACY) == (exported("cuMemAlloc_v2"), SUCCESS)
    assert address_of(library, "cuMemAlloc", 2000, LEGACY) == (None, VERSION_NOT_SUFFICIENT)
    assert address_of(library, "cuMemAlloc_v2", 12040, LEGACY) == (None, NOT_FOUND)
    assert address_of(library, "cuLaunchKernel", 12040, PER_THREAD)[0] == exported("cuLaunchKernel_ptsz")
    hidden = {
        address_of(library, "cuMemAlloc", 12040, LEGACY)[0],
        address_of(library, "cuLaunchKernelEx", 12040, PER_THREAD)[0],
        address_of(library, "cuStreamSynchronize", 12040, PER_THREAD)[0],
    }
    names = symbols(standin / "libcuda.so.1", "-D", "--defined-only")
    assert len(hidden) == 3
    assert hidden.isdisjoint(exported(name) for name in names if name.startswith("cu"))
    assert library.cuGetProcAddress_v2(b"cuInit", ctypes.byref(ctypes.c_void_p()), 99000, 0, None) == 1


def test_the_static_runtime_is_in_the_symbol_table_until_that_is_stripped(standin: Path) -> None:
    assert {"cudaMalloc", "cudaLaunchKernel"} <= symbols(standin / "vec_add_static")
    assert symbols(standin / "vec_add_stripped") == set()
    for program in ("vec_add_static", "vec_add_stripped"):
        assert "cudaMalloc" not in symbols(standin / program, "-D")
