"""Memory that was allocated and what became of it: peaks, over time, by call, never freed, freed twice."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated, Any

from tracepipe.reports.analyses.allocations import (
    FREED,
    GIVEN_AGAIN,
    LIVE,
    Allocation,
    Allocations,
    Place,
    allocations,
    ends_of,
)
from tracepipe.reports.analyses.cuda_calls import calls_named
from tracepipe.reports.analyses.distribution import PERCENTS, of_values
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.run import Run
from tracepipe.reports.report import Column, Drawing, Option, Report, Result, Table
from tracepipe.reports.writing.drawing import ASCII, UNICODE, Window, axis, steps_chart
from tracepipe.units import duration_text, size_text

_CHART_ROWS = 4
_LABEL_COLUMNS = 10
_CELLS_MIN = 20
_CONTEXT_ENDS = re.compile(r"(cuCtxDestroy|cuDevicePrimaryCtxReset|cudaDeviceReset)(_v\d+)?")
_TOLD_BY = ("memory", "userspace", "unknown layer")


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `tracepipe memory`."""

    top: Annotated[int, Option("How many calls, allocations and faults at most; 0: all.", "N")] = 10


def run(run: Run, options: Options) -> Result:
    """The allocations of one recording."""
    found = allocations(run)
    result = Result("MEMORY")
    if not found.steps and not found.faults:
        result.notes.append("no allocation was recorded, neither as an event nor as a call")
        return result
    pids = {place[0] for place in found.steps} | {fault.pid for fault in found.faults}
    names = {pid: run.process_name(pid) + ("" if pid is None else f" {pid}") for pid in pids}
    until = {**dict.fromkeys(pids, _end_of_recording(run)), **ends_of(run)}
    if found.steps:
        result.parts += [_places(run, found, until, names), _over_time(run, found, names)]
    tables = (
        ("call sites", _sites(found)),
        ("allocations that were never freed", _never_freed(run, found, until)),
        ("faults", _faults(run, found, names)),
    )
    for what, table in tables:
        left_out = len(table.rows) - options.top if options.top > 0 else 0
        if left_out > 0:
            table.rows = table.rows[: options.top]
            result.notes.append(f"{left_out} more {what} are not listed: --top 0 lists all")
        if table.rows:
            result.parts.append(table)
    result.notes += _notes(run, found)
    return result


def _end_of_recording(run: Run) -> str:
    is_cut_off = run.facts.source == "tracepipe" and run.facts.footer is None
    return "cut off" if is_cut_off else "recording end"


def _known_sum(sizes: list[int | None]) -> int | None:
    """The sum of those that are known; None where some are, and not one is known."""
    known = [size for size in sizes if size is not None]
    return sum(known) if known or not sizes else None


def _places(
    run: Run, found: Allocations, until: dict[int | None, str], names: dict[int | None, str]
) -> Table:
    by_place: dict[Place, list[Allocation]] = defaultdict(list)
    for one in found.all:
        by_place[one.place].append(one)
    rows = []
    for place, steps in found.steps.items():
        own = by_place[place]
        peak_bytes, peak_ns = steps.peak()
        pid, gpu, kind = place
        rows.append(
            (
                names[pid],
                gpu,
                kind,
                len(own),
                _known_sum([one.size_bytes for one in own]),
                peak_bytes if steps.known else None,
                peak_ns - run.facts.start_ns if steps.known else None,
                steps.total_bytes[-1] if steps.known else None,
                *_leaks(own),
                until[pid],
                found.reused[place],
                found.unmatched[place],
                "bound" if _lost(run) else "exact",
            )
        )
    columns = (
        Column("process", "process"),
        Column("gpu", "GPU", "id"),
        Column("kind", "kind"),
        Column("count", "allocs", "count"),
        Column("total_bytes", "bytes", "bytes"),
        Column("peak_bytes", "peak", "bytes"),
        Column("peak_at_ns", "peak at", "at"),
        Column("last_bytes", "at the end", "bytes", spare=True),
        Column("never_freed", "never freed", "count"),
        Column("never_freed_bytes", "bytes", "bytes"),
        Column("until", "until"),
        Column("reused", "reused", "count", spare=True),
        Column("unmatched", "unmatched", "count", spare=True),
        Column("certainty", "figures", spare=True),
    )
    note = (
        "Peak: the most at one time, as far as the recording tells. Never freed: until the end of the "
        "process or of the recording, or where that was cut off. Host: pinned memory. In use: by "
        "whomever, as the driver says. Reused: allocations at an address that was freed before."
    )
    return Table("processes", "Memory of each process", columns, rows, note)


def _leaks(own: list[Allocation]) -> tuple[int | None, int | None]:
    """How many are never freed, and their bytes; not known where no address was recorded."""
    if own and all(one.address is None for one in own):
        return None, None
    live = [one for one in own if one.fate == LIVE and one.address is not None]
    return len(live), _known_sum([one.size_bytes for one in live])


