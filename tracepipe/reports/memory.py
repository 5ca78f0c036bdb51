"""Allocations: their peaks, bytes over time and calls, and which were never freed or freed twice."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from tracepipe.analyses.allocations import (
    FAULTS,
    IN_USE,
    Allocations,
    Group,
    Place,
    allocations,
    ends_of,
    faults_of,
    given_again,
    groups_by_place,
    groups_of,
    keeps_segments,
    live_at,
    never_freed,
    places_with_most,
)
from tracepipe.analyses.cuda_calls import calls_named
from tracepipe.analyses.distribution import PERCENTS
from tracepipe.event.columns import NONE, Ints
from tracepipe.libraries import np
from tracepipe.options import Option
from tracepipe.present.writing.drawing import ASCII, UNICODE, Window, axis, steps_chart
from tracepipe.reports.report import Column, Drawing, Report, Result, Table, not_listed
from tracepipe.store.run import Run
from tracepipe.units import agree, counted, duration_text, known_id, size_text

_CHART_ROWS = 4
_LABEL_COLUMNS = 10
_CELLS_MIN = 20
_CONTEXT_ENDS = re.compile(r"(cuCtxDestroy|cuDevicePrimaryCtxReset|cudaDeviceReset)(_v\d+)?")
# The most places (process, GPU and kind of memory) that are listed and drawn, and the most ended contexts
# that get a note.
_PLACES_MAX, _CONTEXTS_MAX = 64, 20
# The layers whose events show allocations.
_SHOWN_BY = ("memory", "userspace", "unknown layer")


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `tracepipe memory`."""

    top: Annotated[int, Option("Show at most N calls, allocations and faults; 0: all.", "N")] = 10


def run(run: Run, options: Options) -> Result:
    """The allocations of one recording."""
    found = allocations(run)
    result = Result("MEMORY")
    places, left_out = places_with_most(found, _PLACES_MAX if options.top > 0 else 0)
    faults = faults_of(found)
    if not places and not len(faults):
        result.notes.append("no allocations were recorded, neither as events nor as calls")
        return result
    ended = {*ends_of(run).tolist()}
    is_cut_off = run.facts.source == "tracepipe" and not run.facts.footer.is_read
    end = "cut off" if is_cut_off else "recording end"

    def until(pid: int | None) -> str:
        return "process end" if (NONE if pid is None else pid) in ended else end

    words = "process|processes or kind|kinds of memory, with lower peaks,"
    result.notes += not_listed(left_out, words)
    if places:
        result.parts += [_places(run, found, places, until), _over_time(run, found, places)]
    sites, count = groups_of(run, found, "site, tid, place", options.top)
    if len(sites) < count:
        result.notes.append(f"{count - len(sites)} more call sites are not listed: --top 0 lists all")
    if sites:
        result.parts.append(_sites(found, sites))
    for what, rows, make in (
        ("allocations that were never freed", never_freed(found), partial(_never_freed, until=until)),
        ("faults", faults, _faults),
    ):
        shown = rows[: options.top] if options.top > 0 else rows
        if len(shown) < len(rows):
            result.notes.append(f"{len(rows) - len(shown)} more {what} are not listed: --top 0 lists all")
        if len(shown):
            result.parts.append(make(run, found, shown.tolist()))
    result.notes += _notes(run, found, faults)
    return result


_Until = Callable[[int | None], str]
"""By process, until when an allocation that was not freed was observed."""


def _process(run: Run, pid: int | None) -> str:
    return run.process_name(pid) + ("" if known_id(pid) is None else f" {pid}")


def _places(run: Run, found: Allocations, places: list[Place], until: _Until) -> Table:
    groups = groups_by_place(run, found)
    certainty = "bound" if _lost(run) else "exact"
    rows = [
        (
            _process(run, place.pid),
            place.gpu,
            place.kind,
            of.count,
            of.total_bytes,
            place.peak[0] if place.is_known else None,
            place.peak[1] - run.facts.start_ns if place.is_known else None,
            place.total_bytes if place.is_known else None,
            of.never_freed,
            of.never_freed_bytes,
            until(place.pid),
            place.reused,
            place.unmatched,
            certainty,
        )
        for place in places
        for of in (groups[place.number],)
    ]
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
        "Peak: the most bytes at one time, as far as the recording shows. Never freed: not freed until the "
        "end of the process or of the recording, or where the recording was cut off (column “until”). Kinds: "
        "“host” is pinned memory; “in use” is what the driver reports for all users of the GPU. Reused: "
        "allocations at an address that was freed before. Unmatched: events without an address. Figures: "
        "“bound” where events were lost or filtered."
    )
    return Table("processes", "Memory of each process", columns, rows, note)


