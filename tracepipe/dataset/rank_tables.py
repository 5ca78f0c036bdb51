"""Writes all tables of one rank: those that `export` has, its collectives and steps, and what it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from tracepipe.dataset.collectives import collectives_of
from tracepipe.dataset.identity import Identity, identity_of
from tracepipe.dataset.places import RANKS
from tracepipe.dataset.steps import gpu_times, steps_of
from tracepipe.present.writing.table_formats import ROWS_OF_PART, write_table
from tracepipe.recording import remote
from tracepipe.recording.outputs import writing
from tracepipe.reports.frames.layer_tables import TABLES
from tracepipe.reports.frames.libraries import pl
from tracepipe.store.run import Run, load_run

RANK: Final = {
    "world_size": "Int64", "clock": "String", "source": "String", "source_format": "String",
    "source_bytes": "Int64", "source_mtime_ns": "Int64", "source_version": "String",
    "start_ns": "Int64", "end_ns": "Int64",
    "realtime_offset_ns": "Int64", "last_at_ns": "Int64", "last_realtime_offset_ns": "Int64",
    "gpus": "Int64", "kernels": "Int64", "collectives": "Int64",
    "lost": "Int64", "skipped_lines": "Int64", "notes": "List",
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
    times = gpu_times(run)
    steps = steps_of(run, times)
    found = collectives_of(run, {gpu: time.compute for gpu, time in times.items()}, steps)
    collectives = found.frame
    for name, table in TABLES.items():
        if table.count(run):
            schema = table.part(run, slice(0, 0)).schema
            rows = table.rows_at_once(run)
            _write(made / f"{name}.parquet", schema, partial(table.frames, run, rows), rows)
    for name, frame in (("collectives", collectives), ("steps", steps)):
        if len(frame):
            _write(made / f"{name}.parquet", frame.schema, partial(frame.iter_slices, ROWS_OF_PART))
    lost = sum(run.facts.losses.values())
    kernels = len(run.layer("gpu_kernel"))
    row = _row(
        run, identity, source, {"gpus": len(times), "kernels": kernels, "collectives": len(collectives)}
    )
    _write(made / f"{RANKS}.parquet", row.schema, lambda: iter([row]))
    return Written(identity, kernels, len(collectives), lost, (*run.facts.remarks({}), *found.remarks))


def _row(run: Run, identity: Identity, source: Source, counts: dict[str, int]) -> pl.DataFrame:
    facts = run.facts
    start = facts.header.get("start")
    _, ahead_ns = _realtime(start, facts.trace_clock)
    last_at_ns, last_ahead_ns = _realtime((facts.footer or {}).get("end"), facts.trace_clock)
    values = {
        "world_size": identity.world_size, "clock": identity.clock, "source": source.path,
        "source_format": facts.source, "source_bytes": source.size_bytes,
        "source_mtime_ns": source.mtime_ns, "source_version": source.version,
        "start_ns": facts.start_ns, "end_ns": facts.end_ns,
        "realtime_offset_ns": 0 if facts.trace_clock == "realtime" else ahead_ns,
        "last_at_ns": last_at_ns, "last_realtime_offset_ns": last_ahead_ns, **counts,
        "lost": sum(facts.losses.values()), "skipped_lines": facts.skipped, "notes": list(facts.notes),
    }  # fmt: skip
    return pl.DataFrame({name: [values[name]] for name in RANK}, schema=rank_schema())


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


def rank_schema() -> dict[str, Any]:
    """The columns of `ranks`, but for `host` and `rank`, which stand in the names of folders."""
    return {name: pl.List(pl.String) if kind == "List" else getattr(pl, kind) for name, kind in RANK.items()}


def _write(
    path: Path, schema: pl.Schema, frames: Callable[[], Iterator[pl.DataFrame]], rows: int = ROWS_OF_PART
) -> None:
    with writing(str(path)), path.open("wb") as out:
        write_table(schema, frames(), out, "parquet", rows)
