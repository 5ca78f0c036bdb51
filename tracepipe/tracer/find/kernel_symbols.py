"""Finds functions of the kernel and its modules in /proc/kallsyms.

    ffffffffc0a81230 t nvidia_ioctl<TAB>[nvidia]

A line has address, kind, name and module; the kernel's own functions have no module. A hidden address reads 0
(kernel.kptr_restrict). A part that the compiler split off a function has a dot in its name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path

from tracepipe.hooks.hook import KernelPlace
from tracepipe.paths import is_folder, is_there
from tracepipe.tracer.bpf.bpf import KPROBE_PMU

SYMBOLS = Path("/proc/kallsyms")
_SYSTEM_MODULES = Path("/sys/module")
_NO_MODULE = (b"bpf", b"__builtin__ftrace", b"__builtin__kprobes")  # code that is made at run time


def no_kprobes() -> str:
    """Why this kernel has no kprobes; "" if it has them."""
    return "" if is_there(KPROBE_PMU) else "this kernel has no kprobes (CONFIG_KPROBES, CONFIG_KPROBE_EVENTS)"


def not_loaded(modules: Collection[str]) -> str:
    """Why nothing can be found in `modules`; "" if one of them is loaded, or `modules` is empty."""
    if not modules or any(is_folder(_SYSTEM_MODULES / module) for module in modules):
        return ""
    names = ", ".join(modules)
    if modules and all(module.startswith("nvidia") for module in modules):
        return f"the NVIDIA driver is not loaded on this machine (no module {names})"
    return f"not loaded on this machine: {names}"


class KernelSymbols:
    """The symbols, read once."""

    def __init__(self) -> None:
        self._data = b""

    def functions(self, modules: Collection[str], patterns: Collection[str]) -> Iterator[KernelPlace]:
        """The functions whose names match one of the shell patterns, in these modules, or anywhere if it is
        empty.

        There is one for each name and module. Where addresses are hidden there is one for each name, as the
        kernel then finds the function by its name. Raises OSError.
        """
        # One regular expression searches all lines: making 200 000 objects of them would take half a second.
        names = b"|".join(map(_in_bytes, patterns))
        suffix = b"|".join(re.escape(module.encode()) for module in modules) or rb"\w+"
        suffix = rb"\t\[(" + suffix + (rb")\]" if modules else rb")\]|")
        form = re.compile(rb"^([0-9a-f]+) [tTwW] (" + names + rb")(?:" + suffix + rb")$", re.MULTILINE)
        seen = set()
        for match in form.finditer(self._read(), self._first_module() if modules else 0):
            address, name, module = int(match[1], 16), match[2], match[3] or b""
            place = (module if address else b"", name)
            if place not in seen and module not in _NO_MODULE and b"." not in name:
                seen.add(place)
                yield KernelPlace(name.decode(errors="replace"), module.decode(), address)

    def _read(self) -> bytes:
        if not self._data:
            self._data = SYMBOLS.read_bytes()
        return self._data

    def _first_module(self) -> int:
        data = self._read()
        return data.rfind(b"\n", 0, max(data.find(b"\t["), 0)) + 1


def _in_bytes(pattern: str) -> bytes:
    """A shell pattern as a regular expression for a name in a line."""
    parts = re.findall(r"\*|\?|\[!?[^]]+\]|.", pattern)
    return "".join(_expression(part) for part in parts).encode()


def _expression(part: str) -> str:
    if part in "*?":
        return r"[^\s.]" + part.strip("?")
    if len(part) > 1:
        return part.replace("[!", "[^\\s.")
    return re.escape(part)
