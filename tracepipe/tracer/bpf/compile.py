"""Compiles probes.bpf.c with iovisor's BCC. This module only compiles; engines/probes.py loads and attaches.

BCC comes from the distribution (python3-bpfcc). It needs no kernel headers here: the programs read no kernel
structures, and the few headers that BCC's own helpers include are in stub_headers/.

    python -m tracepipe.tracer.bpf.compile > tracepipe/tracer/bpf/probes.json

writes the bytecode for every architecture, which tracepipe ships for hosts without BCC.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import os
import sys
import warnings
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from tracepipe.errors import CaptureUnavailable
from tracepipe.tracer.bpf.bytecode import PROGRAMS
from tracepipe.tracer.records.syscalls import SYSCALLS

if TYPE_CHECKING:
    from types import ModuleType

_HERE = Path(__file__).parent
_SOURCE = _HERE / "probes.bpf.c"
SHIPPED = _HERE / "probes.json"
_DISTRIBUTION = "/usr/lib/python3/dist-packages"
_INSTALL = (
    "apt install python3-bpfcc   (Fedora: dnf install python3-bcc; never pip: PyPI's bcc is another program)"
)


def import_bcc() -> ModuleType:
    """Import iovisor's module, also in a virtual environment, which hides the distribution's packages.

    Raises CaptureUnavailable.
    """
    if _DISTRIBUTION not in sys.path:
        sys.path.append(_DISTRIBUTION)
    try:
        with warnings.catch_warnings():
            # Newer Pythons warn about its regular expressions, each version with another warning.
            warnings.simplefilter("ignore")
            module = importlib.import_module("bcc")
    except ImportError as error:
        raise CaptureUnavailable(f"BCC's Python module cannot be loaded: {error}.", _INSTALL) from None
    if not hasattr(module, "BPF"):
        raise CaptureUnavailable(
            "The Python module bcc here is PyPI's, not iovisor's.", f"pip uninstall bcc; {_INSTALL}"
        )
    return module


def compiled(machine: str) -> dict[str, bytes]:
    """Compile every program for an architecture of SYSCALLS. Raises CaptureUnavailable."""
    module = import_bcc()
    previous = os.environ.get("BCC_KERNEL_SOURCE")
    os.environ["BCC_KERNEL_SOURCE"] = str(_HERE / "stub_headers")
    try:
        program = module.BPF(src_file=str(_SOURCE).encode(), cflags=[f"-DTRACEPIPE_{machine.upper()}"])
        try:
            return {name: bytes(program.dump_func(name.encode())) for name in PROGRAMS}
        finally:
            program.cleanup()
    except Exception as error:  # BCC raises Exception itself
        raise CaptureUnavailable(
            f"BCC could not compile the probes: {error}.",
            "Its messages are above. --method prebuilt uses the bytecode that tracepipe ships.",
        ) from error
    finally:
        if previous is None:
            del os.environ["BCC_KERNEL_SOURCE"]
        else:
            os.environ["BCC_KERNEL_SOURCE"] = previous


def source_digest() -> str:
    """The SHA-256 of the sources of the bytecode: the program and the stub headers."""
    digest = hashlib.sha256()
    for path in [_SOURCE, *sorted((_HERE / "stub_headers").rglob("*.h"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _main() -> None:
    shipped = {
        "source_sha256": source_digest(),
        "compiler": f"bcc {getattr(import_bcc(), '__version__', 'unknown')}",
        "programs": {
            machine: {
                name: base64.b64encode(zlib.compress(code, 9)).decode()
                for name, code in compiled(machine).items()
            }
            for machine in SYSCALLS
        },
    }
    json.dump(shipped, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    _main()
