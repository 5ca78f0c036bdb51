"""Makes tracepipe/tracer/gpu/native/api_parameters.txt: where tools find the arguments of CUDA functions.

    python scripts/api_parameters.py FOLDER[,FOLDER…] … > tracepipe/tracer/gpu/native/api_parameters.txt

Each argument is a version of CUDA: the folders with its headers (cuda.h, cuda_runtime_api.h, and CUPTI's
generated_cuda_meta.h and its siblings, which draw the struct that callbacks get). g++ says where each member
is. What is written is what all versions have in common: a program can have an older runtime than its driver.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

HEADERS = ("generated_cuda_meta.h", "generated_cuda_runtime_api_meta.h")
# Structs with the sizes of a launch, which are read through a pointer.
POINTED = {"CUlaunchConfig": "CUlaunchConfig", "cudaLaunchConfig": "cudaLaunchConfig_t"}
# What nvcc 13 writes for <<<…>>> has no struct there; crt/host_runtime.h has the same C parameters.
ALIKE = {"__cudaLaunchKernel": "cudaLaunchKernel", "__cudaLaunchKernel_ptsz": "cudaLaunchKernel_ptsz"}
HEAD = """\
# Made by scripts/api_parameters.py: members of CUDA's structs NAME_params, as far as CUDA {} agree.
# NAME, and of each parameter OFFSET+BYTES, and >BYTES of what it points to where that has a size.
"""

# Replaces a header of a separate NVIDIA package (nvidia-cuda-crt), without what could change a struct's
# layout.
CRT = """\
#pragma once
#define __host__
#define __device__
#define __global__
#define __cudart_builtin__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __forceinline__ inline
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __builtin_align__(bytes) __align__(bytes)
#define CUDARTAPI
#define CUDARTAPI_CDECL
"""

_STRUCT = re.compile(r"typedef struct (\w+)_params_st \{(.*?)\} \1_params;", re.DOTALL)
_VERSION = re.compile(r"_v\d{4,5}$")  # CUPTI appends it to a runtime function: cudaMalloc_v3020
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_PROGRAM = """\
#include <cstddef>
#include <cstdio>
#include <type_traits>
{includes}
template <class T> constexpr std::size_t pointed() {{
    using To = std::remove_pointer_t<T>;
    if constexpr (!std::is_pointer_v<T> || std::is_void_v<To> || std::is_function_v<To>) return 0;
    else if constexpr (!requires {{ sizeof(To); }}) return 0;
    else return sizeof(To);
}}
#define PARAMETER(s, m) std::printf(" %zu+%zu>%zu", offsetof(s, m), sizeof(s::m), pointed<decltype(s::m)>());
int main() {{
{body}
}}
"""


class Parameter(NamedTuple):
    """A member of a function's struct; `pointed_bytes` is 0 unless it points to something with a size."""

    offset: int
    size_bytes: int
    pointed_bytes: int


Parameters = dict[str, list[Parameter]]


def of_version(folders: list[Path], scratch: Path) -> tuple[str, Parameters]:
    """A version of CUDA and the parameters of its functions."""
    version = ""
    structs: list[tuple[str, str, list[str]]] = []
    found = {name: folder / name for folder in folders for name in HEADERS if (folder / name).is_file()}
    for name in HEADERS:
        text = _COMMENT.sub("", found[name].read_text())
        for match in _STRUCT.finditer(text):
            members = [_member(part) for part in match[2].split(";") if part.strip()]
            structs.append((_VERSION.sub("", match[1]), f"{match[1]}_params", members))
    for folder in folders:
        if (folder / "cuda.h").is_file():
            text = (folder / "cuda.h").read_text(errors="replace")
            number = int(re.search(r"#define CUDA_VERSION (\d+)", text)[1])  # type: ignore[index]
            version = f"{number // 1000}.{number % 1000 // 10}"
            structs.append(("CUlaunchConfig", "CUlaunchConfig", _members_of("CUlaunchConfig_st", text)))
        if (folder / "driver_types.h").is_file():
            text = (folder / "driver_types.h").read_text(errors="replace")
            members = _members_of("cudaLaunchConfig_st", text)
            structs.append(("cudaLaunchConfig", "cudaLaunchConfig_t", members))
    parameters = _measure(structs, folders, scratch)
    return version, parameters


