"""Names of the outputs of a capture: with parts that are filled in, in a folder, or by default.

A part is a percent sign and a letter, as in Nsight's names and in core(5): no shell takes it for its own.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path

from tracepipe import paths
from tracepipe.errors import TracepipeError
from tracepipe.launchers import place_of
from tracepipe.recording.files import STANDARD
from tracepipe.recording.outputs import free_name, made_folder
from tracepipe.recording.remote import check_url, is_url
from tracepipe.tracer.request import CaptureRequest

_PARTS = re.compile(r"%(.?)", re.DOTALL)


def title_of(request: CaptureRequest) -> str:
    """The name that a recording's default name begins with."""
    if request.command:
        return Path(request.command[0]).name
    return request.comm or ("system" if request.system else f"pid-{request.pids[0]}")


class OutputNames:
    """Names of the outputs of one capture. A part has the same value in all of them."""

    def __init__(self, request: CaptureRequest) -> None:
        self._program = title_of(request).replace("/", "_")
        pid = request.pids[0] if request.pids else os.getpid()
        now = time.localtime()
        self._parts: dict[str, Callable[[], str]] = {
            "h": lambda: platform.node().replace("/", "_"),
            "r": lambda: str(place_of(request.command, request.pids).rank),
            "w": lambda: _world_size(request),
            "p": lambda: str(pid),
            "e": lambda: self._program,
            "t": lambda: time.strftime("%Y%m%d-%H%M%S", now),
            "%": lambda: "%",
        }

    def recording(self, given: str) -> str:
        """The name of the recording. Its folder is made. Raises TracepipeError."""
        return self._named(given, ".jsonl") if given else free_name(self._program, ".jsonl")

    def command_output(self, given: str) -> str:
        """The name of the command's output, which has none by default."""
        if is_url(given):
            raise TracepipeError("The command's output does not go to a URL.", "Name a file for it.")
        return self._named(given, ".txt") if given else ""

    def _named(self, given: str, suffix: str) -> str:
        if given == STANDARD:
            return given
        name = _PARTS.sub(lambda found: self._part(found, given), given)
        if is_url(name):
            check_url(name)
            return f"{name}{self._program}{suffix}" if name.endswith("/") else name
        if name.endswith("/") or paths.is_folder(name):
            return free_name(self._program, suffix, made_folder(Path(name)))
        made_folder(Path(name).parent)
        return name

    def _part(self, found: re.Match[str], given: str) -> str:
        if found[1] not in self._parts:
            known = ", ".join(f"%{part}" for part in self._parts if part != "%")
            raise TracepipeError(
                f"{found[0]} in {given} is not known.",
                f"Use one of: {known}. Write a percent sign itself twice.",
            )
        return self._parts[found[1]]()


def _world_size(request: CaptureRequest) -> str:
    """How many ranks the job has. Raises TracepipeError where that is not known."""
    size = place_of(request.command, request.pids).world_size
    if size is None:
        raise TracepipeError("The number of ranks is not known.", "Leave out %w, or set WORLD_SIZE.")
    return str(size)
