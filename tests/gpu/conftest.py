"""The programs to be recorded, built once for all tests on a real GPU."""

from __future__ import annotations

import pytest

from tests.gpu.bench import Bench


@pytest.fixture(scope="session")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("gpu"))