def _over_time(run: Run, found: Allocations, places: list[Place]) -> Drawing:
    drawn, left_out = places_with_most(found, _PLACES_MAX)
    base_ns, end_ns = run.facts.start_ns, max(run.facts.end_ns, run.facts.start_ns + 1)

    def draw(columns: int, ascii_only: bool) -> Iterator[str]:
        glyphs = ASCII if ascii_only else UNICODE
        window = Window(base_ns, end_ns, max(_CELLS_MIN, columns - _LABEL_COLUMNS))
        yield "Bytes over time"
        yield " " * _LABEL_COLUMNS + axis(window, base_ns)
        for place in drawn:
            if not place.is_known:
                yield f"{_title(run, place)}: sizes are not recorded"
                continue
            yield _title(run, place)
            most_bytes, _ = place.peak
            times, sizes = np.asarray(place.changed_ns), np.asarray(place.steps_bytes)
            lines = steps_chart(window, times, sizes, most_bytes, _CHART_ROWS, glyphs)
            labels = [size_text(most_bytes), *[""] * (_CHART_ROWS - 2), "0 B"]
            for label, line in zip(labels, lines, strict=True):
                yield f"{label:>{_LABEL_COLUMNS - 1}} {line}".rstrip()
        yield "A cell shows the most that was allocated in it."
        if left_out:
            yield f"{left_out} more, with lower peaks, are not drawn."

    def data() -> Iterator[dict[str, Any]]:
        for place in places:
            steps = zip(place.changed_ns, place.steps_bytes, strict=True)
            yield {
                "process": _process(run, place.pid),
                "pid": place.pid,
                "gpu": place.gpu,
                "kind": place.kind,
                "steps": ({"at_ns": ts_ns - base_ns, "total_bytes": size} for ts_ns, size in steps),
            }

    return Drawing("over_time", draw, data)


def _title(run: Run, place: Place) -> str:
    on = "" if place.gpu is None else f" of GPU {place.gpu}"
    return f"{_process(run, place.pid)}, {place.kind}{on}"


def _known(value: int) -> int | None:
    return None if value == NONE else int(value)


def _sites(found: Allocations, shown: list[Group]) -> Table:
    """Allocations by call and thread."""

    def row(of: Group) -> tuple[Any, ...]:
        place, unknown = found.places[found.place[of.row]], [None] * len(PERCENTS)
        return (
            found.sites[found.site[of.row]],
            _known(found.tid[of.row]),
            place.gpu,
            place.kind,
            of.count,
            of.total_bytes,
            *(of.sizes or unknown),
            *(of.lived_ns or unknown),
            of.never_freed,
            of.never_freed_bytes,
        )

    columns = (
        Column("site", "allocated by"),
        Column("tid", "thread", "pid"),
        Column("gpu", "GPU", "id", spare=True),
        Column("kind", "kind", spare=True),
        Column("count", "count", "count"),
        Column("total_bytes", "bytes", "bytes"),
        *(Column(f"p{p}_bytes", f"p{p}", "bytes", spare=p != 50) for p in PERCENTS),
        *(Column(f"p{p}_lived_ns", f"lived p{p}", "ns", spare=p == 95) for p in PERCENTS),
        Column("never_freed", "kept", "count"),
        Column("never_freed_bytes", "bytes", "bytes"),
    )
    note = (
        "Allocated by: the outermost call on the thread > the call inside it that allocated. Lived: from an "
        "allocation to its free, for those that were freed. Kept: never freed."
    )
    return Table("sites", "By call", columns, [*map(row, shown)], note)


def _never_freed(run: Run, found: Allocations, shown: list[int], until: _Until) -> Table:
    def row(number: int) -> tuple[Any, ...]:
        at_ns, place = int(found.at_ns[number]), found.places[found.place[number]]
        return (
            found.addresses[found.key[number]],
            _known(found.size_bytes[number]),
            at_ns - run.facts.start_ns,
            run.facts.end_ns - at_ns,
            place.gpu,
            place.kind,
            _known(found.tid[number]),
            found.sites[found.site[number]],
            until(place.pid),
        )

    columns = (
        Column("address", "address"),
        Column("size_bytes", "size", "bytes"),
        Column("at_ns", "at", "at"),
        Column("age_ns", "age", "ns"),
        Column("gpu", "GPU", "id"),
        Column("kind", "kind"),
        Column("tid", "thread", "pid"),
        Column("site", "allocated by"),
        Column("until", "until", spare=True),
    )
    title = "The largest allocations that were never freed"
    return Table("never_freed", title, columns, [*map(row, shown)])


