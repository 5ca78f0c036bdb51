"""Builds the native GPU code once on the machine that uses it, with the compilers installed there.

    sources ─┐
    versions ├─ digest ──▶ CACHE/NAME-DIGEST.so │ .fatbin      cache.py has the folders
    options ─┘             used if it is there and safe, else built

The libraries are loaded into the command's process, so files that others could have written are not used.
Compilers run as the user that the command runs as: under sudo, as the caller. As root, no compiler runs and
no library is linked that others can write.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tracepipe.errors import CaptureUnavailable
from tracepipe.tracer.gpu.build.cache import Cache, check_safe
from tracepipe.tracer.gpu.build.cuda_parts import Compiler, Part, Parts, ask, find_gxx, find_parts, run
from tracepipe.tracer.gpu.build.driver import Driver, Owner, Version, ask_driver, owner

NATIVE = Path(__file__).parents[1] / "native"
_EXPORTS = NATIVE / "exports.map"
INSTALL = "pip install 'tracepipe[gpu]'"
INSTALL_GXX = "apt install g++"
_BUILD_TIMEOUT_S = 300
_NAMES = {
    "sanitizer": ("NVIDIA's Compute Sanitizer API", "nvidia-cuda-sanitizer-api"),
    "cupti": ("NVIDIA's CUPTI", "nvidia-cuda-cupti"),
}
_PROGRAM_OPTIONS = ("-std=c++17", "-O2", "-pthread", "-static-libstdc++", "-static-libgcc")
_LIBRARY_OPTIONS = (
    # The command may use an older libstdc++, as conda's programs do.
    *_PROGRAM_OPTIONS,
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
    f"-Wl,--version-script={_EXPORTS}",
)
_PATCH_OPTIONS = ("-std=c++17", "-O3", "--fatbin", "--compile-as-tools-patch", "-allow-unsupported-compiler")


@dataclass(frozen=True, slots=True)
class Toolchain:
    """The driver, the parts to build with, and the owner of the builds."""

    driver: Driver
    parts: Parts
    owner: Owner

    def gxx(self) -> Compiler:
        """The C++ compiler. Raises CaptureUnavailable."""
        if not self.parts.gxx:
            raise CaptureUnavailable(
                "A C++ compiler is needed to build the library, and none was found.", INSTALL_GXX
            )
        return _usable(self.parts.gxx[0])

    def nvcc(self) -> Compiler:
        """The newest nvcc whose code the driver accepts. Raises CaptureUnavailable."""
        if not self.parts.nvcc:
            raise CaptureUnavailable("nvcc is needed to build the GPU code, and none was found.", INSTALL)
        newest = self.driver.cuda[0]
        # Within a major version, older drivers run the machine code of newer compilers.
        fitting = [nvcc for nvcc in self.parts.nvcc if not newest or nvcc.version[0] <= newest]
        if not fitting:
            found = _text(self.parts.nvcc[0].version)
            raise CaptureUnavailable(
                f"nvcc {found} is too new for this driver (CUDA {_text(self.driver.cuda)}).",
                _install_nvcc(self.driver.cuda),
            )
        _usable(fitting[0])
        if fitting[0].mixed:
            raise CaptureUnavailable(
                f"nvcc {_text(fitting[0].version)} does not work with {' and '.join(fitting[0].mixed)}.",
                _install_nvcc(fitting[0].version),
            )
        return fitting[0]

    def part(self, name: str) -> Part:
        """The newest `sanitizer` or `cupti` that is not newer than the driver. Raises CaptureUnavailable."""
        found: list[Part] = getattr(self.parts, name)
        title, package = _NAMES[name]
        if not found:
            raise CaptureUnavailable(f"{title} is not installed.", INSTALL)
        newest = self.driver.cuda
        for part in found:
            if newest == (0, 0) or part.version is None or part.version <= newest:
                return part
        raise CaptureUnavailable(
            f"{title} is for CUDA {_text(found[-1].version)}, and the driver supports CUDA {_text(newest)}.",
            _pip(newest, package),
        )

    def architectures(self) -> tuple[str, ...]:
        """The architectures of the present GPUs. Raises CaptureUnavailable if there are none."""
        if not self.driver.gpus:
            raise CaptureUnavailable(
                f"CUDA sees no GPU: {self.driver.error or 'the driver reports none'}.",
                "Run nvidia-smi to see whether the driver finds one.",
            )
        return self.driver.architectures

    def build_host(self, name: str, sources: Sequence[Path], against: Sequence[str] = ()) -> Path:
        """Build a library for the command's process from C++ `sources`, linked to the parts `against`.

        Raises CaptureUnavailable.
        """
        return self._build_host(name, ".so", _LIBRARY_OPTIONS, sources, against)

    def build_program(self, name: str, sources: Sequence[Path], against: Sequence[str] = ()) -> Path:
        """Build a program that runs as the owner from C++ `sources`, linked to the parts `against`.

        Raises CaptureUnavailable.
        """
        return self._build_host(name, "", _PROGRAM_OPTIONS, sources, against)

    def _build_host(
        self, name: str, ending: str, options: Sequence[str], sources: Sequence[Path], against: Sequence[str]
    ) -> Path:
        gxx, parts = self.gxx(), [self.part(part) for part in against]
        include = [f"-I{folder}" for folder in dict.fromkeys(source.parent for source in sources)]
        for part in parts:
            include += [f"-isystem{folder}" for folder in part.include]
            if self.owner.uid == 0:
                check_safe(part.library, {0})
        # RPATH, as CUPTI opens a library next to itself by its bare name: RUNPATH is not searched for that.
        libraries = [*map(str, (part.library for part in parts)), "-Wl,--disable-new-dtags"]
        libraries += [f"-Wl,-rpath,{part.library.parent}" for part in parts]
        command = [str(gxx.path), *options, *include, *map(str, sources), *libraries, "-ldl"]
        versions = [gxx.words, *(_text(part.version) for part in parts)]
        return self._build(name, ending, sources, command, versions)

    def build_patches(
        self,
        name: str,
        source: Path,
        architectures: Sequence[str] = (),
        defines: Mapping[str, int] | None = None,
    ) -> Path:
        """Build device patches from a .cu source: a fatbin with code for `architectures`, such as `sm_90`.

        The default is those of the present GPUs. `defines` are macros of the preprocessor. Raises
        CaptureUnavailable.
        """
        wanted = architectures or self.architectures()
        self.gxx()  # nvcc needs it
        nvcc, sanitizer = self.nvcc(), self.part("sanitizer")
        known = self._codes(nvcc)
        codes = list(dict.fromkeys(_code_for(wish, known, nvcc) for wish in wanted))
        targets = [f"-gencode=arch=compute_{code[3:]},code={code}" for code in codes]
        include = [f"-I{source.parent}"] + [f"-I{folder}" for folder in sanitizer.include]
        macros = [f"-D{macro}={value}" for macro, value in (defines or {}).items()]
        command = [str(nvcc.path), *_PATCH_OPTIONS, *macros, *targets, *include, str(source)]
        return self._build(name, ".fatbin", [source], command, [nvcc.words, _text(sanitizer.version)])

    def _build(
        self, name: str, ending: str, sources: Sequence[Path], command: list[str], versions: list[str]
    ) -> Path:
        file, cache = f"{name}-{_digest(sources, command, versions)}{ending}", Cache(self.owner)
        failure = f"{name} could not be built"
        return cache.find(file) or cache.make(
            file,
            lambda path: run(command, self.owner, failure=failure, timeout_s=_BUILD_TIMEOUT_S, output=path),
        )

    def _codes(self, nvcc: Compiler) -> list[str]:
        """The architectures for which a compiler generates machine code: `sm_75`, …"""
        failure = f"nvcc {_text(nvcc.version)} does not list the GPUs that it generates code for"
        output = ask(nvcc.path, "--list-gpu-code", self.owner, failure=failure)
        return [word for word in output.split() if word[3:].isdigit()]


def this_toolchain() -> Toolchain:
    """The toolchain of this machine, for the user who runs the command."""
    return toolchain_for(owner())


def toolchain_for(user: Owner) -> Toolchain:
    """The toolchain of this machine, for a user whose processes will load the builds."""
    return Toolchain(ask_driver(), find_parts(user=user), user)


def host_toolchain() -> Toolchain:
    """A toolchain with only the C++ compiler, for libraries that need neither the driver nor nvcc."""
    user = owner()
    return Toolchain(Driver(), Parts(find_gxx(os.environ.get("PATH", os.defpath), user)), user)


def _digest(sources: Sequence[Path], command: list[str], versions: list[str]) -> str:
    """A digest of what the build depends on: sources, headers next to them, exports, compilers, options."""
    digest = hashlib.sha256()
    headers = {header for source in sources for header in source.parent.glob("*.h")}
    for file in (*sources, *sorted(headers), _EXPORTS):
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)}\n".encode())
        digest.update(content)
    digest.update("\n".join([platform.machine(), *command, *versions]).encode())
    return digest.hexdigest()[:16]


def _code_for(wish: str, known: list[str], nvcc: Compiler) -> str:
    """The architecture itself, or the newest earlier one of its major version, whose code it can run."""
    if not wish.startswith("sm_") or not wish[3:].isdigit():
        raise CaptureUnavailable(f"{wish} is not a GPU architecture.", "Write it as sm_90.")
    number = int(wish[3:])
    fitting = [int(code[3:]) for code in known if number // 10 * 10 <= int(code[3:]) <= number]
    if not fitting:
        raise CaptureUnavailable(f"nvcc {_text(nvcc.version)} generates no code for {wish}.", INSTALL)
    return f"sm_{max(fitting)}"


def _usable(compiler: Compiler) -> Compiler:
    """The compiler. Raises CaptureUnavailable if it cannot be used."""
    if compiler.refusal:
        raise compiler.refusal
    return compiler


def _text(version: Version | None) -> str:
    return f"{version[0]}.{version[1]}" if version else "unknown version"


def _pip(cuda: Version, *packages: str) -> str:
    """The command that installs parts from PyPI. Up to CUDA 12, a package's name ends with the version."""
    suffix = "" if cuda[0] >= 13 else f"-cu{cuda[0]}"
    return "pip install " + " ".join(f"'{package}{suffix}=={_text(cuda)}.*'" for package in packages)


def _install_nvcc(cuda: Version) -> str:
    """The command that installs nvcc. PyPI has it from 13.0 on, without the versions of packages it needs."""
    if cuda[0] < 13:
        return f"apt install cuda-nvcc-{cuda[0]}-{cuda[1]}   (from NVIDIA's repository)"
    return _pip(cuda, "nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt")
