"""The last steps of a recording, which run whatever failed before: they write what was collected and count
the rest.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

from tracepipe.errors import OutputError, TracepipeError
from tracepipe.tracer.engines.engine import Store
from tracepipe.tracer.machine.refusals import shortage_of

_SPARE_BYTES: Final = 16 << 20  # counted by limits of address space; no page of it is ever used
_Given = TypeVar("_Given")


class LastSteps:
    """Runs steps that may fail, and keeps spare memory for the steps after a failure, so that a recording
    that ran out of memory is still ended properly. The first failure becomes the error of the store, which
    from then on only counts.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._spare: mmap.mmap | None = None

    def __enter__(self) -> LastSteps:
        with suppress(OSError):
            self._spare = mmap.mmap(-1, _SPARE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return self

    def __exit__(self, *_: object) -> None:
        if self._spare is not None:
            self._spare.close()
            self._spare = None

    def attempt(self, step: Callable[[], _Given]) -> _Given | None:
        """The result of a step; None if it fails."""
        try:
            return step()
        except Exception as error:
            self.__exit__()
            self._store.error = self._store.error or error
            return None


def why(error: Exception) -> str:
    """The failure of a recording in a few words."""
    if isinstance(error, MemoryError):
        return "no memory"
    behind = (error.__cause__ if isinstance(error, TracepipeError) else None) or error
    if isinstance(behind, OSError):
        return str(behind.strerror)
    return behind.message if isinstance(behind, TracepipeError) else "a bug"


def message_of(error: Exception | None) -> tuple[str, str]:
    """The message and the hint for the error that ended a recording. Raises any other error: a bug, or what
    the kernel refused.
    """
    if error is None:
        return "", ""
    stated = error if isinstance(error, OutputError) else shortage_of(error)
    if stated is None:
        raise error
    return stated.message, stated.hint
