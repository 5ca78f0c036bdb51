"""Packs Perfetto traces into a ZIP that Perfetto opens as one. Each recording has a separate trace in it.

    run.pftrace  torch.pftrace  perfetto_manifest.json

The times of all traces are on one clock when they are written, as trace processors before v58 ignore the
manifest, which has only fixed offsets. It states what the traces do not: whose clock that is, the machine of
each trace, and, in attributes that SQL can read, how each was placed in time.

Source: docs/reference/perfetto-manifest.md of Perfetto, version 1 of the format.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import IO, Any, BinaryIO, Final, cast
from zipfile import ZIP_DEFLATED, LargeZipFile, ZipFile, ZipInfo

from tracepipe.converters.writer import TraceInfo
from tracepipe.errors import OutputError
from tracepipe.event.model import MONOTONIC

_MANIFEST: Final = "perfetto_manifest.json"
# Perfetto does not read ZIP64. Without it, zipfile takes less than 2³¹ bytes.
SIZE_MAX_BYTES: Final = 2_000_000_000
_LEVEL: Final = 1


class ArchiveWriter(AbstractContextManager["ArchiveWriter"]):
    """Writes an archive to a stream. As a context manager, it completes it if nothing was raised."""

    def __init__(self, out: BinaryIO, info: TraceInfo) -> None:
        self._zip = ZipFile(out, "w", ZIP_DEFLATED, allowZip64=False, compresslevel=_LEVEL)
        self._clock = "MONOTONIC" if info.trace_clock == MONOTONIC else "BOOTTIME"
        self._files: list[dict[str, Any]] = []
        self._attributes: dict[str, str | int] = {"tracepipe.clock": info.trace_clock}

    @contextmanager
    def trace(self, name: str) -> Iterator[BinaryIO]:
        """A stream for the trace of that name. Raises OutputError where it becomes too large."""
        with _small_enough(), self._zip.open(_entry(name), "w") as stream:
            yield cast(BinaryIO, _Bounded(stream))

    def say(self, name: str, machine: str, placed: Mapping[str, Any] | None) -> None:
        """Note the machine of a trace, where there are several, and how it was placed, for the manifest."""
        file: dict[str, Any] = {"path": name}
        if machine:
            file["machine"] = {"name": machine}
        self._files.append(file)
        known = {key: value for key, value in (placed or {}).items() if key != "trace_clock"}
        # An attribute is text or an integer.
        self._attributes |= {
            f"tracepipe.{name}.{key}": value if isinstance(value, int) else str(value)
            for key, value in known.items()
        }

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._zip.fp = None  # else it would write the end of an archive when it is deleted
            return
        first = self._files[0]
        same = {
            "clock": self._clock,
            "sync_to": {"file": first["path"], "clock": self._clock},
            "offset_ns": 0,
        }
        # The clock of another machine is a different clock, until the manifest states that both are the same.
        files = [
            file if file.get("machine") == first.get("machine") else file | {"clocks": same}
            for file in self._files
        ]
        manifest = {
            "version": 1,
            "trace_time": {"clock": self._clock, "file": first["path"]},
            "files": files,
            "attributes": self._attributes,
        }
        with _small_enough():
            # Readers recognize the manifest by its first characters.
            self._zip.writestr(_entry(_MANIFEST), json.dumps({"perfetto_manifest": manifest}, indent=1))
            self._zip.close()


class _Bounded:
    """The stream of one file in an archive, of limited size."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._size_bytes = stream, 0

    def write(self, data: bytes) -> int:
        """Write to the archive. Raises LargeZipFile where it would become too large."""
        self._size_bytes += len(data)
        if self._size_bytes > SIZE_MAX_BYTES:
            raise LargeZipFile
        return self._stream.write(data)


@contextmanager
def _small_enough() -> Iterator[None]:
    try:
        yield
    except LargeZipFile:
        raise OutputError(
            "The archive or a trace in it would be larger than 2 GB, which Perfetto does not read",
            "Make the recordings smaller with tracepipe cut, or give -o a name that ends with .pftrace.",
        ) from None


def _entry(name: str) -> ZipInfo:
    """The header of a file in the archive. It does not depend on when or where it is written."""
    entry = ZipInfo(name)
    entry.compress_type, entry.external_attr = ZIP_DEFLATED, 0o644 << 16
    return entry
