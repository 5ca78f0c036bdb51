"""The engines `bcc` and `prebuilt`: one source and one loader, compiled by BCC here or ahead of time."""

from __future__ import annotations

import base64
import json
import os
import platform
import zlib

from tracepipe.errors import CaptureUnavailable
from tracepipe.hooks.hook import RECORDED_LAYERS
from tracepipe.tracer.bpf.compile import SHIPPED, compiled, import_bcc
from tracepipe.tracer.engines.probes import ProbeAttachment
from tracepipe.tracer.machine.facts import this_machine
from tracepipe.tracer.machine.refusals import SUDO, check_file_systems
from tracepipe.tracer.records.syscalls import SYSCALLS
from tracepipe.tracer.request import Notify, Plan

_OLDEST = (5, 15)  # bpf_get_attach_cookie


class BccEngine:
    """Compiles the programs with BCC when a capture starts."""

    name = "bcc"
    layers = frozenset(RECORDED_LAYERS)

    def check(self) -> str:
        """Return BCC's version. Raises CaptureUnavailable."""
        check_machine()
        return str(getattr(import_bcc(), "__version__", "unknown"))

    def attach(self, plan: Plan, notify: Notify) -> ProbeAttachment:
        """Compile and attach. Raises CaptureUnavailable."""
        return ProbeAttachment(compiled(platform.machine()), plan, notify)


class PrebuiltEngine:
    """Loads the bytecode that tracepipe ships, for hosts without BCC."""

    name = "prebuilt"
    layers = frozenset(RECORDED_LAYERS)

    def check(self) -> str:
        """Return the compiler that made the bytecode. Raises CaptureUnavailable."""
        check_machine()
        return str(json.loads(SHIPPED.read_text())["compiler"])

    def attach(self, plan: Plan, notify: Notify) -> ProbeAttachment:
        """Attach the shipped programs. Raises CaptureUnavailable."""
        programs = json.loads(SHIPPED.read_text())["programs"][platform.machine()]
        return ProbeAttachment(
            {name: zlib.decompress(base64.b64decode(code)) for name, code in programs.items()}, plan, notify
        )


def check_machine() -> None:
    """Raise CaptureUnavailable where the BPF programs cannot be loaded."""
    if platform.system() != "Linux" or platform.machine() not in SYSCALLS:
        raise CaptureUnavailable(
            f"Capture does not support {platform.system()} on {platform.machine()}.",
            f"Capture on Linux on {' or '.join(SYSCALLS)}. Recordings can be converted on any machine.",
        )
    release = platform.release()
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2])
    if numbers < _OLDEST:
        raise CaptureUnavailable(f"Kernel {release} is too old for capture.", "Use Linux 5.15 or later.")
    check_file_systems(this_machine())
    if os.geteuid() != 0:
        raise CaptureUnavailable("Capture with eBPF needs root.", SUDO)
