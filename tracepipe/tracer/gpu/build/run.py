"""Runs a compiler as the user who runs the command, and reports its output if it fails."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tracepipe.errors import CaptureUnavailable
from tracepipe.tracer.gpu.build.driver import Owner

_LINES_SHOWN: Final = 3
_LINE_MAX: Final = 200
_ROOM_BYTES: Final = 1 << 20  # a compiler needs more than that
_NO_ROOM: Final = re.compile("No space left on device|Disk quota exceeded")


def run(
    command: Sequence[str], user: Owner, *, failure: str, timeout_s: float, output: Path | None = None
) -> str:
    """Run a compiler, and return what it prints. Only the user can write the file that it makes, `output`.

    Raises CaptureUnavailable, whose message begins with `failure`.
    """
    environment = {**os.environ, "HOME": str(user.home), "LC_ALL": "C"}
    try:
        done: subprocess.CompletedProcess[str] = subprocess.run(
            [*command, *(["-o", str(output)] if output else [])],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            umask=0o022,
            env=environment,
            cwd="/",
            **user.run_as,
        )
    except subprocess.TimeoutExpired:
        raise CaptureUnavailable(
            f"{failure}: it did not end within {timeout_s} s.",
            "Check whether the machine is busy, and try again.",
        ) from None
    except (OSError, subprocess.SubprocessError) as error:
        raise CaptureUnavailable(f"{failure}: {error}.", f"Check that {command[0]} works.") from None
    if done.returncode:
        raise _refusal(failure, command, done, output)
    return done.stdout


def _refusal(
    failure: str, command: Sequence[str], done: subprocess.CompletedProcess[str], output: Path | None
) -> CaptureUnavailable:
    lines = [line.strip()[:_LINE_MAX] for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower()] or lines
    first = errors[0].rstrip(".") if errors else f"it ended with {done.returncode} and wrote nothing"
    shown = f" Its output: {' | '.join(lines[-_LINES_SHOWN:])}" if len(lines) > 1 else ""
    temporary = Path(os.environ.get("TMPDIR") or "/tmp")
    if not os.access(temporary, os.W_OK | os.X_OK):
        return CaptureUnavailable(
            f"{failure}: {first}.",
            f"Set TMPDIR to a writable folder, which {temporary} is not.{shown}",
        )
    full = [
        folder for folder in (temporary, output.parent if output else None) if folder and _is_full(folder)
    ]
    if full or _NO_ROOM.search(done.stderr):
        where = " and ".join(map(str, full or [temporary]))
        hint = f"Free some space in {where}" + (
            ", or set TMPDIR to a folder with free space." if temporary in full or not full else "."
        )
        return CaptureUnavailable(f"{failure}, as the disk is full: {first}.", hint + shown)
    return CaptureUnavailable(f"{failure}: {first}.", f"Run it to see why: {' '.join(command)}{shown}")


def _is_full(folder: Path) -> bool:
    try:
        state = os.statvfs(folder)
    except OSError:
        return False
    return state.f_bavail * state.f_frsize < _ROOM_BYTES or (state.f_files > 0 and not state.f_favail)