def _faults(run: Run, found: Allocations, shown: list[int]) -> Table:
    def row(number: int) -> tuple[Any, ...]:
        fault, before, key = FAULTS[found.fault[number]], found.before[number], _known(found.key[number])
        return (
            fault,
            found.sites[found.site[number]],
            None if key is None else found.addresses[key],
            int(found.at_ns[number]) - run.facts.start_ns,
            None if before == NONE else int(found.at_ns[before]) - run.facts.start_ns,
            _known(found.size_bytes[before if fault == IN_USE else number]),
            _known(found.tid[number]),
            _process(run, found.places[found.place[number]].pid),
        )

    columns = (
        Column("what", "fault"),
        Column("site", "call"),
        Column("address", "address"),
        Column("at_ns", "at", "at"),
        Column("before_ns", "before", "at"),
        Column("size_bytes", "size", "bytes"),
        Column("tid", "thread", "pid"),
        Column("process", "process", spare=True),
    )
    note = "Before: when the address was freed first (double free), or allocated first (address in use)."
    return Table("faults", "Faults", columns, [*map(row, shown)], note, grouped=True)


def _lost(run: Run) -> dict[str, int]:
    """By layer, how many events were lost or filtered that may have been allocations."""
    filtered = run.facts.footer.filtered
    lost = {layer: run.facts.losses[layer] for layer in _SHOWN_BY if run.facts.losses[layer]}
    for layer in _SHOWN_BY:
        if isinstance(count := filtered.get(layer), int) and count:
            lost[layer] = lost.get(layer, 0) + count
    return lost


def _notes(run: Run, found: Allocations, faults: Ints) -> Iterator[str]:
    allocated = int(found.is_made.sum())
    if found.from_calls and (allocated or len(faults)):
        yield "the recording has no memory events: allocations are those of the calls that succeeded"
    kinds = np.unique(found.fault[np.sort(faults)], return_index=True, return_counts=True)
    for what, _, count in sorted(zip(*kinds, strict=True), key=lambda one: one[1]):
        yield f"{FAULTS[what]}: {count}"
    if again := given_again(found):
        yield (
            counted(again, "allocation|allocations ends|end when its|their address was allocated again: ")
            + agree(again, "its|their free|frees was|were not recorded")
        )
    if keeps_segments(run) and len(never_freed(found)):
        yield (
            "PyTorch's caching allocator keeps its segments until the process ends or memory runs out: "
            "segments that are never freed are not a leak"
        )
    if unmatched := sum(place.unmatched for place in found.places):
        yield (
            f"{counted(unmatched, 'allocation|allocations or free|frees has|have')} no address: "
            f"{agree(unmatched, 'it|they')} cannot be matched, and {agree(unmatched, 'is|are')} not among "
            "the never freed; a free without address and size does not reduce the bytes"
        )
    if count := sum(one.count for one in found.nameless):
        kept, kept_bytes = (sum(of) for of in zip(*(one.least_kept() for one in found.nameless), strict=True))
        frees = counted(sum(one.frees for one in found.nameless), "free|frees")
        yield (
            f"of {counted(count, 'allocation|allocations')} without an address, which {frees} may be of, at "
            f"least {kept} {agree(kept, 'was|were')} not freed: {size_text(kept_bytes)} or more"
        )
    if unsized := int(found.is_made[found.size_bytes == NONE].sum()):
        yield counted(unsized, "allocation|allocations has|have no size: it|they is|are counted with 0 bytes")
    yield from _ended_contexts(run, found)
    for layer, count in _lost(run).items():
        yield (
            f"{count} {layer} {agree(count, 'event|events was|were')} lost or filtered, which may include "
            "allocations and frees. The "
            "figures are bounds: allocations and their bytes are lower bounds; a lost free counts as never "
            "freed and raises the peak; a lost allocation lowers the peak and makes its free a fault"
        )


def _ended_contexts(run: Run, found: Allocations) -> Iterator[str]:
    """Notes about the allocations that were live when a process ended a context: the driver frees those that
    belong to it.
    """
    rows = calls_named(run, _CONTEXT_ENDS)
    if not len(rows):
        return
    calls, noted, more = run.layer("userspace").rows(rows), 0, 0
    names, pids = run.shapes.texts("name", calls.shape), run.shapes.numbers("pid", calls.shape, NONE)
    live = live_at(run, found, pids, calls.end_ns)
    for name, at_ns, (count, size_bytes) in zip(names, calls.end_ns.tolist(), live, strict=True):
        if count and noted < _CONTEXTS_MAX:
            noted += 1
            at = duration_text(at_ns - run.facts.start_ns)
            yield (
                f"{name} at {at} ended a context while {counted(count, 'allocation|allocations')} "
                f"({size_text(size_bytes)}) {agree(count, 'was|were')} live: the driver freed "
                "those of that context"
            )
        else:
            more += count > 0
    if more:
        yield counted(more, "more call|calls ended a context while allocations were live")


REPORT = Report("memory", Options, run)
