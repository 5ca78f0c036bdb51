"""Tries what capture needs: attaches the smallest program to something harmless for a moment.

mov r0, 0     b7 00 00 00 00 00 00 00        code │ dst, src │ offset (2) │ immediate (4)
exit          95 00 00 00 00 00 00 00
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tracepipe.errors import CaptureUnavailable, TracepipeError
from tracepipe.hooks.hook import FilePlace, Hook, Probe
from tracepipe.tracer.gpu.build.toolchain import Toolchain, this_toolchain
from tracepipe.tracer.request import Filters, Notify, Plan, Scope

_DO_NOTHING = bytes.fromhex("b7000000000000009500000000000000")
_RARELY_CALLED = "acct"  # a function of every libc: process accounting, called once a boot if at all
_KERNEL_FUNCTIONS = ("__x64_sys_acct", "__arm64_sys_acct")
_RING_BYTES = 1 << 16
_ARRAY = 2  # enum bpf_map_type
_LAYERS = ("userspace", "syscall", "scheduler")


@dataclass(frozen=True, slots=True)
class Timing:
    """How long attaching and detaching took, in ns."""

    attach_ns: int
    detach_ns: int


class Trials(Protocol):
    """Each method does one thing and undoes it. Raises the kernel's OSError, or CaptureUnavailable."""

    def methods(self) -> list[str]:
        """Names of the capture methods, best first."""
        ...

    def version(self, method: str) -> str:
        """A method's version."""
        ...

    def capture(self, method: str) -> Timing:
        """Attach the layers that need no NVIDIA driver, by a method."""
        ...

    def map_and_program(self) -> None:
        """Create a map and load a program."""
        ...

    def uprobes_at_once(self) -> Timing:
        """Attach a multi-uprobe link."""
        ...

    def one_uprobe(self) -> Timing:
        """Attach a uprobe by a perf event."""
        ...

    def kprobes_at_once(self) -> Timing:
        """Attach a multi-kprobe link."""
        ...

    def one_kprobe(self) -> Timing:
        """Attach a kprobe by a perf event."""
        ...

    def tracepoint(self, name: str) -> Timing:
        """Attach to a tracepoint, `group/name`."""
        ...

    def raw_tracepoint(self, name: str) -> Timing:
        """Attach to a raw tracepoint by its name; its program gets the kernel's arguments."""
        ...

    def libraries(self, name: str) -> list[str]:
        """The paths of all versions of a library that the linker finds."""
        ...

    def driver_functions(self) -> tuple[int, str]:
        """The number of functions of the NVIDIA driver that would be probed, or why there are none."""
        ...

    def toolchain(self) -> Toolchain:
        """The GPUs, and the tools that build native code for them."""
        ...

    def build_kernels(self, toolchain: Toolchain) -> Path:
        """Build the library that records GPU kernels, or find it in the cache."""
        ...

    def build_sampler(self, toolchain: Toolchain) -> Path:
        """Build the program that samples counters, or find it in the cache."""
        ...

    def core(self) -> tuple[str, str]:
        """The core or Python, which runs the inner loops of a conversion, and the command that builds the
        native core, "" if it is built.
        """
        ...


