"""Writes the tables of one rank from its store: those that `export` has, its steps, the work of its GPUs, its
collectives, and what it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from tracepipe.analyses.gpu_work import (
    COPY,
    KERNEL,
    PURPOSES,
    WARPS,
    Work,
    gpu_times,
    gpu_work,
    kinds_of,
)
from tracepipe.analyses.program import WAIT, Program, program_of
from tracepipe.analyses.steps import loading_of, steps_of
from tracepipe.dataset import collectives
from tracepipe.dataset.identity import identity_of
from tracepipe.dataset.places import RANKS, Rank, Source
from tracepipe.errors import InputError
from tracepipe.event.columns import NONE, Int64s, Ints
from tracepipe.event.counters import SM_CLOCK
from tracepipe.event.intervals import Stretches
from tracepipe.event.origins import IDS_PER_HOST, PIDS_MAX
from tracepipe.present.writing.table_formats import write_question
from tracepipe.printable import is_unicode, json_text
from tracepipe.recording.files import unpacked
from tracepipe.recording.outputs import writing
from tracepipe.store import views
from tracepipe.store.run import Run, load_run
from tracepipe.store.samples import SERIES
from tracepipe.store.tables import object_column
from tracepipe.units import MADE_UP

STEPS: Final = {
    "step": "bigint", "name": "string", "start_ns": "bigint", "end_ns": "bigint", "gpu": "bigint",
    "busy_ns": "bigint", "compute_ns": "bigint", "communication_ns": "bigint", "exposed_ns": "bigint",
    "copies_ns": "bigint", "idle_ns": "bigint", "data_loading_ns": "bigint", "idle_loading_ns": "bigint",
}  # fmt: skip
PROGRAM: Final = (
    "what",
    "step",
    "from_ns",
    "call_ns",
    "called_ns",
    "start_ns",
    "end_ns",
    "stream",
    "key",
    "nth",
)
"""The columns of `analyses.program.Program` that the layer `program` has too."""
_TEXTS: Final = dict.fromkeys(("clock", "source", "source_format", "source_version", "unknown"), "string")
_FLAGS: Final = dict.fromkeys(("has_calls", "far_ahead"), "boolean")
_KINDS: Final = {**_TEXTS, **_FLAGS, "notes": "string[]", "sm_clock_mhz": "double"}
RANK: Final = {name: _KINDS.get(name, "bigint") for name in Rank._fields[2:]}
_PROGRAM: Final = """
select p.* exclude (shape, kernel, after, after_lag_ns), after::bigint[] as after,
    after_lag_ns::bigint[] as after_lag_ns, coalesce(s.name, k.name) as name
from program p left join tracepipe.shape_values s using (shape)
left join tracepipe.warp_kernel_values k on p.kernel = k.number order by p.place
"""
_OWN: Final = {"steps": STEPS, "collectives": collectives.SCHEMA, RANKS: RANK}
_WORK: Final = f"""
select w.start_ns, w.end_ns, w.gpu, {list(PURPOSES)}[w.purpose + 1] as purpose,
    coalesce(s.name, k.name) as name