def common(versions: list[Parameters]) -> Parameters:
    """The first parameters of a function, as far as all versions that have it agree."""
    names = sorted({name for version in versions for name in version})
    agreed = {}
    for name in names:
        known = [version[name] for version in versions if name in version]
        same = takewhile(
            lambda one: len({(*p[:2], p.pointed_bytes > 0) for p in one}) == 1, zip(*known, strict=False)
        )
        agreed[name] = [Parameter(*one[0][:2], min(p.pointed_bytes for p in one)) for one in same]
    for name, other in ALIKE.items():
        agreed[name] = agreed[other]
    return agreed


def written(parameters: Parameters, versions: list[str]) -> str:
    """The contents of the file."""
    lines = [HEAD.format(", ".join(versions))]
    for name, members in sorted(parameters.items()):
        words = [
            f"{p.offset}+{p.size_bytes}" + (f">{p.pointed_bytes}" if p.pointed_bytes else "") for p in members
        ]
        lines.append(" ".join([name, *words]) + "\n")
    return "".join(lines)


def _member(declaration: str) -> str:
    match = re.search(r"\(\s*\*\s*(\w+)\s*\)", declaration) or re.search(
        r"(\w+)\s*(?:\[.*\])?\s*$", declaration
    )
    if match is None:
        raise ValueError(f"cannot read the member {declaration!r}")
    return match[1]


def _members_of(struct: str, text: str) -> list[str]:
    match = re.search(rf"struct\s+{struct}\s*\{{(.*?)\}}", _COMMENT.sub("", text), re.DOTALL)
    return [_member(part) for part in match[1].split(";") if part.strip()] if match else []


def _measure(structs: list[tuple[str, str, list[str]]], folders: list[Path], scratch: Path) -> Parameters:
    body = "\n".join(
        f'std::printf("{name}"); '
        + " ".join(f"PARAMETER({struct}, {m})" for m in members)
        + ' std::puts("");'
        for name, struct, members in structs
        if members
    )
    includes = "\n".join(f'#include "{name}"' for name in ("cuda.h", "cuda_runtime_api.h", *HEADERS))
    source, program = scratch / "parameters.cpp", scratch / "parameters"
    source.write_text(_PROGRAM.format(includes=includes, body=body))
    (scratch / "crt").mkdir()
    (scratch / "crt/host_defines.h").write_text(CRT)
    where = [*(f"-isystem{folder}" for folder in folders), f"-idirafter{scratch}"]
    command = [
        "g++",
        "-std=c++20",
        "-O0",
        "-w",
        "-fmax-errors=1",
        "-D__CUDA_API_VERSION_INTERNAL",
        *where,
        str(source),
        "-o",
        str(program),
    ]
    subprocess.run(command, check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    parameters: Parameters = {}
    for line in printed.splitlines():
        name, *members = line.split(" ")
        read = [Parameter(*map(int, re.split(r"[+>]", member))) for member in members]
        # CUPTI has two versions of the function, but reports only the name to a tool.
        known = parameters.setdefault(name, read)
        if known != read:
            parameters[name] = common([{name: known}, {name: read}])[name]
    return parameters


def main(arguments: list[str]) -> None:
    """Write the file for the versions in the named folders."""
    versions = []
    for argument in arguments:
        with tempfile.TemporaryDirectory() as scratch:
            versions.append(of_version([Path(folder) for folder in argument.split(",")], Path(scratch)))
    sys.stdout.write(written(common([found for _, found in versions]), [name for name, _ in versions]))


if __name__ == "__main__":
    main(sys.argv[1:])
