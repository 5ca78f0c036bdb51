"""The stand-ins for CUDA's libraries and programs, built; and why an engine cannot capture them here."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tracepipe.errors import CaptureUnavailable
from tracepipe.tracer import ENGINES

_ROOT = Path(__file__).parents[2]
_SOURCES, _MADE = _ROOT / "fixtures/standin", _ROOT / "build/standin"


def build_standin(folder: Path) -> Path:
    """The folder, with vec_add, its kin and their libraries in it: made anew where a source changed.

    Skips where they cannot be compiled.
    """
    if not (shutil.which("gcc") and shutil.which("make")):
        pytest.skip("there is no gcc or no make (apt install gcc libc6-dev make)")
    _MADE.mkdir(parents=True, exist_ok=True)
    with _MADE.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process of the same run may be making them
        make = ["make", "-s", "-C", str(_SOURCES), f"BUILD={_MADE}"]
        subprocess.run(make, check=True, capture_output=True, text=True)
        return shutil.copytree(_MADE, folder, symlinks=True, dirs_exist_ok=True)


@cache
def why_not(engine: str) -> str:
    """What keeps the engine from capturing on this machine; "" if nothing does."""
    try:
        ENGINES[engine]().check()
    except CaptureUnavailable as unavailable:
        return unavailable.message
    return ""


def needs(engine: str) -> pytest.MarkDecorator:
    """The mark of a test that is skipped where the engine cannot capture."""
    reason = why_not(engine)
    return pytest.mark.skipif(bool(reason), reason=reason)
