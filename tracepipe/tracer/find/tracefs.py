"""Reads tracefs: the ids of tracepoints, and the offsets of their fields."""

from __future__ import annotations

import ctypes
import errno
import os
import re
from pathlib import Path

from tracepipe.errors import CaptureUnavailable
from tracepipe.paths import is_folder

HOW_TO_MOUNT = (
    "mount -t tracefs none /sys/kernel/tracing   "
    "(a container needs --privileged, or its host's: -v /sys/kernel/tracing:/sys/kernel/tracing:ro)"
)
_FOLDERS = (Path("/sys/kernel/tracing"), Path("/sys/kernel/debug/tracing"))
# `	field:pid_t prev_pid;	offset:24;	size:4;	signed:1;`, arrays as `char comm[16]`
_FIELD = re.compile(r"field:[^;]*?(\w+)(?:\[[^]]*\])?;\s*offset:(\d+);")


def tracing_folder() -> Path:
    """The folder of tracefs, which is mounted now if it was not. Raises CaptureUnavailable."""
    for folder in _FOLDERS:
        if is_folder(folder / "events"):
            return folder
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", os.fsencode(_FOLDERS[0]), b"tracefs", 0, None):
        reason = os.strerror(ctypes.get_errno())
        raise CaptureUnavailable(
            f"tracefs is not mounted and cannot be mounted: {reason}.",
            HOW_TO_MOUNT,
        )
    return _FOLDERS[0]


def tracepoint_id(folder: Path, name: str) -> int:
    """The id of the tracepoint `group/name`. Raises CaptureUnavailable."""
    return int(_read(folder, name, "id"))


def field_offsets(folder: Path, name: str) -> dict[str, int]:
    """The byte offset of every field in the record of the tracepoint `group/name`. Raises
    CaptureUnavailable.
    """
    return {field: int(offset) for field, offset in _FIELD.findall(_read(folder, name, "format"))}


def _read(folder: Path, name: str, file: str) -> str:
    try:
        return (folder / "events" / name / file).read_text()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):  # a shortage, not a missing tracepoint
            raise
        raise CaptureUnavailable(
            f"The kernel has no tracepoint {name}: {error.strerror}.",
            "Use a kernel built with CONFIG_FTRACE_SYSCALLS and CONFIG_EVENT_TRACING.",
        ) from None
