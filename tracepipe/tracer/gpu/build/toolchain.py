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
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from tracepipe import paths
from tracepipe.errors import CaptureUnavailable
from tracepipe.tracer.gpu.build.cache import Cache, check_safe
from tracepipe.tracer.gpu.build.driver import Driver, Owner, Version, ask_driver, owner

_ASK_TIMEOUT_S: Final = 20
_LINES_SHOWN: Final = 3
_LINE_MAX: Final = 200
_ROOM_BYTES: Final = 1 << 20  # a compiler needs more than that
_NO_ROOM: Final = re.compile("No space left on device|Disk quota exceeded")


def run(
    command: Sequence[str],
    user: Owner,
    *,
    failure: str,
    timeout_s: float = _ASK_TIMEOUT_S,
    output: Path | None = None,
) -> str:
    """Run a compiler, and return what it prints. Only the user can write the file that it makes, `output`.
    Raises CaptureUnavailable, whose message begins with `failure`.
    """
    environment = {**os.environ, "HOME": str(user.home), "LC_ALL": "C"}
    try:
        done: subprocess.CompletedProcess[str] = subprocess.run(
            [*command, *(["-o", str(output)] if output else [])],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            umask=0o022,
            env=environment,
            cwd="/",
            **user.run_as,
        )
    except subprocess.TimeoutExpired:
        raise CaptureUnavailable(
            f"{failure}: it did not end within {timeout_s} s.",
            "Check whether the machine is busy, and try again.",
        ) from None
    except (OSError, subprocess.SubprocessError) as error:
        raise CaptureUnavailable(f"{failure}: {error}.", f"Check that {command[0]} works.") from None
    if done.returncode:
        raise _refusal(failure, command, done, output)
    return done.stdout


def _refusal(
    failure: str, command: Sequence[str], done: subprocess.CompletedProcess[str], output: Path | None
) -> CaptureUnavailable:
    lines = [line.strip()[:_LINE_MAX] for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()] or lines
    first = errors[0].rstrip(".") if errors else f"it ended with {done.returncode} and wrote nothing"
    shown = f" Its output: {' | '.join(lines[-_LINES_SHOWN:])}" if len(lines) > 1 else ""
    temporary = Path(os.environ.get("TMPDIR") or "/tmp")
    if not os.access(temporary, os.W_OK | os.X_OK):
        return CaptureUnavailable(
            f"{failure}: {first}.",
            f"Set TMPDIR to a writable folder, which {temporary} is not.{shown}",
        )
    full = [folder for folder in [temporary, *([output.parent] if output else [])] if _is_full(folder)]
    if full or _NO_ROOM.search(done.stderr):
        where = " and ".join(map(str, full or [temporary]))
        hint = f"Free some space in {where}" + (
            ", or set TMPDIR to a folder with free space." if temporary in full or not full else "."
        )
        return CaptureUnavailable(f"{failure}, as the disk is full: {first}.", hint + shown)
    return CaptureUnavailable(f"{failure}: {first}.", f"Run it to see why: {' '.join(command)}{shown}")


def _is_full(folder: Path) -> bool:
    try:
        state = os.statvfs(folder)
    except OSError:
        return False
    return state.f_bavail * state.f_frsize < _ROOM_BYTES or (state.f_files > 0 and not state.f_favail)


_TARGETS = {"x86_64": ("x86_64-linux",), "aarch64": ("sbsa-linux", "aarch64-linux")}
_HEADERS = ("include", "extras/CUPTI/include", "compute-sanitizer/include")
_LIBRARIES = ("lib", "lib64", "extras/CUPTI/lib64", "compute-sanitizer")
INSTALL_AS_ROOT = "Use sudo as the user who owns it, or install it as root."


@dataclass(frozen=True, slots=True)
class Part:
    """A library of NVIDIA that code can be built with: its header files and the library itself.

    `include` are the folders of its header and of cuda.h. `version` is that of the CUDA that it belongs to,
    None if it is not known.
    """

    include: tuple[Path, ...]
    library: Path
    version: Version | None


