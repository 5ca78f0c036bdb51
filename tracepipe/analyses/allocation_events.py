"""The events that allocated and freed memory, sorted by time: memory events, else calls."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Literal

from tracepipe.analyses.cuda_calls import rows_by_effect
from tracepipe.analyses.gpu_work import outermost_of
from tracepipe.event.columns import NONE, Int64s
from tracepipe.event.vocabulary import MEMORY_IN_USE
from tracepipe.reports.frames.arrays import Ints
from tracepipe.reports.frames.eager import picked
from tracepipe.reports.frames.grouping import Grouped, equal, grouped, in_order
from tracepipe.reports.frames.libraries import np, pl
from tracepipe.reports.frames.run import Run
from tracepipe.reports.frames.spans import UNCLOSED
from tracepipe.reports.frames.stored import Growing, flagged, made, parts, taken

DEVICE, MANAGED, HOST, ALL_IN_USE = "device", "managed", "host", "in use"
MAKES = {"alloc": DEVICE, "alloc_host": HOST}
FREES = {"free": DEVICE, "free_host": HOST}
_EFFECTS = (*MAKES, *FREES)
# The rows of a part, each of which takes half a kilobyte.
_AT_ONCE = 1 << 14
_NOTHING = hex(0)
_OF_CALL = ("end_ns", "kind", "pid", "tid", "gpu", "size_bytes", "address", "name", "result", "parent")
_OF_MEMORY = ("start_ns", "end_ns", "kind", "name", "pid", "tid", "gpu", "size_bytes", "address", "args")
_COLUMNS = ("at_ns", "effect", "pid", "tid", "gpu", "size_bytes", "address", "call", "total_bytes")


class AllocationEvents:
    """Allocations and frees, and the calls for them that failed. `from_calls`: they are from calls, as the
    recording has no memory events.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        names = run.shapes.column("name", np.flatnonzero(run.seen("memory")))
        self.from_calls = not any(
            bool((names == run.shapes.number_of("name", effect)).any()) for effect in _EFFECTS
        )
        by_effect = rows_by_effect(run)
        self._calls: Int64s = np.concatenate([by_effect[effect] for effect in _EFFECTS])
        self._effects = np.repeat(np.arange(len(_EFFECTS)), [len(by_effect[effect]) for effect in _EFFECTS])
        threads = _Threads(run)
        self._thread_of_shape = threads.of_shape
        self._around = _Around(run, self._calls, threads)
        self._devices = _Devices(run, threads)

    def __iter__(self) -> Iterator[pl.DataFrame]:
        """Yield parts of the rows: at_ns, effect, pid, tid, gpu, size_bytes, address, call, total_bytes (as
        recorded), failed, site.
        """
        memory, calls = self._run.layer("memory"), self._run.layer("userspace")
        count = len(memory)

        def at_ns(part: slice) -> Int64s:
            rows = np.arange(part.start, part.stop)
            own, others = rows[rows < count], self._calls[rows[rows >= count] - count]
            of_memory = np.where(memory.kind[own] == UNCLOSED, memory.start_ns[own], memory.end_ns[own])
            return np.concatenate([of_memory, calls.end_ns[others]])

        order = in_order(made(count + len(self._calls), np.int64, at_ns))
        for part in parts(len(order), _AT_ONCE):
            rows = order[part]
            place = np.argsort(rows >= count, kind="stable")
            of_calls = rows[rows >= count] - count
            both = pl.concat([self._of_memory(rows[rows < count]), self._of_calls(of_calls)])
            yield self._whole(both.with_columns(pl.Series("order", place)).sort("order").filter("is_wanted"))

    def _of_memory(self, rows: Int64s) -> pl.DataFrame:
        is_in_use = pl.col("name") == MEMORY_IN_USE
        total = pl.when(is_in_use).then(_of_args("total_bytes")).otherwise(_of_args("total_allocated"))
        return self._run.part("memory", rows, *_OF_MEMORY).select(
            self._threads("memory", rows),
            pl.when(pl.col("kind") == "unclosed").then("start_ns").otherwise("end_ns").alias("at_ns"),
            pl.col("name").alias("effect"),
            *_COLUMNS[2:7],
            _of_args("call").alias("call"),
            total.cast(pl.Int64, strict=False).alias("total_bytes"),
            pl.lit(False).alias("failed"),
            pl.lit(None, pl.String).alias("outer"),
            (pl.col("name").is_in(_EFFECTS) | total.cast(pl.Int64, strict=False).is_not_null()).alias(
                "is_wanted"
            ),
        )

    def _of_calls(self, places: Int64s) -> pl.DataFrame:
        rows = self._calls[places]
        calls = self._run.part("userspace", rows, *_OF_CALL)
        failed = pl.col("result").fill_null(0) != 0
        return calls.with_columns(
            picked(pl.Series("effect", _EFFECTS, dtype=pl.String), self._effects[places]),
            pl.Series("outer", outermost_of(self._run, calls["parent"])["name"], dtype=pl.String),
        ).select(
            self._threads("userspace", rows),
            pl.col("end_ns").alias("at_ns"),
            *_COLUMNS[1:7],
            pl.col("name").alias("call"),
            pl.lit(None, pl.Int64).alias("total_bytes"),
            failed.alias("failed"),
            pl.coalesce("outer", "name").alias("outer"),
            ((pl.col("kind") != "unclosed") & (pl.lit(self.from_calls) | failed)).alias("is_wanted"),
        )

    def _threads(self, layer: str, rows: Int64s) -> pl.Series:
        """The threads of some rows, by number."""
        return pl.Series("thread", self._thread_of_shape[self._run.layer(layer).shape[rows]])

    def _whole(self, events: pl.DataFrame) -> pl.DataFrame:
        """Complete events with their addresses, sites and GPUs."""
        addresses = [_address(one) for one in events["address"]]
        events = events.with_columns(pl.Series("address", addresses, dtype=pl.String))
        # Freeing a null pointer is allowed, and does nothing. For an allocation, a null address means that
        # the address was not read.
        is_nothing = pl.col("address") == _NOTHING
        events = events.filter(~(is_nothing & pl.col("effect").is_in(list(FREES))).fill_null(False))
        events = events.with_columns(
            pl.when(~is_nothing).then("address").alias("address"),
            pl.when(pl.col("size_bytes") >= 0).then("size_bytes").alias("size_bytes"),
        )
        sites = pl.Series("site", list(self._sites(events)), dtype=pl.String)
        return self._devices.given(events.with_columns(sites))

    def _sites(self, events: pl.DataFrame) -> Iterator[str]:
        """Yield the site of each event: the outermost call > the call inside it that did it."""
        around = self._around.names(events["thread"].to_numpy(), events["at_ns"].to_numpy())
        columns = events.select("call", "effect", "outer").iter_rows()
        for (call, effect, outer), at in zip(columns, around, strict=True):
            outermost = at if outer is None else outer
            yield " > ".join(dict.fromkeys(name for name in (outermost, call) if name)) or effect


