"""Names of the outputs of a capture: with parts in braces, in a folder, or by default."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path

from tracepipe import seen
from tracepipe.capture.request import CaptureRequest
from tracepipe.errors import TracepipeError
from tracepipe.recording.files import STANDARD, free_name, made_folder

# Variables with the rank of a process in a job, set by torchrun, Open MPI and Slurm. The last one is
# torchrun's rank among the processes of one machine.
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID", "LOCAL_RANK")
_BRACES = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")


def title_of(request: CaptureRequest) -> str:
    """The name that a recording's default name begins with."""
    if request.command:
        return Path(request.command[0]).name
    return request.comm or ("system" if request.system else f"pid-{request.pids[0]}")


class OutputNames:
    """Names of the outputs of one capture. A part in braces has the same value in all of them."""

    def __init__(self, request: CaptureRequest) -> None:
        self._program = title_of(request).replace("/", "_")
        pid = request.pids[0] if request.pids else os.getpid()
        now = time.localtime()
        self._parts: dict[str, Callable[[], str]] = {
            "time": lambda: time.strftime("%Y%m%d-%H%M%S", now),
            "pid": lambda: str(pid),
            "program": lambda: self._program,
            "host": platform.node,
            "rank": _rank,
        }

    def recording(self, given: str) -> str:
        """The name of the recording. Its folder is made. Raises TracepipeError."""
        return self._named(given, ".jsonl") if given else free_name(self._program, ".jsonl")

    def command_output(self, given: str) -> str:
        """The name of the command's output, which has none by default."""
        return self._named(given, ".txt") if given else ""

    def _named(self, given: str, suffix: str) -> str:
        if given == STANDARD:
            return given
        name = _BRACES.sub(lambda found: self._part(found, given), given)
        if name.endswith("/") or seen.is_folder(name):
            return free_name(self._program, suffix, made_folder(Path(name)))
        made_folder(Path(name).parent)
        return name

    def _part(self, found: re.Match[str], given: str) -> str:
        if found[1] is None:
            return found[0][0]
        if found[1] not in self._parts:
            known = ", ".join(f"{{{part}}}" for part in self._parts)
            raise TracepipeError(
                f"{found[0]} in {given} is not known.",
                f"Use one of: {known}. Write a brace itself twice.",
            )
        return self._parts[found[1]]()


def _rank() -> str:
    """The rank of this process in its job. Raises TracepipeError where that is not known."""
    name = next((name for name in _RANKS if os.environ.get(name)), "")
    if not name:
        raise TracepipeError(
            f"There is no {{rank}}: none of {', '.join(_RANKS)} is set.",
            "Start it with torchrun, mpirun or srun. With sudo, use sudo -E or sudo RANK=$RANK.",
        )
    rank = os.environ[name]
    if not (rank.isascii() and rank.isdecimal()):
        raise TracepipeError(
            f"{name} is {rank!r}, which is not a rank.", f"Set {name} to a number, or unset it."
        )
    return rank
