"""The end of a recording, whatever failed before: what was taken is written, and the rest is counted."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

from tracepipe.capture.engines.engine import Store
from tracepipe.capture.machine.refusals import shortage_of
from tracepipe.errors import OutputError, TracepipeError

_SPARE_BYTES: Final = 16 << 20  # as limits count it: no page of it is ever touched
_Given = TypeVar("_Given")


class LastSteps:
    """Takes steps that may fail, and has memory for those that follow: a recording that cannot go on for want
    of it is ended all the same. What failed first is the error of the store, which only counts from then on.
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
        """What a step gives; None where it fails."""
        try:
            return step()
        except Exception as error:
            self.__exit__()
            self._store.error = self._store.error or error
            return None


def why(error: Exception) -> str:
    """What went wrong with a recording, in some words."""
    if isinstance(error, MemoryError):
        return "no memory"
    behind = (error.__cause__ if isinstance(error, TracepipeError) else None) or error
    if isinstance(behind, OSError):
        return str(behind.strerror)
    return behind.message if isinstance(behind, TracepipeError) else "a bug"


def said_of(error: Exception | None) -> tuple[str, str]:
    """What a user is shown of what ended a recording, and the hint. Raises what the capture itself raises: a
    bug, and what the kernel refused.
    """
    if error is None:
        return "", ""
    said = error if isinstance(error, OutputError) else shortage_of(error)
    if said is None:
        raise error
    return said.message, said.hint
