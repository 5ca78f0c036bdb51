"""Looks at and writes URLs in a process of its own, for a capture.

The packages of protocols start threads, which would take the capture's signals and be forked with it, and
share the interpreter with what empties its buffers.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from tracepipe.errors import LibraryMissing, OutputError, TracepipeError
from tracepipe.recording import remote

_CODE: Final = (
    "import sys; sys.path[:] = sys.argv[2:]; from tracepipe.recording import apart; apart.main(sys.argv[1])"
)


def is_taken(url: str) -> bool:
    """As `remote.is_taken`."""
    process = _started({"url": url})
    try:
        return bool(_answer(process).get("is_taken"))
    except BaseException:
        process.kill()
        raise


def sending(file: Path, url: str, *, force: bool) -> subprocess.Popen[bytes]:
    """A process that copies a complete file to a URL, and removes it then with its folder."""
    return _started({"url": url, "file": str(file), "force": force})


def wait_for(process: subprocess.Popen[bytes]) -> None:
    """Wait until a file is copied. Raises OutputError, LibraryMissing."""
    _answer(process)


def _started(order: dict[str, object]) -> subprocess.Popen[bytes]:
    """A process, which imports modules from where this one does."""
    paths = [str(Path(path).absolute()) for path in sys.path]
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-c", _CODE, json.dumps(order), *paths],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C is for the capture alone
        )
    except OSError as e:
        raise OutputError(f"no process for {order['url']}: {e.strerror}", "Try it again.") from e


def _answer(process: subprocess.Popen[bytes]) -> dict[str, bool]:
    said = process.communicate()[0]
    try:
        answer = json.loads(said.splitlines()[-1])
    except (IndexError, ValueError):
        raise OutputError(
            f"the process that writes URLs ended with {process.returncode}", "Look above for the reason."
        ) from None
    if isinstance(answer, dict):
        return answer
    kind, message, hint = answer
    raise (LibraryMissing if kind == LibraryMissing.__name__ else OutputError)(message, hint)


def main(order: str) -> None:
    """Do what was ordered, and answer on standard output."""
    asked = json.loads(order)
    url = asked["url"]
    answer: dict[str, bool] | list[str] = {}
    try:
        if "file" not in asked:
            answer = {"is_taken": remote.is_taken(url)}
        else:
            remote.send(asked["file"], url, force=asked["force"])
            shutil.rmtree(Path(asked["file"]).parent, ignore_errors=True)
    except TracepipeError as e:
        answer = [type(e).__name__, e.message, e.hint]
    os.write(1, f"\n{json.dumps(answer)}\n".encode())
