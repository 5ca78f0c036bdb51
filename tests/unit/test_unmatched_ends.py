"""Ends that fit no open begin take no longer where many begins are open."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.support.cores import running
from tests.support.recordings import HEADER, event
from tracepipe.converters import CONVERTERS
from tracepipe.recording.convert import Conversion, ConversionOptions


def jsonl(path: Path, begins: int) -> Path:
    rows = [event("B", at, f"begin {at}") for at in range(begins)]
    rows += [event("E", begins + at, f"end {at}") for at in range(begins)]
    path.write_text("".join(json.dumps(row) + "\n" for row in (HEADER, *rows)))
    return path


def chrome(path: Path, begins: int) -> Path:
    place = {"pid": 1, "tid": 1}
    rows = [{"ph": "B", "ts": at, "name": f"begin {at}", **place} for at in range(begins)]
    rows += [{"ph": "E", "ts": begins + at, "name": f"end {at}", **place} for at in range(begins)]
    path.write_text(json.dumps({"traceEvents": rows}))
    return path


def steps(path: Path, out: Path) -> int:
    """How many calls of Python, and steps of generators, a conversion takes."""
    count = 0

    def counted(_frame: FrameType, what: str, _of: Any) -> None:
        nonlocal count
        count += what in ("call", "c_call")

    with out.open("wb") as file:
        conversion = Conversion(str(path), CONVERTERS["text"], ConversionOptions())
        sys.setprofile(counted)
        try:
            conversion.run(file)
        finally:
            sys.setprofile(None)
    return count


@pytest.mark.parametrize("write", [jsonl, chrome])
def test_an_end_that_fits_none_is_one_step(tmp_path: Path, write: Any) -> None:
    with running("pure"):
        few, many = (steps(write(tmp_path / f"{n}.json", n), tmp_path / "out") for n in (1_000, 2_000))
    assert many < 2.5 * few
