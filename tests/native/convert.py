"""Whole conversions of damaged recordings: the core and Python alone write the same bytes."""

from __future__ import annotations

import ctypes
import io
import os
import tempfile
from contextlib import redirect_stderr
from functools import cache
from pathlib import Path
from random import Random

from tests.native import inputs, layered
from tracepipe import cli, native
from tracepipe.errors import TracepipeError

_FORMATS = ("perfetto", "chrome", "text", "threads")
_LARGE_BYTES = 64 << 10


@cache
def _recordings() -> list[list[bytes]]:
    paths = sorted(inputs.FIXTURES.glob("*/input.jsonl"))
    return [path.read_bytes().splitlines() for path in paths if path.stat().st_size < _LARGE_BYTES]


def convert(core: ctypes.CDLL, rng: Random) -> None:
    """`tracepipe convert` of one file, twice."""
    lines = rng.choice(_recordings())[: rng.choice((10, 50, 1000))]
    if rng.random() < 0.25:
        lines = layered.text(rng).split(b"\n")
    for _ in range(rng.randrange(6)):
        at = rng.randrange(len(lines))
        lines[at] = inputs.mutated(rng, lines[at])
    for _ in range(rng.randrange(3)):
        lines.insert(rng.randrange(1, len(lines) + 1), inputs.any_line(rng))
    form = rng.choice(_FORMATS)
    native.CORE = Path(core._name)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "run.jsonl").write_bytes(b"\n".join(lines))
        assert _converted(folder, form, "0") == _converted(folder, form, "1")


def _converted(folder: str, form: str, pure: str) -> tuple[bytes, str]:
    """What was written, and the messages."""
    os.environ[native.PURE] = pure
    assert (native.library() is None) == (pure == "1")
    out, errors = Path(folder) / "out", io.StringIO()
    out.unlink(missing_ok=True)
    argv = ["convert", str(Path(folder) / "run.jsonl"), "--format", form, "-o", str(out)]
    with redirect_stderr(errors):
        try:
            cli.app(argv, standalone_mode=False)
        except TracepipeError as e:
            errors.write(f"{e}")
    return out.read_bytes() if out.exists() else b"", errors.getvalue()
