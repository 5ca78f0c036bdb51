"""The libraries of the engines for GPUs, linked to stand-ins of NVIDIA's as to NVIDIA's own.

    kernels.so ──▶ libcupti.so.13          (cupti_standin.cpp)     ──▶ libcuda.so.1 (cuda_standin.cpp)
    stalls.so  ──▶ the same
    warps.so   ──▶ libsanitizer-public.so  (sanitizer_standin.cpp) ──▶ libcuda.so.1 (driver_standin.cpp)
    pm_sampler ──▶ libcupti.so.13          (pm_standin.cpp), which is libcuda.so.1 too

`program` is linked to all of these: its main is that of the stand-in.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

from tests.support.compiled import compiled
from tracepipe.errors import CaptureUnavailable
from tracepipe.tracer.gpu.build.driver import Driver, owner
from tracepipe.tracer.gpu.build.toolchain import Toolchain, find_parts

ROOT = Path(__file__).parents[2]
NATIVE, SOURCES = ROOT / "tracepipe/tracer/gpu/native", ROOT / "tests/gpu"
# Functions are aligned as in NVIDIA's libraries, which are optimized.
FLAGS = ["-std=c++17", "-O0", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", "-falign-functions=16"]
# Engine → NVIDIA's library that it is linked to, with its stand-in, and that of the driver.
_STANDINS = {
    "kernels": ("libcupti.so.13", "cupti_standin.cpp", "cuda_standin.cpp"),
    "stalls": ("libcupti.so.13", "cupti_standin.cpp", "cuda_standin.cpp"),
    "warps": ("libsanitizer-public.so", "sanitizer_standin.cpp", "driver_standin.cpp"),
}


def include_flags() -> list[str]:
    """Where the headers are. Skips where there are none, or no compiler."""
    parts = find_parts()
    if not shutil.which("g++") or not (parts.cupti and parts.sanitizer) or parts.cupti[0].version != (13, 0):
        pytest.skip("there is no g++, or no headers of CUDA 13.0")
    found = {folder: None for part in (parts.cupti[0], parts.sanitizer[0]) for folder in part.include}
    marks = ROOT / "tracepipe/marks/include"
    return [f"-I{NATIVE}", f"-I{marks}", *(f"-isystem{folder}" for folder in found)]


@cache
def _nvcc() -> tuple[str, str]:
    """The path of an nvcc, and what it says of an empty source: "" where it compiles it."""
    try:
        path = str(Toolchain(Driver(error="none in this test"), find_parts(), owner()).nvcc().path)
    except CaptureUnavailable as why:
        return "", why.message
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "empty.cu")
        source.touch()
        done = subprocess.run(
            [path, "-ptx", "-o", f"{folder}/empty.ptx", source], capture_output=True, text=True
        )
    said = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
    return path, f"nvcc compiles nothing here: {said[0] if said else 'no reason'}" if done.returncode else ""


def nvcc() -> str:
    """The path of an nvcc. Skips where there is none, or none that works with the C++ compiler here."""
    path, why_not = _nvcc()
    if why_not:
        pytest.skip(why_not)
    return path


def build_library(library: Path, source: Path, *linked: Path) -> Path:
    """A library of a source or an object, linked to others. Skips where it cannot be built."""
    made = ["-shared", "-fPIC", f"-Wl,-soname,{library.name}"]
    others = [
        "-Wl,--no-as-needed",
        *map(str, linked),
        *(run_path(other, library) for other in linked),
        "-ldl",
    ]
    return compiled(["g++", *FLAGS, *include_flags(), *made, str(source), *others], library)


def run_path(linked: Path, output: Path) -> str:
    """The option that has a library found where it is: mostly in the output's folder, wherever that is."""
    return f"-Wl,-rpath,{'$ORIGIN' if linked.parent == output.parent else linked.parent}"


def build_object(folder: Path, engine: str) -> Path:
    """What is compiled of an engine, which takes seconds: what it is linked to differs."""
    flags = [*FLAGS, *include_flags(), "-fPIC", "-fvisibility=hidden"]
    return compiled(["g++", *flags, "-c", str(NATIVE / f"{engine}.cpp")], folder / f"{engine}.o")


def build_engine(folder: Path, engine: str) -> Path:
    """A folder with the library of an engine, all that it needs, and the program; the library's path."""
    nvidias_name, standin, driver = _STANDINS[engine]
    cuda = build_library(folder / "libcuda.so.1", SOURCES / driver)
    nvidias = build_library(folder / nvidias_name, SOURCES / standin, cuda)
    library = build_library(folder / f"{engine}.so", build_object(folder, engine), nvidias, cuda)
    linked = ["-Wl,--no-as-needed", str(library), str(nvidias), str(cuda), "-Wl,-rpath,$ORIGIN"]
    compiled(["g++", *linked], folder / "program")
    (folder / "patches").write_bytes(b"code")
    return library


def build_sampling(folder: Path) -> Path:
    """A folder with a CUPTI that samples no hardware, and the library itself."""
    cupti = build_library(folder / "libcupti.so.13", SOURCES / "pm_standin.cpp")
    (folder / "libcuda.so.1").symlink_to(cupti.name)
    return cupti
