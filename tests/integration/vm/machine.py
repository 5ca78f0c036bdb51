"""Boots the image under QEMU and gives back what the guest sends over its second serial port."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.integration.vm.image import Image, Unobtainable

_EMULATOR = "qemu-system-x86_64"
LIMIT_S = 900  # two to three minutes, where it has a processor to itself
MEMORY_MB = 1536  # the archive, and the files that it is unpacked to


def find_emulator() -> str:
    """Path of QEMU. Raises Unobtainable."""
    path = shutil.which(_EMULATOR)
    if path is None:
        raise Unobtainable(f"there is no {_EMULATOR} (apt install qemu-system-x86)")
    return path


def boot(emulator: str, image: Image, folder: Path) -> str:
    """What was sent, as text; `folder` keeps it and the console's log.

    The processor is emulated (TCG), so that neither /dev/kvm nor nested virtualisation is needed; its two
    processors take turns on one thread, as kernels whose code is patched while it runs crashed otherwise.
    """
    sent, console = folder / "sent", folder / "console.log"
    command = [emulator, "-accel", "tcg,thread=single", "-cpu", "max", "-smp", "2", "-m", str(MEMORY_MB)]
    command += ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
    command += ["-serial", f"file:{console}", "-serial", f"file:{sent}"]
    command += ["-kernel", str(image.vmlinuz), "-initrd", str(image.initramfs)]
    command += ["-append", "console=ttyS0 panic=-1 quiet"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"the machine did not end:\n{console.read_text(errors='replace')}") from None
    text = sent.read_text() if sent.exists() else ""
    assert text, f"the machine sent nothing:\n{console.read_text(errors='replace')}"
    return text
