"""The programs of the tests on a real GPU, run natively and recorded; what a whole recording has."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.gpu_records import warp_renderer
from tracepipe.errors import CaptureUnavailable
from tracepipe.tracer.gpu.build.toolchain import NATIVE, this_toolchain
from tracepipe.tracer.gpu.engines.streams import GpuEngine, GpuRenderer
from tracepipe.tracer.gpu.engines.warps import WarpStream
from tracepipe.tracer.request import CaptureRequest

HERE = Path(__file__).parent


@dataclass
class Run:
    """What a program printed and how many warps it printed that it launched; what was recorded of it."""

    printed: str
    launched: int
    exit_code: int
    records: list[dict[str, Any]]
    counts: Counter[str]
    renderer: GpuRenderer
    lost: int
    errors: str = ""

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [record for record in self.records if record["type"] == kind]


class Bench:
    """The programs and the native code, built once. Skips where there is no GPU or nothing to build with."""

    def __init__(self, folder: Path) -> None:
        self.tools = this_toolchain()
        try:
            self.gpus = len(self.tools.driver.gpus)
            self.tools.architectures()
            self.library = self.tools.build_host(NATIVE / "warps.cpp", ["sanitizer"])
            self.patches = self.tools.build_patches(NATIVE / "patches.cu")
        except CaptureUnavailable as refusal:
            pytest.skip(f"{refusal.message} {refusal.hint}")
        self._folder = folder
        self.program = self.built("cases")

    def built(self, name: str, *options: str, source: Path | None = None) -> Path:
        """A program of this folder or of `source`, for the machine's first GPU."""
        program, target = self._folder / name, f"-arch={self.tools.architectures()[0]}"
        nvcc = [str(self.tools.nvcc().path), "-O2", "-std=c++17", "-allow-unsupported-compiler", target]
        subprocess.run([*nvcc, *options, "-o", str(program), str(source or HERE / f"{name}.cu")], check=True)
        return program

    def native(self, *command: str) -> Run:
        done = subprocess.run(command, capture_output=True, text=True)
        return Run(
            done.stdout,
            _launched(done.stderr),
            done.returncode,
            [],
            Counter(),
            warp_renderer(),
            0,
            done.stderr,
        )

    def record(self, *command: str, options: CaptureRequest | None = None) -> Run:
        gpus = self.tools.driver.listed
        stream = WarpStream(self.library, self.patches, options or CaptureRequest(), gpus)
        recording = GpuEngine([stream], gpus=gpus)
        chunks, lost, is_over = [], 0, False
        environment = {**os.environ, **recording.environment()}
        pipe = subprocess.PIPE
        with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
            while not is_over:
                is_over = process.poll() is not None
                chunks.append(recording.collect(is_final=is_over))
                lost += sum(loss.count for loss in recording.lost())
            printed, errors = process.communicate()
        renderer = recording.renderer()
        rendered = [renderer.render(chunk) for chunk in chunks]
        records = [json.loads(line) for lines in rendered for line in lines.texts]
        counts: Counter[str] = Counter()
        for lines in rendered:
            counts.update(lines.counts())
        recording.close()
        return Run(printed, _launched(errors), process.returncode, records, counts, renderer, lost, errors)

    def case(self, name: str, options: CaptureRequest | None = None) -> tuple[Run, Run]:
        return self.native(str(self.program), name), self.record(str(self.program), name, options=options)


def _launched(errors: str) -> int:
    words = errors.split()
    return int(words[words.index("warps") + 1]) if "warps" in words else -1


def _expected(kernel: dict[str, Any]) -> int:
    (x, y, z), (a, b, c) = kernel["grid"], kernel["block"]
    return int(x * y * z * ((a * b * c + 31) // 32))


def assert_complete(run: Run) -> None:
    """Each launch has every warp of its grid once, each lane of a warp left once."""
    seen: dict[int, Counter[int]] = {}
    for batch in run.of("gpu_warp"):
        seen.setdefault(batch["launch"], Counter()).update(batch["warp"])
        count = len(batch["warp"])
        entries = batch.get("entry_mask", [0xFFFFFFFF] * count)
        exits = iter(batch.get("exit_mask", [0xFFFFFFFF] * len(batch["exit_ns"])))
        for entry, exit_count in zip(entries, batch.get("exit_count", [1] * count), strict=True):
            assert sum(next(exits) for _ in range(exit_count)) == entry
    expected: dict[int, Counter[int]] = {}
    for kernel in run.of("gpu_kernel"):
        expected.setdefault(kernel["launch"], Counter()).update(range(_expected(kernel)))
    assert seen == expected
