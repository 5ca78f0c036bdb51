"""A program with one of the libraries in it, and stand-ins of NVIDIA's, while it is recorded."""

from __future__ import annotations

import json
import os
import select
import subprocess
from pathlib import Path
from typing import Any

from tracepipe.tracer.gpu.engines.channel import Channel
from tracepipe.tracer.gpu.engines.streams import GpuRenderer
from tracepipe.tracer.records.record import Loss


class Recorded:
    """The program while it is recorded, as a capture does it."""

    def __init__(self, program: Path, renderer: GpuRenderer, windows: bool = False, **more: str) -> None:
        self.channel = Channel(1 << 20)
        if windows:
            self.channel.expect_windows()
        self.renderer = renderer
        self.events: list[dict[str, Any]] = []
        self.losses: list[Loss] = []
        """Of the channel, at the end."""
        settings = {**os.environ, **self.channel.environment(), **more}
        settings["TRACEPIPE_GPU_PATCHES"] = str(program.parent / "patches")
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([str(program)], env=settings, stdin=pipe, stdout=pipe, bufsize=0)
        self._said = b""

    def answer(self) -> str:
        """The next line that the program says; it is recorded meanwhile."""
        assert self.process.stdout is not None
        while b"\n" not in self._said:
            if select.select([self.process.stdout], [], [], 0.001)[0]:
                printed = self.process.stdout.read(4096)
                assert printed, "the program has ended"
                self._said += printed
            self.take()
        line, _, self._said = self._said.partition(b"\n")
        return line.decode()

    def do(self, words: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{words}\n".encode())
        return self.answer()

    def take(self, *, is_final: bool = False) -> None:
        """What has come, without a wait for what belongs to it."""
        texts = self.renderer.render(self.channel.collect(is_final=is_final)).texts
        self.events += [json.loads(line) for line in (*texts, *self.renderer.last().texts)]

    def wait_for(self, count: int, kind: str = "gpu_kernel") -> None:
        while len(self.of(kind)) < count:
            self.take()

    def lose_reader(self) -> None:
        """What the kernel does for a capture process that is killed."""
        for connection in self.channel._processes:
            connection.close()

    def stop(self) -> None:
        self.channel.stop()
        while not self.channel.is_over():
            self.take()
        self.take(is_final=True)

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == kind]

    def end(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        self.take(is_final=True)
        self.losses = self.channel.losses({})
        self.channel.close()
        return self.process.returncode