def _over_time(run: Run, found: Allocations, names: dict[int | None, str]) -> Drawing:
    base_ns, end_ns = run.facts.start_ns, max(run.facts.end_ns, run.facts.start_ns + 1)
    titles = {place: _title(place, names) for place in found.steps}

    def draw(columns: int, ascii_only: bool) -> Iterator[str]:
        glyphs = ASCII if ascii_only else UNICODE
        window = Window(base_ns, end_ns, max(_CELLS_MIN, columns - _LABEL_COLUMNS))
        yield "Bytes over time"
        yield " " * _LABEL_COLUMNS + axis(window, base_ns)
        for place, steps in found.steps.items():
            most, _ = steps.peak()
            if not steps.known:
                yield f"{titles[place]}: sizes are not recorded"
                continue
            yield titles[place]
            times, sizes = np.array(steps.ts_ns, np.int64), np.array(steps.total_bytes, np.int64)
            lines = steps_chart(window, times, sizes, most, _CHART_ROWS, glyphs)
            labels = [size_text(most), *[""] * (_CHART_ROWS - 2), "0 B"]
            for label, line in zip(labels, lines, strict=True):
                yield f"{label:>{_LABEL_COLUMNS - 1}} {line}".rstrip()
        yield "A cell shows the most that was allocated in it."

    def data() -> list[dict[str, Any]]:
        return [
            {
                "process": names[pid],
                "pid": pid,
                "gpu": gpu,
                "kind": kind,
                "steps": [
                    {"at_ns": ts_ns - base_ns, "total_bytes": size}
                    for ts_ns, size in zip(steps.ts_ns, steps.total_bytes, strict=True)
                ],
            }
            for (pid, gpu, kind), steps in found.steps.items()
        ]

    return Drawing("over_time", draw, data)


def _title(place: Place, names: dict[int | None, str]) -> str:
    pid, gpu, kind = place
    return f"{names[pid]}, {kind}" + ("" if gpu is None else f" of GPU {gpu}")


def _percentiles(values: list[int]) -> tuple[int | None, ...]:
    """p50, p95 and p99."""
    return of_values(np.array(values, np.int64))[2 : 2 + len(PERCENTS)]


def _sites(found: Allocations) -> Table:
    """Allocations by the call that made them, on one thread."""
    by_site: dict[tuple[Any, ...], list[Allocation]] = defaultdict(list)
    for one in found.all:
        by_site[one.site, one.tid, one.place].append(one)
    rows = []
    for (site, tid, (_, gpu, kind)), own in by_site.items():
        lived = [one.end_ns - one.start_ns for one in own if one.fate == FREED and one.end_ns is not None]
        rows.append(
            (
                site,
                tid,
                gpu,
                kind,
                len(own),
                _known_sum([one.size_bytes for one in own]),
                *_percentiles([one.size_bytes for one in own if one.size_bytes is not None]),
                *_percentiles(lived),
                *_leaks(own),
            )
        )
    rows.sort(key=lambda row: (-(row[-1] or 0), -(row[5] or 0), row[0], row[1] or 0))
    columns = (
        Column("site", "allocated by"),
        Column("tid", "thread", "id"),
        Column("gpu", "GPU", "id", spare=True),
        Column("kind", "kind", spare=True),
        Column("count", "count", "count"),
        Column("total_bytes", "bytes", "bytes"),
        *(Column(f"p{p}_bytes", f"p{p}", "bytes", spare=p != 50) for p in PERCENTS),
        *(Column(f"p{p}_lived_ns", f"lived p{p}", "ns", spare=p == 95) for p in PERCENTS),
        Column("never_freed", "leaks", "count"),
        Column("never_freed_bytes", "bytes", "bytes"),
    )
    note = (
        "The outermost call on the thread > the call inside it that allocated. Lived: from the allocation to "
        "its free, of those that were freed. Leaks: never freed."
    )
    return Table("sites", "By call", columns, rows, note)


def _never_freed(run: Run, found: Allocations, until: dict[int | None, str]) -> Table:
    live = [one for one in found.all if one.fate == LIVE and one.address is not None]
    live.sort(key=lambda one: (-(one.size_bytes or 0), one.start_ns))
    rows = [
        (
            one.address,
            one.size_bytes,
            one.start_ns - run.facts.start_ns,
            run.facts.end_ns - one.start_ns,
            one.place[1],
            one.place[2],
            one.tid,
            one.site,
            until[one.place[0]],
        )
        for one in live
    ]
    columns = (
        Column("address", "address"),
        Column("size_bytes", "size", "bytes"),
        Column("at_ns", "at", "at"),
        Column("age_ns", "age", "ns"),
        Column("gpu", "GPU", "id"),
        Column("kind", "kind"),
        Column("tid", "thread", "id"),
        Column("site", "allocated by"),
        Column("until", "until", spare=True),
    )
    return Table("never_freed", "Never freed, the largest", columns, rows)


