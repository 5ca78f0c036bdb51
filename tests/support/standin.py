"""The stand-ins for CUDA's libraries and programs, built; and why an engine cannot capture them here."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tracepipe.capture import ENGINES
from tracepipe.errors import CaptureUnavailable

_SOURCES = Path(__file__).parents[2] / "fixtures/standin"


def build_standin(folder: Path) -> Path:
    """The folder, with vec_add, its kin and their libraries in it. Skips where they cannot be compiled."""
    if not (shutil.which("gcc") and shutil.which("make")):
        pytest.skip("there is no gcc or no make (apt install gcc libc6-dev make)")
    make = ["make", "-s", "-C", str(_SOURCES), f"BUILD={folder}"]
    subprocess.run(make, check=True, capture_output=True, text=True)
    return folder


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
