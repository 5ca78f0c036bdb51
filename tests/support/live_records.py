"""Records as the ring has them, of a few made-up functions."""

from __future__ import annotations

import struct

from tracepipe.hooks.hook import FilePlace, Hook, Probe, TracepointPlace
from tracepipe.tracer.request import Filters, Plan, Scope

RECORD = struct.Struct("<8xQIIIBxHQQQQ")
ENTER, MORE, RETURN, SYSCALL, SYSCALL_END, OUT, IN, WAKEUP, MIGRATE = range(1, 10)
THREAD_NEW, THREAD_NAME, TEXT, EVENT, THREAD_IDS = range(11, 16)
LAYERS = ("userspace", "syscall", "kernel", "scheduler")
SLEEPING, PREEMPTED, ENDED = 1, 0x100, 0x10


def hook(layer: str = "userspace", returns: bool = True) -> Hook:
    return Hook("uprobe", "libx.so", "*", layer, returns=returns)


PROBES = [
    Probe("f", "f", FilePlace("libx.so", 16), hook()),
    Probe("g", "g", FilePlace("libx.so", 32), hook()),
    Probe("mark", "mark", FilePlace("libx.so", 48), hook(returns=False)),
    Probe("nv_ioctl", "nv_ioctl", FilePlace("libx.so", 64), hook("kernel")),
    Probe("irq", "irq", TracepointPlace("irq/entry"), hook("scheduler", returns=False)),
]
F, G, MARK, NV, IRQ = range(5)


def record(kind: int, ts_ns: int, number: int = 0, *a: int, tid: int = 7, tgid: int = 7) -> bytes:
    return RECORD.pack(ts_ns, tid, tgid, number, kind, 0, *(*a, 0, 0, 0, 0)[:4])


def plan() -> Plan:
    return Plan(LAYERS, ("syscall", "scheduler"), PROBES, Scope("pids", (1,)), Filters(), 4096)