@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler and its version.

    `words` is its output for --version. `mixed` names packages of another version that it cannot work with:
    `nvidia-nvvm 13.5`. `refusal` states why it cannot be used: it does not run, or it would run as root and
    others could have written it. Its version is not known then.
    """

    path: Path
    version: Version
    words: str
    mixed: tuple[str, ...] = ()
    refusal: CaptureUnavailable | None = None


@dataclass(frozen=True, slots=True)
class Parts:
    """The compilers and libraries of this machine, best first; each list may be empty."""

    gxx: list[Compiler] = field(default_factory=list)
    nvcc: list[Compiler] = field(default_factory=list)
    sanitizer: list[Part] = field(default_factory=list)
    cupti: list[Part] = field(default_factory=list)


def find_parts(
    environment: Mapping[str, str] | None = None,
    packages: Iterable[Path] | None = None,
    root: Path = Path("/"),
    user: Owner | None = None,
) -> Parts:
    """The parts that this machine has, of these folders:

    toolkit      bin/nvcc   include/ or targets/*/include/   lib64/, targets/*/lib/
                 compute-sanitizer/{include/sanitizer.h, libsanitizer-public.so}
                 extras/CUPTI/{include/cupti.h, lib64/libcupti.so}
    PyPI, 13.x   site-packages/nvidia/cu13/{bin,include,lib}                  all parts in one
    PyPI, 12.x   site-packages/nvidia/{cuda_cupti,cuda_sanitizer_api,cuda_runtime}/{include,lib}   no nvcc
    Debian       /usr/{bin,include}, /usr/lib/x86_64-linux-gnu

    `packages` are folders of Python packages, by default those of this
    Python. Compilers report their versions as `user`, by default the user that the command runs as.
    """
    user = user or owner()
    environment = os.environ if environment is None else environment
    packages = [Path(folder) for folder in sys.path if folder] if packages is None else list(packages)
    search = environment.get("PATH", os.defpath)
    kits = _kits(environment, packages, root)
    nvcc = [str(kit / "bin/nvcc") for kit in kits] + [shutil.which("nvcc", path=search)]
    return Parts(
        find_gxx(search, user),
        sorted(
            (_with_packages(found, packages) for found in _compilers(nvcc, user)),
            key=lambda found: (not found.refusal, not found.mixed, found.version),
            reverse=True,
        ),
        _parts(kits, packages, "sanitizer.h", "libsanitizer-public.so"),
        _parts(kits, packages, "cupti.h", "libcupti.so*"),
    )


def find_gxx(search: str, user: Owner) -> list[Compiler]:
    """The C++ compilers of a search path, best first."""
    return _compilers((shutil.which(name, path=search) for name in ("g++", "c++", "clang++")), user)


def _kits(environment: Mapping[str, str], packages: list[Path], root: Path) -> list[Path]:
    """Folders with some or all of the parts; folders that the user has named come first."""
    nvcc = shutil.which("nvcc", path=environment.get("PATH", os.defpath))
    found = [
        *(Path(environment[name]) for name in ("CUDA_HOME", "CUDA_PATH") if environment.get(name)),
        *(kit for package in packages for kit in reversed(paths.fitting(package, "nvidia/*"))),
        *([Path(nvcc).resolve().parent.parent] if nvcc else []),
        root / "usr/local/cuda",
        *reversed(paths.fitting(root / "usr/local", "cuda-*")),
        root / "opt/cuda",
        root / "usr",
    ]
    kits: dict[Path, Path] = {}
    for kit in found:
        if os.access(kit, os.R_OK | os.X_OK):  # /usr/local/cuda is a link to one of the others
            kits.setdefault(kit.resolve(), kit)
    return list(kits.values())


def _parts(kits: list[Path], packages: list[Path], header: str, library: str) -> list[Part]:
    """Kits that have both the header and the library, newest version first."""
    found = []
    for kit in kits:
        folders = _folders(kit, _HEADERS, "include")
        headers = [folder for folder in folders if os.access(folder / header, os.R_OK)]
        # Packages of 12.x have separate folders: cuda.h is in that of the runtime.
        folders += [kit.parent / "cuda_runtime/include"] if kit.parent.name == "nvidia" else []
        cuda = [folder for folder in folders if os.access(folder / "cuda.h", os.R_OK)]
        files = [
            path for folder in _folders(kit, _LIBRARIES, "lib") for path in paths.fitting(folder, library)
        ]
        if headers and files and cuda:
            include = tuple(dict.fromkeys((headers[0], cuda[0])))
            package = "nvidia_cuda_cupti" if "cupti" in library else "nvidia_cuda_sanitizer_api"
            version = _package_version(kit, packages, package) or _version(cuda[0])
            found.append(Part(include, files[0], version))
    return sorted(found, key=lambda part: part.version or (0, 0), reverse=True)


def _folders(kit: Path, names: tuple[str, ...], inside: str) -> list[Path]:
    """The folders where a kit may have files of a kind."""
    machine = platform.machine()
    targets = [kit / "targets" / target / inside for target in _TARGETS.get(machine, ())]
    return [
        *(kit / name for name in names),
        *targets,
        *([kit / f"lib/{machine}-linux-gnu"] * (inside == "lib")),
    ]


def _package_version(kit: Path, packages: list[Path], name: str) -> Version | None:
    """`nvidia_cuda_cupti-13.0.85.dist-info` → (13, 0), if the kit belongs to a package."""
    for package in packages:
        if package / "nvidia" == kit.parent:
            for info in paths.fitting(package, f"{name}*-*.dist-info"):
                found = re.search(r"-(\d+)\.(\d+)[.\d]*\.dist-info$", info.name)
                if found:
                    return int(found[1]), int(found[2])
    return None


def _with_packages(nvcc: Compiler, packages: list[Path]) -> Compiler:
    """The compiler with the packages that are incompatible with it. `nvidia-cuda-nvcc` accepts any version of
    the packages that it needs, but ptxas refuses the output of a newer cicc.
    """
    kit, mixed = nvcc.path.parent.parent, []
    for name in ("nvidia_nvvm", "nvidia_cuda_crt"):
        version = _package_version(kit, packages, name)
        if version not in (None, nvcc.version):
            mixed.append(f"{name.replace('_', '-')} {version[0]}.{version[1]}" if version else "")
    return replace(nvcc, mixed=tuple(mixed))


def _version(include: Path) -> Version | None:
    """`#define CUDA_VERSION 13000` of cuda.h → (13, 0)."""
    try:
        text = (include / "cuda.h").read_text(errors="replace")
    except OSError:
        return None
    found = re.search(r"^#define\s+CUDA_VERSION\s+(\d+)", text, re.MULTILINE)
    return (int(found[1]) // 1000, int(found[1]) % 1000 // 10) if found else None


def _compilers(paths: Iterable[str | None], user: Owner) -> list[Compiler]:
    """The compilers that exist and report a version, usable ones first."""
    found: dict[Path, Compiler] = {}
    for path in paths:
        if not path or not os.access(path, os.X_OK) or Path(path).resolve() in found:
            continue
        try:
            if user.uid == 0:
                try:
                    check_safe(Path(path), {0})
                except CaptureUnavailable as unsafe:
                    why = f"{path} is not run as root: {unsafe.message}"
                    raise CaptureUnavailable(why, INSTALL_AS_ROOT) from None
            output = run([path, "--version"], user, failure=f"{path} does not show its version")
        except CaptureUnavailable as refusal:
            found[Path(path).resolve()] = Compiler(Path(path), (0, 0), "", refusal=refusal)
            continue
        # `Cuda compilation tools, release 13.0, V13.0.88`; `g++ (Debian 12.2.0-14) 12.2.0`
        version = re.search(r"release (\d+)\.(\d+)", output) or re.search(
            r"(\d+)\.(\d+)[.\d]*$", output.partition("\n")[0]
        )
        if version:
            number = int(version[1]), int(version[2])
            found[Path(path).resolve()] = Compiler(Path(path), number, output.strip())
    return sorted(found.values(), key=lambda compiler: bool(compiler.refusal))


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
        if self.parts.gxx[0].refusal:
            raise self.parts.gxx[0].refusal
        return self.parts.gxx[0]

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
        if fitting[0].refusal:
            raise fitting[0].refusal
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

    def build_host(self, source: Path, against: Sequence[str] = (), *, is_program: bool = False) -> Path:
        """Build a library for the command's process, or a program that runs as the owner, from a C++ source,
        linked to the parts `against`. Raises CaptureUnavailable.
        """
        options = _PROGRAM_OPTIONS if is_program else _LIBRARY_OPTIONS
        gxx, parts = self.gxx(), [self.part(part) for part in against]
        include = [f"-I{source.parent}"]
        for part in parts:
            include += [f"-isystem{folder}" for folder in part.include]
            if self.owner.uid == 0:
                check_safe(part.library, {0})
        # RPATH, as CUPTI opens a library next to itself by its bare name: RUNPATH is not searched for that.
        libraries = [*map(str, (part.library for part in parts)), "-Wl,--disable-new-dtags"]
        libraries += [f"-Wl,-rpath,{part.library.parent}" for part in parts]
        command = [str(gxx.path), *options, *include, str(source), *libraries, "-ldl"]
        versions = [gxx.words, *(_text(part.version) for part in parts)]
        return self._build(source, "" if is_program else ".so", command, versions)

    def build_patches(
        self, source: Path, architectures: Sequence[str] = (), defines: Mapping[str, int] | None = None
    ) -> Path:
        """Build device patches from a .cu source: a fatbin with code for `architectures`, such as `sm_90`.

        The default is those of the present GPUs. `defines` are macros of the preprocessor. Raises
        CaptureUnavailable.
        """
        wanted = architectures or self.architectures()
        self.gxx()  # nvcc needs it
        nvcc, sanitizer = self.nvcc(), self.part("sanitizer")
        failure = f"nvcc {_text(nvcc.version)} does not list the GPUs that it generates code for"
        listed = run([str(nvcc.path), "--list-gpu-code"], self.owner, failure=failure)
        known = [word for word in listed.split() if word[3:].isdigit()]  # `sm_75`, …
        numbers: dict[int, None] = {}
        for wish in wanted:
            if not wish.startswith("sm_") or not wish[3:].isdigit():
                raise CaptureUnavailable(f"{wish} is not a GPU architecture.", "Write it as sm_90.")
            # The architecture itself, or the newest earlier one of its major version, whose code it can run.
            first, last = int(wish[3:]) // 10 * 10, int(wish[3:])
            fitting = [int(code[3:]) for code in known if first <= int(code[3:]) <= last]
            if not fitting:
                raise CaptureUnavailable(f"nvcc {_text(nvcc.version)} generates no code for {wish}.", INSTALL)
            numbers[max(fitting)] = None
        targets = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in numbers]
        include = [f"-I{source.parent}"] + [f"-I{folder}" for folder in sanitizer.include]
        macros = [f"-D{macro}={value}" for macro, value in (defines or {}).items()]
        command = [str(nvcc.path), *_PATCH_OPTIONS, *macros, *targets, *include, str(source)]
        return self._build(source, ".fatbin", command, [nvcc.words, _text(sanitizer.version)])

    def _build(self, source: Path, ending: str, command: list[str], versions: list[str]) -> Path:
        """The build, from the cache if one is there of the same source, headers, compilers and options."""
        digest = hashlib.sha256()
        for file in (source, *sorted(source.parent.glob("*.h")), _EXPORTS):
            content = file.read_bytes()
            digest.update(f"{file.name} {len(content)}\n".encode())
            digest.update(content)
        digest.update("\n".join([platform.machine(), *command, *versions]).encode())
        build, cache = f"{source.stem}-{digest.hexdigest()[:16]}{ending}", Cache(self.owner)
        failure = f"{source.stem} could not be built"
        return cache.find(build) or cache.make(
            build,
            lambda path: run(command, self.owner, failure=failure, timeout_s=_BUILD_TIMEOUT_S, output=path),
        )


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
