"""The files whose functions are probed: a probe belongs to a file, not to its name."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tracepipe.hooks.hook import FilePlace, Probe


class ProbedFiles:
    """The files of some probes, and their state when the object was made."""

    def __init__(self, probes: Iterable[Probe]) -> None:
        paths = {probe.place.path for probe in probes if isinstance(probe.place, FilePlace)}
        self._states = {path: _state(path) for path in paths}

    def replaced(self) -> list[str]:
        """The paths that are now another file, or have changed contents; without those that no longer
        exist.
        """
        now = {path: _state(path) for path in self._states}
        return sorted(path for path, before in self._states.items() if now[path] not in (None, before))


def _state(path: str) -> tuple[int, int, int, int] | None:
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
