"""Recordings for URLs: each is kept in a temporary folder while it is made, and copied when it is complete.

TMP/tracepipe-…/3.jsonl.part    while it is recorded, as for any other file
TMP/tracepipe-…/3.jsonl         when the recording has ended; removed when it is copied

A process of its own looks at URLs and writes them. The packages of protocols start threads, which would take
the capture's signals and be forked with it, and share the interpreter with what empties its buffers.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

from tracepipe import paths
from tracepipe.errors import LibraryMissing, OutputError, TracepipeError
from tracepipe.recording import remote
from tracepipe.recording.outputs import Notify, free_of, give_folder_to_caller, written_recording

_PROGRAMS: Final = {"s3": "aws s3 cp", "gs": "gcloud storage cp"}
_CODE: Final = (
    "import sys, fsspec.core as c; fs, path = c.url_to_fs(sys.argv[2]); fs.put_file(sys.argv[1], path)"
)
_PROCESS_CODE: Final = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from tracepipe.recording import uploads; uploads.main(sys.argv[1])"
)


def is_url_taken(url: str) -> bool:
    """Whether an object is at a URL, as `remote.is_taken` finds it."""
    process = _started({"url": url})
    try:
        return bool(_answer(process).get("is_taken"))
    except BaseException:
        process.kill()
        raise


def start_sending(file: Path, url: str, *, force: bool) -> subprocess.Popen[bytes]:
    """A process that copies a complete file to a URL, and removes it then with its folder."""
    return _started({"url": url, "file": str(file), "force": force})


def wait_until_sent(process: subprocess.Popen[bytes]) -> None:
    """Wait until a file is copied. Raises OutputError, LibraryMissing."""
    _answer(process)


def _started(order: dict[str, object]) -> subprocess.Popen[bytes]:
    """A process, which imports modules from where this one does."""
    folders = [str(Path(path).absolute()) for path in sys.path]
    try:
        return subprocess.Popen(
            [sys.executable, "-I", "-c", _PROCESS_CODE, json.dumps(order), *folders],
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


@dataclass(frozen=True, slots=True)
class _Upload:
    """A complete recording that a process copies."""

    url: str
    file: Path
    process: subprocess.Popen[bytes]

    @property
    def by_hand(self) -> str:
        """The hint for copying it later."""
        return f"Copy it: {self._command(self.url)}"

    @property
    def elsewhere(self) -> str:
        """The hint for copying it where something is at the URL, which may be of another rank."""
        return f"Copy it under another name: {self._command(self.url.rpartition('/')[0] + '/NAME')}"

    def _command(self, url: str) -> str:
        program = _PROGRAMS.get(url.partition("://")[0]) or shlex.join([sys.executable, "-c", _CODE])
        return f"{program} {shlex.quote(str(self.file))} {shlex.quote(url)}"


class Uploads:
    """The recordings of one capture that go to URLs. When its context is left, none is being copied."""

    def __init__(self, notify: Notify) -> None:
        self._notify = notify
        self._running: list[_Upload] = []

    def __enter__(self) -> Uploads:
        return self

    def __exit__(self, *_: object) -> None:
        for error in self.wait():  # of a capture that failed: its error is raised
            self._notify(f"{error.message}. {error.hint}")

    @contextmanager
    def written_recording(self, url: str, *, force: bool) -> Iterator[BinaryIO]:
        """Write a recording that is copied to a URL at the end. What was written is copied in every case.

        Raises what `written_recording` raises.
        """
        try:
            folder = Path(tempfile.mkdtemp(prefix="tracepipe-"))
        except OSError as e:
            raise OutputError(
                f"{url} cannot be recorded to {tempfile.gettempdir()} first: {e.strerror}",
                "Free some space there, or set TMPDIR.",
            ) from e
        give_folder_to_caller(folder)
        file = folder / remote.name_of(url)
        self._notify(f"{url} is recorded to {file} first")
        try:
            with written_recording(str(file), force=False, notify=self._notify) as sink:
                yield sink
        finally:
            if paths.is_file(file):
                self._running.append(_Upload(url, file, start_sending(file, url, force=force)))
            else:
                with suppress(OSError):  # what it has was named by `written_recording`
                    file.parent.rmdir()

    def another(self, url: str) -> str:
        """The first free URL similar to one: …/run-2.jsonl, …/run-3.jsonl. Raises OutputError."""
        folder, _, name = url.rpartition("/")
        others = (f"{folder}/{other}" for other in free_of(Path(name)))
        return next(other for other in others if not is_url_taken(other))

    def wait(self) -> list[OutputError]:
        """Wait until all is copied, and return the errors of what is not. A second signal ends it."""
        failures: list[OutputError] = []
        is_asked_to_end = False
        for upload in self._running:
            if upload.process.poll() is None:
                self._notify(f"copying to {upload.url}")
        while self._running:
            upload = self._running[0]
            try:
                wait_until_sent(upload.process)
            except (KeyboardInterrupt, SystemExit):
                if is_asked_to_end:
                    for left in self._running:
                        left.process.kill()
                        words = f"{left.url} is not written; the recording is {left.file}. {left.by_hand}"
                        self._notify(words)
                    self._running.clear()
                    raise
                is_asked_to_end = True
                self._notify("a second signal ends the copying")
                continue
            except TracepipeError as e:
                is_taken = e.message == remote.taken(upload.url).message
                hint = upload.elsewhere if is_taken else upload.by_hand
                failures.append(OutputError(f"{e.message}; the recording is {upload.file}", hint))
            self._running.pop(0)
        return failures


def check(url: str, *, force: bool) -> None:
    """Raise OutputError where a recording cannot get this URL, LibraryMissing."""
    if is_url_taken(url) and not force:
        raise remote.taken(url)
