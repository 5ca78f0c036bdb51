"""Names of probes as bpftrace prints them, and which layer each is of.

uprobe:/usr/lib/libcuda.so.1:cuMemAlloc_v2    kretprobe:nv_schedule_work    tracepoint:sched:sched_switch
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Final

from tracepipe.hooks.index import HookIndex
from tracepipe.hooks.sets import load_set

PATTERN: Final = (
    r"(?:uprobe|uretprobe|usdt|kprobe|kretprobe|kfunc|kretfunc|fentry|fexit|tracepoint|rawtracepoint)"
    r":[^\s:]\S*"
)
"""What such a name looks like."""
_OF_USER: Final = frozenset({"uprobe", "uretprobe", "usdt"})
_OF_TRACEPOINTS: Final = frozenset({"tracepoint", "rawtracepoint"})
_AT_RETURN: Final = frozenset({"uretprobe", "kretprobe", "kretfunc", "fexit"})
_OF_GROUP: Final = {"syscalls": "syscall", "raw_syscalls": "syscall", "sched": "scheduler"}
_SYSCALL = re.compile(r"sys_(enter|exit)_(\w+)")
# What the sets say of a function of the driver, or of a tracepoint, is known better than from its provider.
_SETS: Final = ("nvidia-kmod", "context-switch")


@dataclass(frozen=True, slots=True)
class ProbeName:
    """A probe: the name and the layer of its events, and whether it is where the function returns."""

    name: str
    layer: str
    is_return: bool


@cache
def _known(is_tracepoint: bool) -> HookIndex:
    hooks = (hook for name in _SETS for hook in load_set(name).hooks)
    return HookIndex(hook for hook in hooks if (hook.target == "tracepoint") == is_tracepoint)


def probe_named(text: str) -> ProbeName:
    """The probe of a name that fits `PATTERN`."""
    provider, _, rest = text.partition(":")
    place, _, function = rest.rpartition(":")
    if provider in _OF_USER:
        return ProbeName(function, "userspace", provider in _AT_RETURN)
    is_tracepoint = provider in _OF_TRACEPOINTS
    hook = _known(is_tracepoint).find(rest if is_tracepoint else function)
    layer = hook.layer if hook else _OF_GROUP.get(place, "kernel") if is_tracepoint else "kernel"
    if layer == "syscall" and (call := _SYSCALL.fullmatch(function)):
        return ProbeName(call[2], layer, call[1] == "exit")
    return ProbeName(function, layer, provider in _AT_RETURN)
