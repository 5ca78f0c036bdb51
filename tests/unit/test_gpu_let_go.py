"""The library of `kernels` at the end of a recording: with a CUPTI that does as NVIDIA's documentation says.

tests/gpu tries the same with CUPTI itself, on a GPU.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tracepipe.capture.gpu.build.cuda_parts import find_parts
from tracepipe.capture.gpu.engines.channel import Channel
from tracepipe.capture.gpu.engines.kernel_lines import KernelsRenderer

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "tracepipe/capture/gpu/native"


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in for a program with CUPTI, and the library in it."""
    compiler, parts = shutil.which("g++"), find_parts().cupti
    if compiler is None or not parts or (parts[0].version or (0, 0)) < (13, 0):
        pytest.skip("there is no g++, or no header of CUPTI 13")
    folder, sources = tmp_path_factory.mktemp("standin"), ROOT / "tests/gpu"
    flags = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"]
    shared = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(folder / "libcuda.so.1")]
    subprocess.run([compiler, *flags, *shared, str(sources / "cuda_standin.cpp")], check=True)
    include = [f"-I{NATIVE}", *(f"-isystem{path}" for path in parts[0].include)]
    libraries = [str(folder / "libcuda.so.1"), f"-Wl,-rpath,{folder}", "-rdynamic", "-ldl"]
    both = [str(sources / "cupti_standin.cpp"), str(NATIVE / "kernels.cpp")]
    subprocess.run([compiler, *flags, *include, *both, *libraries, "-o", str(folder / "program")], check=True)
    return folder / "program"


class Recorded:
    """The program while it is recorded, as a capture does it."""

    def __init__(self, program: Path) -> None:
        self.channel = Channel(1 << 20)
        self.renderer = KernelsRenderer()
        self.events: list[dict[str, Any]] = []
        settings = {**os.environ, **self.channel.environment()}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([str(program)], env=settings, stdin=pipe, stdout=pipe, bufsize=0)
        self._said = b""
        self.answer()

    def answer(self) -> str:
        """The next line that the program says; it is recorded meanwhile."""
        assert self.process.stdout is not None
        while b"\n" not in self._said:
            if select.select([self.process.stdout], [], [], 0.001)[0]:
                said = self.process.stdout.read(4096)
                assert said, "the program has ended"
                self._said += said
            self.take()
        line, _, self._said = self._said.partition(b"\n")
        return line.decode()

    def do(self, words: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{words}\n".encode())
        return self.answer()

    def take(self, *, is_final: bool = False) -> None:
        lines = self.renderer.render(self.channel.collect(is_final=is_final))
        self.events += [json.loads(line) for line in lines.texts]

    def wait_for_kernels(self, count: int) -> None:
        while len(self.of("gpu_kernel")) < count:
            self.take()

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
        self.channel.close()
        return self.process.returncode


@pytest.fixture
def recorded(program: Path) -> Iterator[Recorded]:
    made = Recorded(program)
    yield made
    if made.process.poll() is None:
        made.process.kill()
        made.end()


def test_the_last_records_come_and_cupti_goes_where_a_call_returns(recorded: Recorded) -> None:
    recorded.do("launch 3")
    recorded.stop()
    assert len(recorded.of("gpu_kernel")) == 3
    assert recorded.do("call") == "finalized where a call returns"
    assert recorded.answer() == "call without CUPTI"
    assert recorded.do("launch 2") == "launch without CUPTI"
    assert recorded.end() == 0
    assert len(recorded.of("gpu_kernel")) == 3
    assert recorded.of("loss") == []


def test_a_capture_that_is_gone_is_as_one_that_stops(recorded: Recorded) -> None:
    recorded.do("launch 3")
    recorded.wait_for_kernels(3)
    connections = recorded.channel._connections._open
    for connection in connections:
        connection.close()
    while not (said := recorded.do("call")).startswith("finalized"):
        assert said == "call"
    assert said == "finalized where a call returns"


def test_a_profiler_that_has_subscribed_keeps_cupti(recorded: Recorded) -> None:
    recorded.do("launch 1")
    recorded.do("subscribe")
    recorded.stop()
    assert recorded.do("call") == "call"
    assert recorded.do("launch 5") == "launch"
    assert recorded.end() == 0
    assert len(recorded.of("gpu_kernel")) == 1


def test_what_another_profiler_takes_over_is_a_loss_with_a_reason(recorded: Recorded) -> None:
    recorded.do("launch 3")
    recorded.wait_for_kernels(3)
    recorded.do("start 4")
    while len(recorded.of("userspace")) < 7:
        recorded.take()
    recorded.do("take")
    recorded.do("launch 50")
    recorded.stop()
    assert len(recorded.of("gpu_kernel")) == 3
    (loss,) = recorded.of("loss")
    assert (loss["layer"], loss["count"]) == ("gpu_kernel", 4)
    assert "another profiler took CUPTI over in process" in loss["reason"]
    assert "4 launches have no kernel, and later ones could not be seen" in loss["reason"]
    assert recorded.renderer.losses == {"gpu_kernel": 4}
    assert [note for note in recorded.renderer.notes if "another profiler" in note]
    assert recorded.do("call") == "call", "CUPTI is the other's"
    assert recorded.end() == 0


def test_it_is_said_too_where_the_program_ends(recorded: Recorded) -> None:
    recorded.do("launch 3")
    recorded.wait_for_kernels(3)
    recorded.do("take")
    recorded.do("launch 50")
    assert recorded.end() == 0
    (loss,) = recorded.of("loss")
    assert (loss["layer"], loss["count"]) == ("gpu_kernel", 1), "one at least"


def test_it_is_noticed_while_the_program_goes_on(recorded: Recorded) -> None:
    recorded.do("launch 3")
    recorded.wait_for_kernels(3)
    recorded.do("take")
    while not recorded.of("loss"):
        recorded.take()
    assert recorded.channel.is_over(), "there is nothing more to come"


def test_a_program_that_ends_has_given_all(recorded: Recorded) -> None:
    recorded.do("launch 100")
    assert recorded.end() == 0
    assert len(recorded.of("gpu_kernel")) == 100
    assert recorded.of("loss") == []
