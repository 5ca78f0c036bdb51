"""Reads the names of probes that bpftrace prints, and assigns each a layer.

uprobe:/usr/lib/libcuda.so.1:cuMemAlloc_v2    kretprobe:nv_schedule_work    tracepoint:sched:sched_switch
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import PurePath
from typing import Final

from tracepipe.hooks.hook import OWN_LAYER
from tracepipe.hooks.names import HookIndex
from tracepipe.hooks.sets import layer_of, load_set

_OF_USER: Final = frozenset({"uprobe", "uretprobe", "usdt"})
_OF_TRACEPOINTS: Final = frozenset({"tracepoint", "rawtracepoint"})
_AT_RETURN: Final = frozenset({"uretprobe", "kretprobe", "kretfunc", "fexit"})
_OF_GROUP: Final = {"syscalls": "syscall", "raw_syscalls": "syscall", "sched": "scheduler"}
_SYSCALL = re.compile(r"sys_(enter|exit)_(\w+)")
_LIBRARY_SETS: Final = ("nccl", "cublas")
# For functions of the driver and for tracepoints, these sets are more exact than the provider.
_SETS: Final = ("nvidia-kmod", "context-switch")


@dataclass(frozen=True, slots=True)
class ProbeName:
    """A probe: the name and the layer of its events, and whether it is at the function's return.
    `layer_name`: the library or program, if it has a separate layer.
    """

    name: str
    layer: str
    is_return: bool
    layer_name: str = ""


@cache
def _known(is_tracepoint: bool) -> HookIndex:
    hooks = (hook for name in _SETS for hook in load_set(name).hooks)
    return HookIndex(hook for hook in hooks if (hook.target == "tracepoint") == is_tracepoint)


@cache
def _libraries() -> frozenset[str]:
    """Libraries whose sets assign functions to CUDA's layer: `libnccl`."""
    hooks = (hook for name in _LIBRARY_SETS for hook in load_set(name).hooks)
    return frozenset(hook.library.partition(".so")[0] for hook in hooks if hook.layer == "userspace")


def probe_named(text: str) -> ProbeName:
    """The probe with a name of that form."""
    provider, _, rest = text.partition(":")
    place, _, function = rest.rpartition(":")
    if provider in _OF_USER:
        library = PurePath(place.rpartition(":")[0] if provider == "usdt" else place).name
        is_known = library.partition(".so")[0] in _libraries()
        layer = "userspace" if is_known else layer_of("uprobe", library)
        own = library if layer == OWN_LAYER else ""
        return ProbeName(function, layer, provider in _AT_RETURN, own)
    is_tracepoint = provider in _OF_TRACEPOINTS
    hook = _known(is_tracepoint).find(rest if is_tracepoint else function)
    layer = hook.layer if hook else _OF_GROUP.get(place, "kernel") if is_tracepoint else "kernel"
    if layer == "syscall" and (call := _SYSCALL.fullmatch(function)):
        return ProbeName(call[2], layer, call[1] == "exit")
    return ProbeName(function, layer, provider in _AT_RETURN)
