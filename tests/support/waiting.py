"""Waits for what another process or thread does, where there is no event for it."""

from __future__ import annotations

import time
from collections.abc import Callable

_PATIENCE_S = 60.0


def wait_until(is_so: Callable[[], bool]) -> None:
    """Look again and again. A condition that does not come ends the test."""
    give_up_s = time.monotonic() + _PATIENCE_S
    while not is_so():
        assert time.monotonic() < give_up_s
        time.sleep(0.01)
