"""Tries what capture needs: attaches the smallest program to something harmless for a moment.

mov r0, 0     b7 00 00 00 00 00 00 00        code │ dst, src │ offset (2) │ immediate (4)
exit          95 00 00 00 00 00 00 00
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tracepipe import native
from tracepipe.errors import CaptureUnavailable, TracepipeError
from tracepipe.hooks.hook import FilePlace, Hook, Probe
from tracepipe.hooks.sets import load_set
from tracepipe.tracer import ENGINES
from tracepipe.tracer.bpf import bpf
from tracepipe.tracer.find.elf import Elf
from tracepipe.tracer.find.kernel import KernelSymbols, tracepoint_id, tracing_folder
from tracepipe.tracer.find.library import LibrarySearch, find_versions, mapped_files
from tracepipe.tracer.find.resolve import resolve
from tracepipe.tracer.gpu.build.toolchain import Toolchain, this_toolchain
from tracepipe.tracer.gpu.engines.counters import build_sampler
from tracepipe.tracer.gpu.engines.kernels import KernelStream
from tracepipe.tracer.request import DEFAULT_LAYERS, Filters, Notify, Plan, Scope

_DO_NOTHING = bytes.fromhex("b7000000000000009500000000000000")
_RARELY_CALLED = "acct"  # a function of every libc: process accounting, called once a boot if at all
_KERNEL_FUNCTIONS = ("__x64_sys_acct", "__arm64_sys_acct")
_RING_BYTES = 1 << 16
_ARRAY = 2  # enum bpf_map_type


@dataclass(frozen=True, slots=True)
class Timing:
    """How long attaching and detaching took, in ns."""

    attach_ns: int
    detach_ns: int


class Trials:
    """Tries on this machine, with the code of captures. Each method does one thing and undoes it. Raises the
    kernel's OSError, or CaptureUnavailable. `notify` gets the messages of a capture.
    """

    def __init__(self, notify: Notify) -> None:
        self._notify = notify

    def methods(self) -> list[str]:
        """The capture methods, best first."""
        return list(ENGINES)

    def version(self, method: str) -> str:
        """A method's version."""
        return ENGINES[method]().check()

    def capture(self, method: str) -> Timing:
        """Attach the layers that need no NVIDIA driver, by a method."""
        engine = ENGINES[method]()
        engine.check()
        path, offset = _harmless_function()
        hook = Hook("uprobe", path, _RARELY_CALLED, "userspace")
        probe = Probe(_RARELY_CALLED, _RARELY_CALLED, FilePlace(path, offset), hook)
        scope = Scope("pids", (os.getpid(),))
        plan = Plan(DEFAULT_LAYERS, ("syscall", "scheduler"), [probe], scope, Filters(), _RING_BYTES)
        began_ns = time.monotonic_ns()
        recording = engine.attach(plan, self._notify)
        attached_ns = time.monotonic_ns()
        missing = recording.missing
        recording.close()
        timing = Timing(attached_ns - began_ns, time.monotonic_ns() - attached_ns)
        if missing:
            raise CaptureUnavailable("; ".join(f"no {layer}: {why}" for layer, why in missing.items()))
        return timing

    def map_and_program(self) -> None:
        """Create a map and load a program."""
        os.close(bpf.create_map("tracepipe_try", _ARRAY, 4, 8, 1))
        os.close(bpf.load_program("tracepipe_try", _DO_NOTHING, bpf.PROG_TYPE_KPROBE))

    def uprobes_at_once(self) -> Timing:
        """Attach a multi-uprobe link."""
        path, offset = _harmless_function()
        return _attached(
            lambda program: bpf.link_uprobes(program, path, [offset], [0], False), attach=bpf.UPROBE_MULTI
        )

    def one_uprobe(self) -> Timing:
        """Attach a uprobe by a perf event."""
        path, offset = _harmless_function()
        return _attached(lambda program: bpf.link_one_uprobe(program, path, offset, 0, False))

    def kprobes_at_once(self) -> Timing:
        """Attach a multi-kprobe link."""
        found = KernelSymbols().functions((), _KERNEL_FUNCTIONS)
        address = next((place.address for place in found if place.address), None)
        if address is None:
            raise FileNotFoundError(2, "its address is hidden (kernel.kptr_restrict)")
        return _attached(
            lambda program: bpf.link_kprobes(program, [address], [0], False), attach=bpf.KPROBE_MULTI
        )

    def one_kprobe(self) -> Timing:
        """Attach a kprobe by a perf event."""
        refusal = OSError()
        for name in _KERNEL_FUNCTIONS:
            link = partial(bpf.link_one_kprobe, symbol=name, address=0, cookie=0, returns=False)
            try:
                return _attached(link)
            except FileNotFoundError as error:
                refusal = error
                if error.filename == str(bpf.KPROBE_PMU):
                    break
        raise refusal

    def tracepoint(self, name: str) -> Timing:
        """Attach to a tracepoint, `group/name`."""

        def link(program: int) -> int:
            event = bpf.open_tracepoint(tracepoint_id(tracing_folder(), name))
            try:
                return bpf.link_event(program, event)
            finally:
                os.close(event)  # the link holds it

        return _attached(link, bpf.PROG_TYPE_TRACEPOINT)

    def raw_tracepoint(self, name: str) -> Timing:
        """Attach to a raw tracepoint by its name; its program gets the kernel's arguments."""
        return _attached(
            lambda program: bpf.attach_raw_tracepoint(program, name), bpf.PROG_TYPE_RAW_TRACEPOINT
        )

    def libraries(self, name: str) -> list[str]:
        """The paths of all versions of a library that the linker finds."""
        try:
            return list(dict.fromkeys(find_versions(sys.executable, name).values()))
        except (TracepipeError, OSError):
            return []

    def driver_functions(self) -> tuple[int, str]:
        """The number of functions of the NVIDIA driver that would be probed, or why there are none."""
        try:
            found = resolve([load_set("nvidia-kmod")], LibrarySearch(), is_partial=True)
        except OSError as error:
            return 0, f"/proc/kallsyms: {error.strerror}"
        count = sum(probe.layer == "kernel" for probe in found.probes)
        return count, "" if count else "; ".join(found.unresolved.values())

    def toolchain(self) -> Toolchain:
        """The GPUs, and the tools that build native code for them."""
        return this_toolchain()

    def build_kernels(self, toolchain: Toolchain) -> Path:
        """Build the library that records GPU kernels, or find it in the cache."""
        return KernelStream.build(toolchain)

    def build_sampler(self, toolchain: Toolchain) -> Path:
        """Build the program that samples counters, or find it in the cache."""
        return build_sampler(toolchain)

    def core(self) -> tuple[str, str]:
        """The inner loops' core or Python, and the command that builds the core, "" if it is built."""
        return native.state(), native.how_to_build()


def _attached(link: Callable[[int], int], kind: int = bpf.PROG_TYPE_KPROBE, attach: int = 0) -> Timing:
    """Attach a program that does nothing, and detach it."""
    program = bpf.load_program("tracepipe_try", _DO_NOTHING, kind, attach)
    try:
        began_ns = time.monotonic_ns()
        held = link(program)
        attached_ns = time.monotonic_ns()
        os.close(held)
        return Timing(attached_ns - began_ns, time.monotonic_ns() - attached_ns)
    finally:
        os.close(program)


def _harmless_function() -> tuple[str, int]:
    """A function of the libc that this process has mapped: path and offset. Raises CaptureUnavailable."""
    for name, path in mapped_files(os.getpid()):
        if name.startswith(("libc.", "libc-", "ld-musl", "libc.musl")):
            with Elf(path) as elf:
                for function, address in elf.functions():
                    if function == _RARELY_CALLED:
                        return path, elf.file_offset(address)
    raise CaptureUnavailable(
        "There is no libc to try a probe on.", "Use a Python that is linked dynamically."
    )
