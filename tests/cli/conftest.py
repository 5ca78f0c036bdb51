"""What the tests of the command line share: one examination of the machine for all of a process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from tracepipe import doctor
from tracepipe.doctor.diagnosis import Diagnosis


@pytest.fixture(scope="session")
def found_here() -> Callable[..., list[Diagnosis]]:
    """What `tracepipe doctor` finds, which tries out captures, and takes seconds: it is looked for once."""
    examined = cache(doctor.examine)

    def examine(notify: Any = None) -> list[Diagnosis]:
        return examined()

    return examine


@pytest.fixture
def quick_doctor(found_here: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Has `tracepipe doctor`, in this process, state what it found before."""
    monkeypatch.setattr(doctor, "examine", found_here)
