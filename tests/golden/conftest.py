"""Whole files are converted with the native core; in Python too where slow tests run.

That both cores give the same is tried on every file in `test_identical.py`, and rule by rule in `tests/unit`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cores import cores_here, running

*SLOW, QUICK = cores_here()


@pytest.fixture(params=[QUICK, *(pytest.param(core, marks=pytest.mark.slow) for core in SLOW)])
def core(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test with the native core, and as a slow one with the inner loops in Python."""
    with running(request.param):
        yield request.param
