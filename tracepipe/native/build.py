"""Compiles the C files of this folder into core.so: at installation, by `make`, or as a module.

    python -m tracepipe.native        # compiles next to the sources what is out of date

The object has a digest of its sources, by which the loader recognizes an old one. This file imports nothing
from the package, as setup.py runs it before anything is installed.
"""

from __future__ import annotations

import os
import platform
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

NAME = "core.so"
HERE = Path(__file__).resolve().parent
COMPILERS = ("cc", "gcc", "clang")
INSTALL = "apt install gcc libc6-dev"
# The core shows only the functions that are exported, and needs only libc.
FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-D_GNU_SOURCE", "-Wall", "-Wextra")
HARDENING = ("-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2")
LINUX = ("-Wl,-z,relro,-z,now,-z,noexecstack",)  # of GNU's linkers and LLVM's


class NotBuilt(Exception):
    """The core was not built; the text is the reason."""


class NoCompiler(NotBuilt):
    """This machine cannot compile C."""


def sources(folder: Path = HERE) -> list[Path]:
    """The C files and their headers, in one order everywhere."""
    return sorted(path for path in folder.iterdir() if path.suffix in (".c", ".h"))


def digest(folder: Path = HERE) -> str:
    """The digest of these sources; "" where they are not installed."""
    files = sources(folder)
    # zlib, as the OpenSSL of hashlib takes 3 MB of each process. This finds outdated files and is no
    # protection.
    sum, size = 0, 0
    for path in files:
        content = path.read_bytes()
        sum = zlib.crc32(content, zlib.crc32(f"{path.name} {len(content)}\n".encode(), sum))
        size += len(content)
    return f"crc32 {sum:08x} of {size} bytes" if files else ""


def is_current(core: Path, folder: Path = HERE) -> bool:
    """Whether a core was compiled from the sources as they are now."""
    return core.is_file() and digest(folder).encode() in core.read_bytes()


def compiler(environment: Mapping[str, str] = os.environ) -> list[str]:
    """$CC, or the first compiler in PATH. Raises NoCompiler."""
    import shlex
    import shutil

    asked = shlex.split(environment.get("CC", ""))
    for name in asked[:1] or COMPILERS:
        if shutil.which(name, path=environment.get("PATH")):
            return asked or [name]
    wanted = f"CC={asked[0]}" if asked else ", ".join(COMPILERS)
    raise NoCompiler(f"no C compiler found ({wanted})")


def build(
    folder: Path = HERE,
    core: Path | None = None,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] = os.environ,
) -> Path:
    """Compile the sources in `folder` into `core`, by default `core.so` in that folder, and return its path.

    `flags` come last. The environment's CC, CPPFLAGS, CFLAGS and LDFLAGS are used. Raises NotBuilt.
    """
    import shlex
    import subprocess

    core = core or folder / NAME
    program = compiler(environment)
    given = [
        word for name in ("CPPFLAGS", "CFLAGS", "LDFLAGS") for word in shlex.split(environment.get(name, ""))
    ]
    files = [str(path) for path in sources(folder) if path.suffix == ".c"]
    # The old file is replaced, not overwritten: a process that has mapped it keeps it.
    made = core.with_name(f".{core.name}.{os.getpid()}")
    linking = LINUX if platform.system() == "Linux" else ()
    command = [
        *program,
        *FLAGS,
        *HARDENING,
        f'-DTP_DIGEST="{digest(folder)}"',
        *given,
        *flags,
        *files,
        *linking,
    ]
    try:
        done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotBuilt(f"{program[0]} exits {done.returncode}:\n{done.stderr.rstrip()}")
        if done.stderr:
            sys.stderr.write(done.stderr)
        made.replace(core)
    except OSError as e:
        raise NotBuilt(str(e)) from e
    finally:
        made.unlink(missing_ok=True)
    return core


def main() -> int:
    """Bring this folder's core up to date. Returns 1 where it cannot be compiled."""
    core = HERE / NAME
    if is_current(core):
        return 0
    try:
        build()
    except NoCompiler as e:
        sys.stderr.write(f"native core: {e}; tracepipe runs in Python alone. {INSTALL}\n")
        return 0
    except NotBuilt as e:
        sys.stderr.write(f"native core: not compiled: {e}\n")
        return 1
    sys.stderr.write(f"native core: compiled {core}\n")
    return 0