def _of_args(key: str) -> pl.Expr:
    return pl.col("args").str.json_path_match(f"$.{key}")


def _address(text: str | None) -> str | None:
    """An address as hexadecimal, from any notation."""
    try:
        return None if text is None else hex(int(text, 0))
    except ValueError:
        return text


class _Threads:
    """Threads as numbers 0…`count`-1; `of_shape` has the number of each shape, shape `(shapes,)`."""

    def __init__(self, run: Run) -> None:
        every = np.arange(len(run.shapes), dtype=np.int32)
        self.of_shape, first = equal(run.shapes.column("pid", every), run.shapes.column("tid", every))
        self.count = len(first)


def _last_before(
    own_of: Grouped, times_ns: Int64s, threads: Ints, at_ns: Int64s, *, side: Literal["left", "right"]
) -> Int64s:
    """For each event, the last row of its thread whose time is before the event's (`left`), or not after it
    (`right`); else NONE. Events, and the rows of a thread, are sorted by time. Shapes `(events,)`.
    """
    found = np.full(len(threads), NONE, np.int64)
    for thread, places in grouped(threads):
        own = own_of.of(thread)
        if not len(own):
            continue
        # Only the rows between the first and the last event are read.
        first = _place(own, times_ns, int(at_ns[places[0]]), side)
        last = _place(own, times_ns, int(at_ns[places[-1]]), side)
        own = own[max(first - 1, 0) : last]
        at = np.searchsorted(times_ns[own], at_ns[places], side) - 1
        found[places] = np.where(at >= 0, own[np.maximum(at, 0)], NONE) if len(own) else NONE
    return found


