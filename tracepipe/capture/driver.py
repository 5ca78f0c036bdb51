"""The functions of the NVIDIA driver that can be probed on this machine."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from tracepipe.capture.bpf import KPROBE_PMU
from tracepipe.capture.engine import ALL_LAYERS, DEFAULT_LAYERS, DriverFunction

MODULES = ("nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm")
_TABLE = Path(__file__).with_name("driver_functions.txt")
_SYSTEM_MODULES = Path("/sys/module")
_SYMBOLS = Path("/proc/kallsyms")
# `nvidia_ioctl(_, _, cmd) -> status`: all but the name may be missing
_DECLARATION = re.compile(r"([\w*?\[\]]+)(?:\(([\w, ]*)\))?\s*(-> status)?")


@dataclass(frozen=True, slots=True)
class Declaration:
    """A pattern of function names, and what is known of those that fit it."""

    pattern: str
    arguments: tuple[str, ...]
    has_result: bool


def declarations() -> list[Declaration]:
    """The lines of driver_functions.txt."""
    found = []
    for line in _TABLE.read_text().splitlines():
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _DECLARATION.fullmatch(text)
        assert match, f"{_TABLE.name}: {line}"
        names = tuple(name.strip() for name in (match[2] or "").split(",") if name.strip())
        found.append(Declaration(match[1], names, bool(match[3])))
    return found


def select(symbols: Iterable[str], table: list[Declaration]) -> Iterator[DriverFunction]:
    """Functions that the table names, once each, from lines of /proc/kallsyms.

    `ffffffffc0a81230 t nvidia_ioctl<TAB>[nvidia]`: a hidden address reads 0, and of functions with one name
    only the first is found then. What the compiler split off a function has a dot in its name.
    """
    chosen: dict[str, Declaration | None] = {}
    seen: set[tuple[str, str]] = set()
    for line in symbols:
        name_and_more, bracket, module = line.rstrip().rstrip("]").partition("\t[")
        if not bracket or module not in MODULES:
            continue
        digits, kind, name = name_and_more.split(" ")
        address = int(digits, 16)
        place = (module if address else "", name)
        if kind not in "tT" or "." in name or place in seen:
            continue
        seen.add(place)
        if name not in chosen:
            chosen[name] = next((known for known in table if fnmatchcase(name, known.pattern)), None)
        known = chosen[name]
        if known is not None:
            yield DriverFunction(name, module, address, known.arguments, known.has_result)


def driver_functions() -> tuple[list[DriverFunction], str]:
    """What to probe on this machine, and why there is nothing if there is nothing."""
    if not KPROBE_PMU.exists():
        return [], "this kernel has no kprobes (CONFIG_KPROBES, CONFIG_KPROBE_EVENTS)"
    loaded = [module for module in MODULES if (_SYSTEM_MODULES / module).is_dir()]
    if not loaded:
        return [], "the NVIDIA driver is not loaded on this machine (no module nvidia)"
    with _SYMBOLS.open() as symbols:
        functions = list(select(symbols, declarations()))
    if not functions:
        return [], f"no function of {', '.join(loaded)} has a name that {_TABLE.name} knows"
    return functions, ""


def layers_here() -> tuple[str, ...]:
    """All layers, without `kernel` where the driver cannot be probed."""
    return ALL_LAYERS if driver_functions()[0] else DEFAULT_LAYERS
