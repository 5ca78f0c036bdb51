"""The two implementations of the inner loops: the reference in Python, and the native core."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tracepipe.event.tables import NativeTables, Tables
from tracepipe.native import PURE, library

CORES = ("pure", "native")


@contextmanager
def running(core: str) -> Iterator[None]:
    """Run with one of `CORES`; skips the test where there is no native core."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(PURE, "1" if core == "pure" else "0")
        if core == "native" and library() is None:
            pytest.skip("the native core is not compiled here")
        yield


def cores_here() -> tuple[str, ...]:
    """Those of `CORES` that this machine has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(PURE, raising=False)
        return CORES if library() is not None else CORES[:1]


def new_tables() -> Tables:
    """The tables that a recording of tracepipe/1 has with the core that runs."""
    core = library()
    return Tables() if core is None else NativeTables(core)