class RealTrials:
    """Tries on this machine, with the code of captures. `notify` gets the messages of a capture."""

    def __init__(self, notify: Notify = lambda message: None) -> None:
        self._notify = notify

    def methods(self) -> list[str]:
        from tracepipe.tracer import ENGINES

        return list(ENGINES)

    def version(self, method: str) -> str:
        from tracepipe.tracer import ENGINES

        return ENGINES[method]().check()

    def capture(self, method: str) -> Timing:
        from tracepipe.tracer import ENGINES

        engine = ENGINES[method]()
        engine.check()
        path, offset = _harmless_function()
        hook = Hook("uprobe", path, _RARELY_CALLED, "userspace")
        probe = Probe(_RARELY_CALLED, _RARELY_CALLED, FilePlace(path, offset), hook)
        scope = Scope("pids", (os.getpid(),))
        plan = Plan(_LAYERS, ("syscall", "scheduler"), [probe], scope, Filters(), _RING_BYTES)
        began_ns = time.monotonic_ns()
        recording = engine.attach(plan, self._notify)
        attached_ns = time.monotonic_ns()
        missing = recording.coverage.missing
        recording.close()
        timing = Timing(attached_ns - began_ns, time.monotonic_ns() - attached_ns)
        if missing:
            raise CaptureUnavailable("; ".join(f"no {layer}: {why}" for layer, why in missing.items()))
        return timing

    def map_and_program(self) -> None:
        from tracepipe.tracer.bpf import bpf

        os.close(bpf.create_map("tracepipe_try", _ARRAY, 4, 8, 1))
        os.close(bpf.load_program("tracepipe_try", _DO_NOTHING, bpf.PROG_TYPE_KPROBE))

    def uprobes_at_once(self) -> Timing:
        from tracepipe.tracer.bpf import bpf

        path, offset = _harmless_function()
        return _linked(
            bpf.UPROBE_MULTI, lambda program: bpf.link_uprobes(program, path, [offset], [0], False)
        )

    def one_uprobe(self) -> Timing:
        from tracepipe.tracer.bpf import bpf

        path, offset = _harmless_function()
        return _linked(0, lambda program: bpf.link_one_uprobe(program, path, offset, 0, False))

    def kprobes_at_once(self) -> Timing:
        from tracepipe.tracer.bpf import bpf
        from tracepipe.tracer.find.kernel import KernelSymbols

        places = [place for place in KernelSymbols().functions((), _KERNEL_FUNCTIONS) if place.address]
        if not places:
            raise FileNotFoundError(2, "its address is hidden (kernel.kptr_restrict)")
        address = places[0].address
        return _linked(bpf.KPROBE_MULTI, lambda program: bpf.link_kprobes(program, [address], [0], False))

    def one_kprobe(self) -> Timing:
        from tracepipe.tracer.bpf import bpf

        for name in _KERNEL_FUNCTIONS[:-1]:
            try:
                return self._kprobe_on(name)
            except FileNotFoundError as error:
                if error.filename == str(bpf.KPROBE_PMU):
                    raise
        return self._kprobe_on(_KERNEL_FUNCTIONS[-1])

    def tracepoint(self, name: str) -> Timing:
        from tracepipe.tracer.bpf import bpf
        from tracepipe.tracer.find.kernel import tracepoint_id, tracing_folder

        number = tracepoint_id(tracing_folder(), name)
        program = bpf.load_program("tracepipe_try", _DO_NOTHING, bpf.PROG_TYPE_TRACEPOINT)
        try:
            return _timed(lambda: bpf.attach_tracepoint(program, number), os.close)
        finally:
            os.close(program)

    def raw_tracepoint(self, name: str) -> Timing:
        from tracepipe.tracer.bpf import bpf

        program = bpf.load_program("tracepipe_try", _DO_NOTHING, bpf.PROG_TYPE_RAW_TRACEPOINT)
        try:
            return _timed(lambda: bpf.attach_raw_tracepoint(program, name), os.close)
        finally:
            os.close(program)

    def libraries(self, name: str) -> list[str]:
        import sys

        from tracepipe.tracer.find.library import find_versions

        try:
            return list(dict.fromkeys(find_versions(sys.executable, name).values()))
        except (TracepipeError, OSError):
            return []

    def driver_functions(self) -> tuple[int, str]:
        from tracepipe.hooks.sets import load_set
        from tracepipe.tracer.find.library import LibrarySearch
        from tracepipe.tracer.find.resolve import resolve

        try:
            found = resolve([load_set("nvidia-kmod")], LibrarySearch(), is_partial=True)
        except OSError as error:
            return 0, f"/proc/kallsyms: {error.strerror}"
        count = sum(probe.layer == "kernel" for probe in found.probes)
        return count, "" if count else "; ".join(found.unresolved.values())

    def toolchain(self) -> Toolchain:
        return this_toolchain()

    def build_kernels(self, toolchain: Toolchain) -> Path:
        from tracepipe.tracer.gpu.engines.kernels import KernelStream

        return KernelStream.build(toolchain)

    def build_sampler(self, toolchain: Toolchain) -> Path:
        from tracepipe.tracer.gpu.engines.counters import build_sampler

        return build_sampler(toolchain)

    def core(self) -> tuple[str, str]:
        from tracepipe import native

        return native.state(), native.how_to_build()

    def _kprobe_on(self, name: str) -> Timing:
        from tracepipe.tracer.bpf import bpf

        return _linked(0, lambda program: bpf.link_one_kprobe(program, name, 0, 0, False))


def _linked(attach_type: int, link: Callable[[int], int]) -> Timing:
    """Link and unlink a program that does nothing."""
    from tracepipe.tracer.bpf import bpf

    program = bpf.load_program("tracepipe_try", _DO_NOTHING, bpf.PROG_TYPE_KPROBE, attach_type)
    try:
        return _timed(lambda: link(program), os.close)
    finally:
        os.close(program)


def _timed(attach: Callable[[], int], detach: Callable[[int], None]) -> Timing:
    began_ns = time.monotonic_ns()
    held = attach()
    attached_ns = time.monotonic_ns()
    detach(held)
    return Timing(attached_ns - began_ns, time.monotonic_ns() - attached_ns)


def _harmless_function() -> tuple[str, int]:
    """A function of the libc that this process has mapped: path and offset. Raises CaptureUnavailable."""
    from tracepipe.tracer.find.elf import Elf
    from tracepipe.tracer.find.library import mapped_files

    for name, path in mapped_files(os.getpid()):
        if name.startswith(("libc.", "libc-", "ld-musl", "libc.musl")):
            with Elf(path) as elf:
                for function, address in elf.functions():
                    if function == _RARELY_CALLED:
                        return path, elf.file_offset(address)
    raise CaptureUnavailable(
        "There is no libc to try a probe on.", "Use a Python that is linked dynamically."
    )
