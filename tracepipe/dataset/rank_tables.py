"""Writes all tables of one rank: those that `export` has, its collectives and steps, and what it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from tracepipe.dataset import collectives, steps
from tracepipe.dataset.identity import Identity, identity_of
from tracepipe.dataset.places import RANKS
from tracepipe.present.writing.table_formats import write_columns, write_view
from tracepipe.recording import remote
from tracepipe.recording.outputs import writing
from tracepipe.store import views
from tracepipe.store.run import load_run

RANK: Final = {
    "world_size": "Int64", "clock": "String", "source": "String", "source_format": "String",
    "source_bytes": "Int64", "source_mtime_ns": "Int64", "source_version": "String",
    "start_ns": "Int64", "end_ns": "Int64",
    "realtime_offset_ns": "Int64", "last_at_ns": "Int64", "last_realtime_offset_ns": "Int64",
    "gpus": "Int64", "kernels": "Int64", "collectives": "Int64",
    "lost": "Int64", "skipped_lines": "Int64", "notes": "varchar[]",
}  # fmt: skip


class Source(NamedTuple):
    """A recording at a path or URL: when it has other values, it was recorded again. A file has the time of
    its last change, and an object its version, "" where its store gives it none.
    """

    path: str
    size_bytes: int
    mtime_ns: int | None
    version: str | None = None

    @classmethod
    def of(cls, path: str) -> Source:
        """The recording at a path or URL. Raises OSError, TracepipeError."""
        if remote.is_url(path):
            return cls.of_object(remote.found(path))
        found = Path(path).stat()
        return cls(path, found.st_size, found.st_mtime_ns)

    @classmethod
    def of_object(cls, found: remote.Found) -> Source:
        """The recording that is an object."""
        return cls(found.url, found.size_bytes, None, found.version)


@dataclass(frozen=True, slots=True)
class Written:
    """The tables of one rank. `remarks` are lines about what is not as it should be in its recording."""

    identity: Identity
    kernels: int
    collectives: int
    lost: int
    remarks: tuple[str, ...]


def write_rank(source: Source, root: str, made: Path, options: dict[str, Any] | None = None) -> Written:
    """Read a recording and write its tables into a folder.

    `options` are those of `load_run`. Raises InputError, FormatError, ClockError, OutputError.
    """
    run = load_run(source.path, **(options or {}))
    identity = identity_of(run.facts.header, run.facts.trace_clock, source.path, root)
    # As many processes as processors are at work.
    run.store.connection.execute("set threads = 1")
    times = steps.gpu_times(run)
    of_steps = steps.steps_of(run, times)
    found = collectives.collectives_of(run, {gpu: time.compute for gpu, time in times.items()}, of_steps)
    for name in views.VIEWS:
        if views.count(run, name):
            path = made / f"{name}.parquet"
            with writing(str(path)), path.open("wb") as out:
                write_view(run, name, out, "parquet")
    for name, columns, schema in (
        ("collectives", found.columns, collectives.SCHEMA),
        ("steps", of_steps, steps.SCHEMA),
    ):
        if len(columns["start_ns"]):
            _write(made / f"{name}.parquet", columns, schema)
    facts, lost = run.facts, sum(run.facts.losses.values())
    count, kernels = len(found.columns["start_ns"]), len(run.layer("gpu_kernel"))
    _, ahead_ns = _realtime(facts.header.start, facts.trace_clock)
    last_at_ns, last_ahead_ns = _realtime(facts.footer.end, facts.trace_clock)
    row = {
        "world_size": identity.world_size, "clock": identity.clock, "source": source.path,
        "source_format": facts.source, "source_bytes": source.size_bytes,
        "source_mtime_ns": source.mtime_ns, "source_version": source.version,
        "start_ns": facts.start_ns, "end_ns": facts.end_ns,
        "realtime_offset_ns": 0 if facts.trace_clock == "realtime" else ahead_ns,
        "last_at_ns": last_at_ns, "last_realtime_offset_ns": last_ahead_ns,
        "gpus": len(times), "kernels": kernels, "collectives": count,
        "lost": lost, "skipped_lines": facts.skipped, "notes": list(facts.notes),
    }  # fmt: skip
    _write(made / f"{RANKS}.parquet", {name: [value] for name, value in row.items()}, RANK)
    remarks = *facts.remarks({}), *found.remarks
    return Written(identity, kernels, count, lost, remarks)


def _write(path: Path, columns: Mapping[str, Sequence[Any]], types: Mapping[str, str]) -> None:
    with writing(str(path)):
        write_columns(columns, types, path)


def _realtime(instant: object, clock: str) -> tuple[int | None, int | None]:
    """A clock's time at the instant of a header or footer, and how far CLOCK_REALTIME was ahead of it; None
    where it does not say both.
    """
    if not isinstance(instant, Mapping):
        return None, None
    here, real = instant.get(f"{clock}_ns"), instant.get("realtime_ns")
    if not isinstance(here, int) or not isinstance(real, int):
        return None, None
    return here, real - here