from work w left join tracepipe.shape_values s using (shape)
left join tracepipe.warp_kernel_values k on w.kernel = k.number
order by w.gpu, w.start_ns, w.end_ns, purpose, name
"""
_HOSTS: Final = f"""
select count(distinct pid // {IDS_PER_HOST}) from tracepipe.shape_values
where pid between 0 and {MADE_UP} and pid % {IDS_PER_HOST} <= {PIDS_MAX}
"""


class Written(NamedTuple):
    """A rank whose tables are written. `remarks` are lines about what is not as it should be."""

    rank: Rank
    remarks: list[str]


def write_rank(source: Source, root: str, folder: Path, options: dict[str, Any] | None = None) -> Written:
    """Read a recording, or find its tables in the cache, and write those of the rank into a folder.

    `options` are those of `load_run`. Raises InputError, FormatError, ClockError, OutputError.
    """
    if not is_unicode(source.path):
        raise InputError(
            "has a path that is not UTF-8, as the texts of a dataset are", "Rename it.", path=source.path
        )

    def write(question: str, layer: str) -> None:
        path = folder / f"{layer}.parquet"
        with writing(str(path)), path.open("wb") as out:
            write_question(run, question, out, "parquet")

    run = load_run(source.path, **(options or {}))
    facts, con = run.facts, run.connection
    identity = identity_of(facts.header, facts.trace_clock, unpacked(source.path), root)
    # As many processes as processors are at work.
    con.execute("set threads = 1; create schema dataset")
    for layer, schema in _OWN.items():
        typed = ", ".join(f"{name} {kind}" for name, kind in schema.items())
        con.execute(f"create table dataset.{layer} ({typed})")
    work = gpu_work(run)
    kinds = kinds_of(run, work)
    times, steps = list(gpu_times(work, kinds)), steps_of(run)
    # A row for each step and GPU.
    spans, loading = (steps.start_ns, steps.end_ns), loading_of(run)
    for time in times:
        columns = (
            steps.number, object_column(steps.names), *spans, np.full(len(steps.number), time.gpu),
            *time.spent(*spans), loading.covered_ns(*spans), time.idle_inside_ns(loading, *spans),
        )  # fmt: skip
        con.register("given", dict(zip(STEPS, columns, strict=True)))
        con.execute("insert into dataset.steps select * from given")
    (hosts,) = con.execute(_HOSTS).fetchone()
    apart = (
        f"has events of {hosts} machines, which a dataset keeps under one host, as it has a host for a rank"
    )
    remarks = [*facts.remarks({}), *[apart][: hosts > 1], *collectives.put_collectives(run, times, steps)]
    named = _work_columns(run, work, kinds)
    if len(work):
        con.register("work", named)
        write(_WORK, "work")
        con.unregister("work")
    program = program_of(run)
    if len(program):
        # DuckDB learns the type of a column of lists from a sample of its rows, which may all be empty.
        con.execute(f"set pandas_analyze_sample = {len(program)}")
        con.register("program", _program_columns(run, work, named, program, loading))
        write(_PROGRAM, "program")
        con.unregister("program")
    (count,) = con.execute("select count(*) from dataset.collectives").fetchone()
    _, ahead_ns = _realtime(facts.header.start, facts.trace_clock)
    row = Rank(
        identity.host, identity.rank, identity.world_size, identity.clock, source.path, facts.source,
        source.size_bytes, source.mtime_ns, source.version, facts.start_ns, facts.end_ns,
        0 if facts.trace_clock == "realtime" else ahead_ns, *_realtime(facts.footer.end, facts.trace_clock),
        len(times), len(run.layer("gpu_kernel")), count, sum(facts.losses.values()), facts.skipped,
        list(facts.notes), program.has_calls, program.begins_ns is None, json_text(program.unknown),
        _clock_mhz(run, *spans),
    )  # fmt: skip
    con.execute(f"insert into dataset.{RANKS} values ({', '.join('?' * len(RANK))})", row[2:])
    del work, kinds, times, named, program
    run.forget_columns()
    questions = {view: views.question(view) for view in views.VIEWS if views.count(run, view)}
    for layer in _OWN:
        if con.execute(f"from dataset.{layer} limit 1").fetchone():
            questions[layer] = f"from dataset.{layer}"
    for layer, question in questions.items():
        write(question, layer)
    return Written(row, remarks)


def _clock_mhz(run: Run, start_ns: Int64s, end_ns: Int64s) -> float | None:
    """The mean clock of the SMs of its GPUs in the steps, None without samples of that."""
    at, total, count = SERIES.index(SM_CLOCK), 0.0, 0.0
    for samples in run.gpu_samples.values():
        _, sums, known = samples.inside(start_ns, end_ns)
        total, count = total + float(sums[:, at].sum()), count + float(known[:, at].sum())
    return total / count if count else None


def _work_columns(run: Run, work: Work, kinds: Ints) -> dict[str, Any]:
    """The work of all GPUs. Its names are those of a shape or of a kernel of warps, NONE for the other."""
    shape, kernel = (np.full(len(work), NONE, np.int32) for _ in range(2))
    for what, layer in ((KERNEL, "gpu_kernel"), (COPY, "transfer")):
        own = np.flatnonzero(work.what == what)
        shape[own] = run.layer(layer).shape[work.row[own]]
    own, table = np.flatnonzero(work.what == WARPS), run.warp_table
    if len(own):
        kernel[own] = table.launches.kernel_of[table.launch_of(work.row[own])]
    return {
        "start_ns": work.start_ns, "end_ns": work.end_ns,
        "gpu": np.repeat(work.gpus, np.diff(work.bounds)), "purpose": kinds, "shape": shape, "kernel": kernel,
    }  # fmt: skip


def _program_columns(
    run: Run, work: Work, named: dict[str, Any], program: Program, loading: Stretches
) -> dict[str, Any]:
    """The rows of a program, as `ranks.programs` reads them. `named` are those of `_work_columns`."""
    is_work = program.what != WAIT
    at = np.where(is_work, program.work, 0)
    row = np.where(is_work & (work.what[at] == KERNEL), work.row[at], NONE)
    order = np.argsort(program.after[:, 0], kind="stable")
    first = np.searchsorted(program.after[order, 0], np.arange(len(program) + 1))
    after, lags = (
        object_column([column[a:b].tolist() for a, b in pairwise(first.tolist())])
        for column in (program.after[order, 1], program.lag_ns[order])
    )
    called = np.full(len(program), NONE, np.int32)
    if program.has_calls:
        called[~is_work] = run.layer("userspace").shape[program.work[~is_work]]
    return {
        "place": np.arange(len(program)),
        **{name: getattr(program, name) for name in PROGRAM},
        "loading_ns": loading.covered_ns(program.from_ns, program.call_ns),
        "kernel_row": row,
        "after": after,
        "after_lag_ns": lags,
        "shape": np.where(is_work, named["shape"][at], called),
        "kernel": np.where(is_work, named["kernel"][at], NONE),
    }


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
