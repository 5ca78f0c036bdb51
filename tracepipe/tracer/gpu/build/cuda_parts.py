"""Finds the tools and libraries to build native GPU code: g++, nvcc, the Compute Sanitizer API and CUPTI.

The parts are in these folders:

    toolkit      bin/nvcc   include/ or targets/*/include/   lib64/, targets/*/lib/
                 compute-sanitizer/{include/sanitizer.h, libsanitizer-public.so}
                 extras/CUPTI/{include/cupti.h, lib64/libcupti.so}
    PyPI, 13.x   site-packages/nvidia/cu13/{bin,include,lib}                  all parts in one
    PyPI, 12.x   site-packages/nvidia/{cuda_cupti,cuda_sanitizer_api,cuda_runtime}/{include,lib}   no nvcc
    Debian       /usr/{bin,include}, /usr/lib/x86_64-linux-gnu
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from tracepipe import paths
from tracepipe.errors import CaptureUnavailable
from tracepipe.tracer.gpu.build.cache import check_safe
from tracepipe.tracer.gpu.build.driver import Owner, Version, owner

_LINES_SHOWN: Final = 3
_LINE_MAX: Final = 200
_ROOM_BYTES: Final = 1 << 20  # a compiler needs more than that
_NO_ROOM: Final = re.compile("No space left on device|Disk quota exceeded")


def run(
    command: Sequence[str], user: Owner, *, failure: str, timeout_s: float, output: Path | None = None
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
    full = [
        folder for folder in (temporary, output.parent if output else None) if folder and _is_full(folder)
    ]
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
_ASK_TIMEOUT_S = 20
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
    """What was found, best first; each list may be empty."""

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
    """The parts that this machine has. `packages` are folders of Python packages, by default those of this
    Python. Compilers report their versions as `user`, by default the user that the command runs as.
    """
    user = user or owner()
    environment = os.environ if environment is None else environment
    packages = [Path(folder) for folder in sys.path if folder] if packages is None else list(packages)
    search = environment.get("PATH", os.defpath)
    kits = list(_kits(environment, packages, root))
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


def _kits(environment: Mapping[str, str], packages: list[Path], root: Path) -> Iterator[Path]:
    """Folders with some or all of the parts; folders that the user has named come first."""
    found: dict[Path, None] = {}
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if environment.get(name):
            found[Path(environment[name])] = None
    for package in packages:
        found.update(dict.fromkeys(reversed(paths.fitting(package, "nvidia/*"))))
    nvcc = shutil.which("nvcc", path=environment.get("PATH", os.defpath))
    if nvcc:
        found[Path(nvcc).resolve().parent.parent] = None
    found[root / "usr/local/cuda"] = None
    found.update(dict.fromkeys(reversed(paths.fitting(root / "usr/local", "cuda-*"))))
    found.update(dict.fromkeys([root / "opt/cuda", root / "usr"]))
    known = set()
    for kit in found:
        # /usr/local/cuda is a link to one of the others.
        if os.access(kit, os.R_OK | os.X_OK) and kit.resolve() not in known:
            known.add(kit.resolve())
            yield kit


def _parts(kits: list[Path], packages: list[Path], header: str, library: str) -> list[Part]:
    """Kits that have both the header and the library, newest version first."""
    found = []
    for kit in kits:
        headers = [folder for folder in _folders(kit, _HEADERS, "include") if _is_file(folder / header)]
        files = [
            file for folder in _folders(kit, _LIBRARIES, "lib") for file in paths.fitting(folder, library)
        ]
        if not headers or not files:
            continue
        cuda = [folder for folder in _folders(kit, _HEADERS, "include") if _is_file(folder / "cuda.h")]
        # Packages of 12.x have separate folders: cuda.h is in that of the runtime.
        of_runtime = [kit.parent / "cuda_runtime/include"] if kit.parent.name == "nvidia" else []
        cuda += [folder for folder in of_runtime if _is_file(folder / "cuda.h")]
        if cuda:
            include = tuple(dict.fromkeys((headers[0], cuda[0])))
            package = "nvidia_cuda_cupti" if "cupti" in library else "nvidia_cuda_sanitizer_api"
            version = _package_version(kit, packages, package) or _version(cuda[0])
            found.append(Part(include, files[0], version))
    return sorted(found, key=lambda part: part.version or (0, 0), reverse=True)


def _folders(kit: Path, names: tuple[str, ...], inside: str) -> Iterator[Path]:
    """The folders where a kit may have files of a kind."""
    for name in names:
        yield kit / name
    machine = platform.machine()
    for target in _TARGETS.get(machine, ()):
        yield kit / "targets" / target / inside
    if inside == "lib":
        yield kit / "lib" / f"{machine}-linux-gnu"


def _is_file(path: Path) -> bool:
    return os.access(path, os.R_OK)


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


def ask(program: Path, option: str, user: Owner, *, failure: str) -> str:
    """Run a compiler with an option as `user`, and return its output. Raises CaptureUnavailable."""
    return run([str(program), option], user, failure=failure, timeout_s=_ASK_TIMEOUT_S)


def _compilers(paths: Iterable[str | None], user: Owner) -> list[Compiler]:
    """The compilers that exist and report a version, usable ones first."""
    found: dict[Path, Compiler] = {}
    for path in paths:
        if not path or not os.access(path, os.X_OK) or Path(path).resolve() in found:
            continue
        if user.uid == 0:
            try:
                check_safe(Path(path), {0})
            except CaptureUnavailable as refusal:
                unsafe = f"{path} is not run as root: {refusal.message}"
                found[Path(path).resolve()] = _refused(path, CaptureUnavailable(unsafe, INSTALL_AS_ROOT))
                continue
        try:
            output = ask(Path(path), "--version", user, failure=f"{path} does not show its version")
        except CaptureUnavailable as refusal:
            found[Path(path).resolve()] = _refused(path, refusal)
            continue
        # `Cuda compilation tools, release 13.0, V13.0.88`; `g++ (Debian 12.2.0-14) 12.2.0`
        version = re.search(r"release (\d+)\.(\d+)", output) or re.search(
            r"(\d+)\.(\d+)[.\d]*$", output.partition("\n")[0]
        )
        if version:
            number = int(version[1]), int(version[2])
            found[Path(path).resolve()] = Compiler(Path(path), number, output.strip())
    return sorted(found.values(), key=lambda compiler: bool(compiler.refusal))


def _refused(path: str, refusal: CaptureUnavailable) -> Compiler:
    return Compiler(Path(path), (0, 0), "", refusal=refusal)
