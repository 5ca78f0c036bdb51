"""The cases: `fixtures/<case>/` with `input.*`, an optional `options`, and what must come of them.

input.jsonl           what is converted
options               options of `tracepipe convert`, as on its command line
expected.txt          --format text
expected-report.txt   what the command says of it
"""

from __future__ import annotations

import argparse
import io
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from tests.golden.seen import Replay, ReplayFormat
from tracepipe.converters import CONVERTERS
from tracepipe.layout import LayoutOptions
from tracepipe.recording.account import account_lines
from tracepipe.recording.convert import Conversion, ConversionOptions

FIXTURES = Path(__file__).parents[2] / "fixtures"
# What quick tests take of all cases: one of each format and of each kind of record, and what is defective.
_SAMPLE = {
    "annotations", "bad-lines", "bpftime-warp-order", "bpftrace-text", "capture-standin", "chrome-forms",
    "clocks-drift", "counters-and-arrows", "cuda-table-threads", "cut-off", "device-memory", "flows",
    "gpu-counters", "gpu-stalls", "header-only", "host-nesting", "layered-undated", "losses", "nsys",
    "perfetto-flows", "proton-kernels", "python-stacks", "rocpd", "threads", "viztracer", "warps-and-threads",
    "warps-ranges", "wprof", "xplane-cpu",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One folder of fixtures."""

    folder: Path

    @property
    def name(self) -> str:
        """What the case is called."""
        return self.folder.name

    @property
    def input(self) -> Path:
        """The recording."""
        (found,) = self.folder.glob("input.*")
        return found

    def options(self, **more: Any) -> ConversionOptions:
        """The case's options."""
        parser = argparse.ArgumentParser()
        parser.add_argument("--warp-tracks", default="auto")
        parser.add_argument("--thread-exits", action="store_true")
        parser.add_argument("--assume-offset", action="append", default=[])
        parser.add_argument("--undated", default="skip")
        file = self.folder / "options"
        given = parser.parse_args(shlex.split(file.read_text()) if file.exists() else [])
        pairs = (text.partition("=") for text in given.assume_offset)
        assumed = {clock: int(ns) if ns.lstrip("-").isdigit() else ns for clock, _, ns in pairs}
        return ConversionOptions(
            assumed=cast("dict[str, int | str]", assumed),
            layout=LayoutOptions(given.warp_tracks, given.thread_exits),
            undated=given.undated,
            **more,
        )

    def convert(self, to: str, **more: Any) -> tuple[bytes, str]:
        """The output in that format, and the report."""
        out = io.BytesIO()
        report = Conversion(str(self.input), CONVERTERS[to], self.options(**more)).run(out)
        lines = "".join(f"{line}\n" for line in account_lines(report))
        return out.getvalue(), lines.replace(str(self.input), self.input.name)

    def replay(self, to: str = "text") -> Replay:
        """The operations that the layout makes of it for a format."""
        kept = ReplayFormat(to)
        Conversion(str(self.input), cast(Any, kept), self.options()).run(io.BytesIO())
        return kept.writer


def cases() -> list[Case]:
    """Every folder of fixtures that has an input."""
    return [Case(folder) for folder in sorted(FIXTURES.iterdir()) if list(folder.glob("input.*"))]


def with_sample(some: Iterable[Case]) -> list[Any]:
    """The cases as parameters of a test that does much with each: all but a sample of them are slow."""
    return [one if one.name in _SAMPLE else pytest.param(one, marks=pytest.mark.slow) for one in some]
