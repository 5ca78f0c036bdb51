"""The inner loops in C, called through ctypes with buffers. Python does everything that they do, too.

`library()` is None where there is no core compiled from these sources, or where TRACEPIPE_PURE=1 asks for
Python alone. `state()` states which of them runs, and why.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path

from tracepipe.native import build
from tracepipe.native.signatures import declare

PURE = "TRACEPIPE_PURE"
CORE = build.HERE / build.NAME

_loading = threading.Lock()


def library() -> ctypes.CDLL | None:
    """The compiled core, or None."""
    return None if _is_refused() else _load()[0]


def state() -> str:
    """The core that runs: "native core, gcc 12.2.0", or "pure Python: " and the reason."""
    if _is_refused():
        return f"pure Python: {PURE}={os.environ[PURE]}"
    return _load()[1]


def is_native() -> bool:
    """Whether the compiled core runs."""
    return library() is not None


def how_to_build() -> str:
    """The command that builds the core of this installation, or ""."""
    import shlex
    import sys

    if _is_refused():
        return f"unset {PURE}"
    if is_native():
        return ""
    command = f"{shlex.quote(sys.executable)} -m tracepipe.native"
    try:
        build.compiler()
    except build.NoCompiler:
        return f"{build.INSTALL} && {command}"
    return command


def owned(owner: object, pointer: int | None, free: Callable[[int], None]) -> int:
    """The pointer to memory of the core, which is freed with its owner. Raises MemoryError if it is null."""
    if not pointer:
        raise MemoryError
    weakref.finalize(owner, free, pointer)
    return pointer


def checked(result: int) -> int:
    """A result of the core. Raises MemoryError where it is below 0."""
    if result < 0:
        raise MemoryError
    return result


def seed() -> int:
    """A seed for a table of the core, so that nobody can choose texts that collide there."""
    return int.from_bytes(os.urandom(8), "little")


def text_of(read: Callable[..., int], *of: object) -> bytes:
    """The text to which a function of the core points by its last argument; it returns the size. Raises
    MemoryError where that is below 0.
    """
    there = ctypes.c_void_p()
    size = checked(read(*of, ctypes.byref(there)))
    return ctypes.string_at(there, size) if size else b""


def _is_refused() -> bool:
    return os.environ.get(PURE, "") not in ("", "0")


def _load() -> tuple[ctypes.CDLL | None, str]:
    # Of several threads, the first loads the core. The others wait and get the same object.
    with _loading:
        return _loaded(CORE)


@cache
def _loaded(path: Path) -> tuple[ctypes.CDLL | None, str]:
    """Return a core and its description, or None and the reason why it cannot be used."""
    if not path.exists():
        return None, "pure Python: no compiled core"
    try:
        core = ctypes.CDLL(str(path))
    except OSError as e:
        return None, f"pure Python: no compiled core: {e}"
    try:
        core.tp_digest.restype = core.tp_compiler.restype = ctypes.c_char_p
        made_from, compiler = core.tp_digest().decode(), core.tp_compiler().decode()
    except AttributeError:
        return None, f"pure Python: no compiled core: {path} does not state its sources"
    if made_from != (build.digest() or made_from):
        return None, f"pure Python: no compiled core: {path} was compiled from other sources"
    try:
        return declare(core), f"native core, {compiler}"
    except AttributeError as e:
        return None, f"pure Python: no compiled core: {e}"
