"""Commands of ioctl, taken apart and named."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_DIRECTIONS = ("none", "write", "read", "read_write")
_NVIDIA_MAGIC = ord("F")
_NVIDIA_NAMES = Path(__file__).with_name("nvidia_ioctl.toml")


def command_text(command: int, name: str = "cmd") -> str:
    """`"cmd":…,"dir":…,…` of an ioctl's command; the command itself has the argument's name."""
    decoded = decode_command(command)
    members = {name if key == "cmd" else key: part for key, part in decoded.items()}
    return json.dumps(members, separators=(",", ":"))[1:-1]


def decode_command(command: int) -> dict[str, int | str]:
    """`{cmd, dir, type, nr, size_bytes}` of an ioctl command, and `request` if NVIDIA's driver has a name for
    it.

    `type` is a character if it is printable ASCII, as in `'F'`. Other drivers (frame buffers) use this type
    too: `request` is right only if the file is NVIDIA's. Commands of nvidia-uvm are plain numbers without
    these fields, but are decoded like the others.
    """
    command &= 0xFFFFFFFF
    magic, number = command >> 8 & 0xFF, command & 0xFF
    decoded: dict[str, int | str] = {
        "cmd": command,
        "dir": _DIRECTIONS[command >> 30],
        "type": chr(magic) if 0x20 < magic < 0x7F else magic,
        "nr": number,
        "size_bytes": command >> 16 & 0x3FFF,
    }
    control, whole = _nvidia_names()
    name = control.get(number) if magic == _NVIDIA_MAGIC else whole.get(command)
    if name is not None:
        decoded["request"] = name
    return decoded


@cache
def _nvidia_names() -> tuple[dict[int, str], dict[int, str]]:
    """NVIDIA's names by number, of commands of type 'F', and by whole command."""
    tables = tomllib.loads(_NVIDIA_NAMES.read_text(encoding="utf-8"))
    control, uvm, display = (
        {int(number, 0): name for number, name in tables[table].items()}
        for table in ("control", "uvm", "display")
    )
    return control, uvm | display
