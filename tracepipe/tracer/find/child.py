"""Asks a short-lived child process, for what a foreign file could do to the process that does it."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_ERROR_BYTES = 1 << 12


def answer(
    program: str,
    task: object,
    *,
    bytes_max: int,
    timeout_s: float,
    user: Mapping[str, Any] = MappingProxyType({}),
    files: tuple[int, ...] = (),
) -> bytes:
    """The output of a Python program that gets `task` as JSON. `user` are options of Popen, `files`
    descriptors that it keeps. Raises OSError, SubprocessError; ValueError if it fails, or writes more than
    `bytes_max`.
    """
    environment = {
        name: value for name, value in os.environ.items() if name in ("PATH", "LD_LIBRARY_PATH", "LANG")
    }
    with tempfile.TemporaryFile() as given:
        given.write(json.dumps(task).encode())
        given.seek(0)
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", program],
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            cwd="/",
            start_new_session=True,  # a Ctrl-C is for the capture
            pass_fds=files,
            **user,
        )
    end_s = time.monotonic() + timeout_s
    assert process.stdout is not None and process.stderr is not None
    with process, selectors.DefaultSelector() as waiting:
        try:
            out, errors = bytearray(), bytearray()
            waiting.register(process.stdout, selectors.EVENT_READ, out)
            waiting.register(process.stderr, selectors.EVENT_READ, errors)
            while waiting.get_map():
                ready = waiting.select(max(end_s - time.monotonic(), 0))
                if not ready:
                    raise subprocess.TimeoutExpired(process.args, timeout_s)
                for key, _ in ready:
                    if part := os.read(key.fd, 1 << 16):
                        key.data.extend(part)
                    else:
                        waiting.unregister(key.fileobj)
                if len(out) > bytes_max:
                    raise ValueError("it writes without end")
                del errors[:-_ERROR_BYTES]
            process.wait(max(end_s - time.monotonic(), 0))
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        lines = errors.decode(errors="replace").strip().splitlines()
        raise ValueError(lines[-1] if lines else f"the child process ended with {process.returncode}")
    return bytes(out)