def _faults(run: Run, found: Allocations, names: dict[int | None, str]) -> Table:
    rows = []
    for fault in sorted(found.faults, key=lambda one: (one.what, one.at_ns)):
        before_ns = None if fault.before_ns is None else fault.before_ns - run.facts.start_ns
        at_ns = fault.at_ns - run.facts.start_ns
        rows.append(
            (
                fault.what,
                fault.site,
                fault.address,
                at_ns,
                before_ns,
                fault.size_bytes,
                fault.tid,
                names[fault.pid],
            )
        )
    columns = (
        Column("what", "fault"),
        Column("site", "call"),
        Column("address", "address"),
        Column("at_ns", "at", "at"),
        Column("before_ns", "before", "at"),
        Column("size_bytes", "size", "bytes"),
        Column("tid", "thread", "id"),
        Column("process", "process", spare=True),
    )
    note = "Before: when a double free was freed first, and when an address in use was given out first."
    return Table("faults", "Faults", columns, rows, note, grouped=True)


def _lost(run: Run) -> dict[str, int]:
    """Events that were not recorded and may have been allocations, by layer."""
    filtered = (run.facts.footer or {}).get("filtered", {})
    lost = {layer: run.facts.losses[layer] for layer in _TOLD_BY if run.facts.losses[layer]}
    for layer in _TOLD_BY:
        if isinstance(count := filtered.get(layer), int) and count:
            lost[layer] = lost.get(layer, 0) + count
    return lost


def _notes(run: Run, found: Allocations) -> Iterator[str]:
    if found.from_calls and (found.all or found.faults):
        yield "the recording has no events of memory: told by the calls that succeeded"
    for what, count in Counter(fault.what for fault in found.faults).items():
        yield f"{what}: {count}"
    again = [one for one in found.all if one.fate == GIVEN_AGAIN]
    if again:
        yield (
            f"{len(again)} allocations end where their address was given out again: their frees were not "
            "recorded"
        )
    if unmatched := sum(found.unmatched.values()):
        yield (
            f"{unmatched} allocations and frees have no address: which free is whose is not known, and they "
            "are not among the never freed; a free without address and size takes nothing off the bytes"
        )
    unsized = sum(one.size_bytes is None for one in found.all)
    if unsized:
        yield f"{unsized} allocations have no size: they are counted, and 0 in all bytes"
    yield from _ended_contexts(run, found)
    for layer, count in _lost(run).items():
        yield (
            f"{count} {layer} events were lost or filtered, and allocations and frees may be among them, so "
            "that the figures are bounds: allocations and their bytes are at least so many; a lost free is "
            "one of the never freed and a higher peak, a lost allocation a lower peak and a fault"
        )


def _ended_contexts(run: Run, found: Allocations) -> Iterator[str]:
    """What was live where a process ended a context: the driver frees what belongs to it."""
    calls = run.rows("userspace", calls_named(run, _CONTEXT_ENDS), "name", "pid", "end_ns")
    by_process: dict[int | None, list[Allocation]] = defaultdict(list)
    for one in found.all if len(calls) else ():
        if one.address is not None:
            by_process[one.place[0]].append(one)
    live = {pid: _Live(own) for pid, own in by_process.items()}
    for name, pid, at_ns in calls.iter_rows():
        count, size_bytes = live[pid].at(at_ns) if pid in live else (0, 0)
        if count:
            at = duration_text(at_ns - run.facts.start_ns)
            yield (
                f"{name} at {at} ended a context while {count} allocations ({size_text(size_bytes)}) were "
                "live: those of that context went with it"
            )


class _Live:
    """How many allocations were live at a time, and their bytes."""

    def __init__(self, own: list[Allocation]) -> None:
        self._begun = _Sums((one.start_ns, one.size_bytes or 0) for one in own)
        # One that ended at once is live at no time: it begins before 1 ns later.
        self._ended = _Sums(
            (max(one.end_ns, one.start_ns + 1) - 1, one.size_bytes or 0)
            for one in own
            if one.end_ns is not None
        )

    def at(self, at_ns: int) -> tuple[int, int]:
        """Those that began before a time, and did not end until it."""
        begun, begun_bytes = self._begun.before(at_ns)
        ended, ended_bytes = self._ended.before(at_ns)
        return begun - ended, begun_bytes - ended_bytes


class _Sums:
    """Sizes in the order of their times."""

    def __init__(self, sizes: Iterable[tuple[int, int]]) -> None:
        in_order = sorted(sizes)
        self._at_ns = [at_ns for at_ns, _ in in_order]
        self._total_bytes = [0, *accumulate(size for _, size in in_order)]

    def before(self, at_ns: int) -> tuple[int, int]:
        """How many come before a time, and their bytes together."""
        place = bisect_left(self._at_ns, at_ns)
        return place, self._total_bytes[place]


REPORT = Report(
    "memory",
    Options,
    run,
)
