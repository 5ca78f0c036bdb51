"""The engine `bcc`: iovisor's BCC compiles probes.bpf.c, and only that; probes.py loads and attaches.

BCC comes from the distribution (python3-bpfcc). It needs no kernel headers here: the program reads no kernel
structure, and the few headers that BCC's own helpers include are in stub_headers/.
"""

from __future__ import annotations

import importlib
import mmap
import os
import platform
import sys
import warnings
from pathlib import Path
from typing import Any

from tracepipe.capture.engine import ALL_LAYERS, Notify, Plan
from tracepipe.capture.probes import Maps, ProbeRecording, Source, possible_processors
from tracepipe.capture.syscalls import SYSCALLS
from tracepipe.capture.tracefs import field_offsets, tracing_folder
from tracepipe.errors import CaptureUnavailable

_HERE = Path(__file__).parent
_DISTRIBUTION = "/usr/lib/python3/dist-packages"
_INSTALL = (
    "apt install python3-bpfcc   (Fedora: dnf install python3-bcc; never pip: PyPI's bcc is another program)"
)
_OLDEST = (5, 15)  # bpf_get_attach_cookie
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO, the same on every kernel

# Tracepoint fields that the program reads: macro → (tracepoint, field).
_FIELDS = {
    "ENTER_ID": ("raw_syscalls/sys_enter", "id"),
    "ENTER_ARGS": ("raw_syscalls/sys_enter", "args"),
    "EXIT_ID": ("raw_syscalls/sys_exit", "id"),
    "EXIT_RET": ("raw_syscalls/sys_exit", "ret"),
    "SWITCH_PREV_PID": ("sched/sched_switch", "prev_pid"),
    "SWITCH_PREV_STATE": ("sched/sched_switch", "prev_state"),
    "SWITCH_NEXT_PID": ("sched/sched_switch", "next_pid"),
    "WAKEUP_PID": ("sched/sched_wakeup", "pid"),
    "WAKEUP_TARGET_CPU": ("sched/sched_wakeup", "target_cpu"),
    "EXEC_OLD_PID": ("sched/sched_process_exec", "old_pid"),
    "NEWTASK_PID": ("task/task_newtask", "pid"),
    "NEWTASK_FLAGS": ("task/task_newtask", "clone_flags"),
    "RENAME_PID": ("task/task_rename", "pid"),
    "RENAME_NEWCOMM": ("task/task_rename", "newcomm"),
}


class BccEngine:
    """Compiles with BCC when a capture starts: 0.3 to 0.5 s."""

    name = "bcc"
    layers = frozenset(ALL_LAYERS)

    def check(self) -> str:
        """BCC's version. Raises CaptureUnavailable."""
        if platform.system() != "Linux" or platform.machine() not in SYSCALLS:
            raise CaptureUnavailable(
                f"Capture does not know {platform.system()} on {platform.machine()}.",
                f"Capture on Linux on {' or '.join(SYSCALLS)}; files are converted anywhere.",
            )
        release = platform.release()
        numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2])
        if numbers < _OLDEST:
            raise CaptureUnavailable(f"Kernel {release} is too old for capture.", "Use Linux 5.15 or later.")
        if os.geteuid() != 0:
            raise CaptureUnavailable("Capture with eBPF needs root.", "sudo -E tracepipe capture …")
        if str(Path("/proc/self/ns/pid").readlink()) != _INITIAL_PID_NAMESPACE:
            raise CaptureUnavailable(
                "This is a container with process ids of its own, which the kernel's probes do not see.",
                "docker run --privileged --pid=host …",
            )
        return str(getattr(_import_bcc(), "__version__", "unknown"))

    def attach(self, plan: Plan, notify: Notify) -> ProbeRecording:
        """Compile and attach. Raises CaptureUnavailable."""
        return ProbeRecording(_Compiled(plan), plan, notify)


def _import_bcc() -> Any:
    """iovisor's module, also from inside a virtual environment, which does not show the distribution's."""
    if _DISTRIBUTION not in sys.path:
        sys.path.append(_DISTRIBUTION)
    try:
        with warnings.catch_warnings():
            # Its regular expressions make newer Pythons complain, each version in another way.
            warnings.simplefilter("ignore")
            module = importlib.import_module("bcc")
    except ImportError as error:
        raise CaptureUnavailable(f"BCC's Python module cannot be loaded: {error}.", _INSTALL) from None
    if not hasattr(module, "BPF"):
        raise CaptureUnavailable(
            "The Python module bcc here is PyPI's, not iovisor's.", f"pip uninstall bcc; {_INSTALL}"
        )
    return module


class _Compiled(Source):
    """The compiled programs, and the maps that BCC created for them."""

    def __init__(self, plan: Plan) -> None:
        module = _import_bcc()
        flags = [f"-D{name}={value}" for name, value in _definitions(plan).items()]
        previous = os.environ.get("BCC_KERNEL_SOURCE")
        os.environ["BCC_KERNEL_SOURCE"] = str(_HERE / "stub_headers")
        try:
            self._bpf = module.BPF(src_file=str(_HERE / "probes.bpf.c").encode(), cflags=flags)
        except Exception as error:  # BCC raises Exception itself, for a refused map as for a compile error
            raise CaptureUnavailable(
                f"BCC could not compile the probes or create their maps: {error}.",
                "Is this root with CAP_BPF, and is there memory for the ring (--ring-bytes)?",
            ) from error
        finally:
            if previous is None:
                del os.environ["BCC_KERNEL_SOURCE"]
            else:
                os.environ["BCC_KERNEL_SOURCE"] = previous
        self.maps = Maps(**{name: self._bpf[name.encode()].map_fd for name in Maps.__annotations__})

    def instructions(self, program: str) -> bytes:
        """Bytecode of a program, its map references resolved."""
        return bytes(self._bpf.dump_func(program.encode()))

    def close(self) -> None:
        """Free the compiler's memory and the maps."""
        self._bpf.cleanup()


def _definitions(plan: Plan) -> dict[str, int]:
    folder = tracing_folder()
    offsets = {point: field_offsets(folder, point) for point in {point for point, _ in _FIELDS.values()}}
    return {
        f"TRACEPIPE_{platform.machine().upper()}": 1,
        "TRACEPIPE_PAGE_BYTES": mmap.PAGESIZE,
        "RING_PAGES": max(plan.ring_bytes // mmap.PAGESIZE, 1),
        "CPU_COUNT": possible_processors(),
        "WITH_SCHEDULER": int("scheduler" in plan.layers),
        **{macro: offsets[point][field] for macro, (point, field) in _FIELDS.items()},
    }