def _place(own: Ints, times_ns: Int64s, at_ns: int, side: Literal["left", "right"]) -> int:
    """The index at which a time is inserted into the times of some rows."""
    return bisect_left(own, at_ns + (side == "right"), key=times_ns.__getitem__)


class _Around:
    """The outermost calls of threads that allocate or free."""

    def __init__(self, run: Run, calls: Int64s, threads: _Threads) -> None:
        self._run, layer, of_shape = run, run.layer("userspace"), threads.of_shape
        is_wanted = np.zeros(threads.count, np.bool_)
        is_wanted[of_shape[np.flatnonzero(run.seen("memory"))]] = True
        is_wanted[of_shape[layer.shape[calls]]] = True
        lasts = layer.is_outermost & layer.is_call
        rows = flagged(len(layer), lambda part: is_wanted[of_shape[layer.shape[part]]] & lasts[part])
        self._rows = Grouped(of_shape[layer.shape[rows]], rows)

    def names(self, threads: Ints, at_ns: Int64s) -> list[str | None]:
        """The names of the outermost calls that the events' threads were in, None without one."""
        calls = self._run.layer("userspace")
        # The time of an event is the return of its call, at which the next call may begin.
        found = _last_before(self._rows, calls.start_ns, threads, at_ns, side="left")
        known = np.flatnonzero(found != NONE)
        found[known[calls.end_ns[found[known]] < at_ns[known]]] = NONE
        names = iter(self._run.shapes.texts("name", calls.shape[found[found != NONE]]))
        return [None if row == NONE else next(names) for row in found.tolist()]


class _Devices:
    """The GPU of events that do not name it: the only one of the machine, or the one that the
    thread chose.
    """

    def __init__(self, run: Run, threads: _Threads) -> None:
        gpus = (run.facts.footer or {}).get("gpus") or run.facts.header.get("gpus") or []
        is_one = len(gpus) == 1 and isinstance(gpus[0].get("index"), int)
        self._only: int | None = gpus[0]["index"] if is_one else None
        self._at_ns, self._device, thread = Growing(np.int64), Growing(np.int64), Growing(np.int32)
        layer = run.layer("userspace")
        is_choice = run.has("name", "cudaSetDevice", layer)
        rows = flagged(len(layer) if self._only is None else 0, lambda part: is_choice[part])
        device = _of_args("device").cast(pl.Int64, strict=False).alias("device")
        for part in parts(len(rows), _AT_ONCE):
            chosen = run.part("userspace", rows[part], "end_ns", "result", "args").with_row_index("place")
            chosen = chosen.filter(pl.col("result").fill_null(0) == 0).select("place", "end_ns", device)
            chosen = chosen.drop_nulls()
            some = rows[part][chosen["place"].to_numpy()]
            self._at_ns.extend(chosen["end_ns"].to_numpy(), len(some))
            self._device.extend(chosen["device"].to_numpy(), len(some))
            thread.extend(threads.of_shape[layer.shape[some]], len(some))
        by_time = in_order(self._at_ns.so_far(thread.count))
        self._rows = Grouped(taken(thread.whole(), by_time), by_time)
        self._any = thread.count > 0

    def given(self, events: pl.DataFrame) -> pl.DataFrame:
        """Fill in the GPUs of events."""
        if self._only is not None:
            return events.with_columns(pl.col("gpu").fill_null(self._only))
        if not self._any:
            return events
        times_ns, devices = (of.so_far(of.count) for of in (self._at_ns, self._device))
        threads, at_ns = events["thread"].to_numpy(), events["at_ns"].to_numpy()
        found = _last_before(self._rows, times_ns, threads, at_ns, side="right")
        # A thread that did not choose a device uses device 0.
        current = np.where(found == NONE, 0, devices[found])
        return events.with_columns(pl.coalesce("gpu", pl.Series("device", current)).alias("gpu"))
