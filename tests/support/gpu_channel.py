"""Programs that write into a GPU channel, as a traced process does, while this one collects."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

from tracepipe.tracer.gpu.engines.channel import Channel


def collected(
    channel: Channel,
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    check: bool = True,
) -> tuple[bytes, str]:
    """What a program put into the channel until its end, and what it printed."""
    settings = {**os.environ, **channel.environment(), **(environment or {})}
    chunks: list[bytes] = []
    printed: list[str] = []
    with subprocess.Popen(list(command), env=settings, stdout=subprocess.PIPE, text=True) as process:
        reader = threading.Thread(target=_read, args=(process.stdout, printed))
        reader.start()
        while reader.is_alive():
            chunks.append(channel.collect())
            reader.join(0.001)
    assert not check or process.returncode == 0
    chunks.append(channel.collect(is_final=True))
    return b"".join(chunks), "".join(printed)


def _read(stream: IO[Any] | None, printed: list[str]) -> None:
    assert stream is not None
    printed.append(stream.read())
