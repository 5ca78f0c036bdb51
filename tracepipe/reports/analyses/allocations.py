"""Follows allocations from the call that made them to that which freed them, as far as a recording tells."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tracepipe.event.columns import NONE, Bools
from tracepipe.event.vocabulary import MEMORY_IN_USE
from tracepipe.reports.analyses.cuda_calls import effects_of_calls
from tracepipe.reports.analyses.gpu_work import outermost_of
from tracepipe.reports.frames.grouping import Grouped, equal, grouped
from tracepipe.reports.frames.libraries import np, pl
from tracepipe.reports.frames.run import Run
from tracepipe.reports.frames.stored import flagged, parts

DEVICE, MANAGED, HOST, ALL_IN_USE = "device", "managed", "host", "in use"
FREED, LIVE, GIVEN_AGAIN = "freed", "never freed", "given again"
DOUBLE, UNKNOWN, REFUSED = "double free", "free of an unknown address", "free refused"
IN_USE, FAILED = "address given again while in use", "allocation failed"
_MAKES = {"alloc": DEVICE, "alloc_host": HOST}
_FREES = {"free": DEVICE, "free_host": HOST}
NOTHING = hex(0)
_OF_CALL = ("end_ns", "pid", "tid", "gpu", "size_bytes", "address", "name", "parent", "kind")
_OF_MEMORY = ("start_ns", "end_ns", "kind", "name", "pid", "tid", "gpu", "size_bytes", "address", "args")
Place = tuple[int | None, int | None, str]
"""Process, GPU, kind of memory."""


@dataclass(slots=True)
class Allocation:
    """One allocation. `end_ns` is None and `fate` `LIVE` while nothing is known to have ended it.

    `GIVEN_AGAIN`: its free was not seen, but its address was given out once more at `end_ns`.
    """

    place: Place
    tid: int | None
    site: str
    address: str | None
    size_bytes: int | None
    start_ns: int
    end_ns: int | None = None
    fate: str = LIVE


@dataclass(slots=True)
class Fault:
    """Something that should not happen. `before_ns`: when the address was freed first, or given out first."""

    what: str
    at_ns: int
    pid: int | None
    tid: int | None
    site: str
    address: str | None
    size_bytes: int | None = None
    before_ns: int | None = None


@dataclass(slots=True)
class Steps:
    """Bytes over time at one place: from each time on, so many. `known`: the recording tells sizes at all."""

    ts_ns: list[int] = field(default_factory=list)
    total_bytes: list[int] = field(default_factory=list)
    known: bool = False

    def add(self, ts_ns: int, total_bytes: int) -> None:
        """From `ts_ns` on it is so much."""
        self.ts_ns.append(ts_ns)
        self.total_bytes.append(total_bytes)

    def peak(self) -> tuple[int, int]:
        """The most, and when that was first reached."""
        at = int(np.argmax(np.array(self.total_bytes, np.int64)))
        return self.total_bytes[at], self.ts_ns[at]


@dataclass(slots=True)
class Allocations:
    """What was found. `unmatched` counts allocations and frees without an address, by place: they cannot be
    told apart. `reused` counts addresses that were given out once more after their free."""

    all: list[Allocation] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    steps: dict[Place, Steps] = field(default_factory=lambda: defaultdict(Steps))
    unmatched: dict[Place, int] = field(default_factory=lambda: defaultdict(int))
    reused: dict[Place, int] = field(default_factory=lambda: defaultdict(int))
    from_calls: bool = False


def allocations(run: Run) -> Allocations:
    """Every allocation of a recording, in the order of time; told by calls where it has no memory events."""
    from_calls = not {*_MAKES, *_FREES} & {*run.of_shapes("name", run.seen("memory"))}
    return _Following(from_calls).follow(_events(run, from_calls))


class _Following:
    """Live allocations by process, side (device or host) and address, on the way through the recording."""

    def __init__(self, from_calls: bool) -> None:
        self.found = Allocations(from_calls=from_calls)
        self._live: dict[tuple[int | None, str, str], Allocation] = {}
        self._freed_ns: dict[tuple[int | None, str, str], int] = {}
        self._total_bytes: dict[Place, int] = defaultdict(int)

    def follow(self, events: pl.DataFrame) -> Allocations:
        """Take all events, in order."""
        for event in events.iter_rows(named=True):
            effect = event["effect"]
            if event["failed"]:
                self._refused(event)
            elif effect in _MAKES:
                self._alloc(event, _MAKES[effect])
            elif effect in _FREES:
                self._free(event, _FREES[effect])
            else:
                kind = ALL_IN_USE if effect == MEMORY_IN_USE else DEVICE
                self._count((event["pid"], event["gpu"], kind), event["at_ns"], 0, event["total_bytes"])
        return self.found

    def _count(self, place: Place, at_ns: int, change_bytes: int, known_bytes: int | None = None) -> None:
        total = self._total_bytes[place] + change_bytes if known_bytes is None else known_bytes
        # Less than nothing was allocated before the recording began.
        self._total_bytes[place] = max(0, total)
        steps = self.found.steps[place]
        steps.add(at_ns, max(0, total))
        steps.known |= change_bytes != 0 or known_bytes is not None

    def _alloc(self, event: dict[str, Any], side: str) -> None:
        pid, address, at_ns = event["pid"], event["address"], event["at_ns"]
        kind = MANAGED if side == DEVICE and "Managed" in event["site"] else side
        place = (pid, event["gpu"] if side == DEVICE else None, kind)
        one = Allocation(place, event["tid"], event["site"], address, event["size_bytes"], at_ns)
        self.found.all.append(one)
        if address is None:
            self.found.unmatched[place] += 1
        else:
            key = (pid, side, address)
            before = self._live.get(key)
            if before is not None:
                before.end_ns, before.fate = at_ns, GIVEN_AGAIN
                self._fault(IN_USE, event, before.size_bytes, before.start_ns)
                self._count(before.place, at_ns, -(before.size_bytes or 0))
            self.found.reused[place] += self._freed_ns.pop(key, None) is not None
            self._live[key] = one
        self._count(place, at_ns, one.size_bytes or 0, event["total_bytes"])

    def _free(self, event: dict[str, Any], side: str) -> None:
        pid, address, at_ns = event["pid"], event["address"], event["at_ns"]
        place = (pid, event["gpu"] if side == DEVICE else None, side)
        if address is None:
            self.found.unmatched[place] += 1
            self._count(place, at_ns, -(event["size_bytes"] or 0), event["total_bytes"])
            return
        key = (pid, side, address)
        one = self._live.pop(key, None)
        if one is None:
            before_ns = self._freed_ns.get(key)
            self._fault(UNKNOWN if before_ns is None else DOUBLE, event, event["size_bytes"], before_ns)
            return
        one.end_ns, one.fate = at_ns, FREED
        self._freed_ns[key] = at_ns
        self._count(one.place, at_ns, -(one.size_bytes or 0), event["total_bytes"])

    def _refused(self, event: dict[str, Any]) -> None:
        """A call that failed: it did nothing."""
        side = _FREES.get(event["effect"])
        if side is None:
            self._fault(FAILED, event, event["size_bytes"], None)
            return
        key = (event["pid"], side, event["address"])
        before_ns = self._freed_ns.get(key) if event["address"] else None
        known = before_ns is not None or key in self._live or event["address"] is None
        what = REFUSED if known and before_ns is None else UNKNOWN if before_ns is None else DOUBLE
        self._fault(what, event, None, before_ns)

    def _fault(self, what: str, event: dict[str, Any], size_bytes: int | None, before_ns: int | None) -> None:
        who = (event["pid"], event["tid"], event["site"], event["address"])
        self.found.faults.append(Fault(what, event["at_ns"], *who, size_bytes, before_ns))


def _events(run: Run, from_calls: bool) -> pl.DataFrame:
    """What was allocated and freed, and calls that failed to, in the order of time.

    at_ns, effect, pid, tid, gpu, size_bytes, address, call, total_bytes (that the tracer knew), failed, site.
    """
    calls = effects_of_calls(run, [*_MAKES, *_FREES], *_OF_CALL)
    around = pl.Series("outer", outermost_of(run, calls["parent"])["name"], dtype=pl.String)
    calls = calls.with_columns(around)
    calls = calls.filter(pl.col("kind") != "unclosed")
    told = calls if from_calls else calls.filter("failed")
    of_calls = told.select(
        pl.col("end_ns").alias("at_ns"),
        "effect",
        "pid",
        "tid",
        "gpu",
        "size_bytes",
        "address",
        pl.col("name").alias("call"),
        pl.lit(None, pl.Int64).alias("total_bytes"),
        "failed",
        pl.coalesce("outer", "name").alias("outer"),
    )
    is_in_use = pl.col("name") == MEMORY_IN_USE
    total = pl.when(is_in_use).then(_of_args("total_bytes")).otherwise(_of_args("total_allocated"))
    of_memory = (
        run.some("memory", *_OF_MEMORY)
        .select(
            pl.when(pl.col("kind") == "unclosed").then("start_ns").otherwise("end_ns").alias("at_ns"),
            pl.col("name").alias("effect"),
            "pid",
            "tid",
            "gpu",
            "size_bytes",
            "address",
            pl.col("args").str.json_path_match("$.call").alias("call"),
            total.cast(pl.Int64, strict=False).alias("total_bytes"),
            pl.lit(False).alias("failed"),
            pl.lit(None, pl.String).alias("outer"),
        )
        .filter(pl.col("effect").is_in([*_MAKES, *_FREES]) | pl.col("total_bytes").is_not_null())
    )
    events = pl.concat([of_memory, of_calls]).sort("at_ns", maintain_order=True)
    addresses = [_address(one) for one in events["address"]]
    events = events.with_columns(pl.Series("address", addresses, dtype=pl.String))
    # To free nothing is allowed, and does nothing. An allocation has it where its address could not be read.
    is_nothing = pl.col("address") == NOTHING
    events = events.filter(~(is_nothing & pl.col("effect").is_in(list(_FREES))).fill_null(False))
    events = events.with_columns(pl.when(~is_nothing).then("address").alias("address"))
    return _with_gpu(run, events.with_columns(pl.Series("site", list(_sites(run, events)), dtype=pl.String)))


def _of_args(key: str) -> pl.Expr:
    return pl.col("args").str.json_path_match(f"$.{key}")


def _address(text: str | None) -> str | None:
    """An address as hexadecimal, however it was written."""
    try:
        return None if text is None else hex(int(text, 0))
    except ValueError:
        return text


def _sites(run: Run, events: pl.DataFrame) -> Iterator[str]:
    """For each event the call that did it, after the outermost call that it was done in."""
    if not len(events):
        return
    around = _outermost_at(run, events.select("at_ns", "pid", "tid"))
    columns = events.select("call", "effect", "outer").iter_rows()
    for (call, effect, outer), at in zip(columns, around, strict=True):
        outermost = at if outer is None else outer
        yield " > ".join(dict.fromkeys(name for name in (outermost, call) if name)) or effect


def _outermost_at(run: Run, events: pl.DataFrame) -> list[str | None]:
    """The name of the outermost call that each event's thread was in, None without one."""
    calls, every = run.layer("userspace"), np.arange(len(run.shapes), dtype=np.int32)
    of_shape, first = equal(run.shapes.column("pid", every), run.shapes.column("tid", every))
    threads = pl.DataFrame([run.shapes.series(key, every[first]) for key in ("pid", "tid")])
    threads = threads.with_row_index("thread").unique(["pid", "tid"], keep="first")
    told = events.join(threads, on=["pid", "tid"], how="left", nulls_equal=True, maintain_order="left")
    number = told["thread"].cast(pl.Int64).fill_null(len(first)).to_numpy()
    of_thread = dict(grouped(number))
    is_wanted = np.zeros(len(first) + 1, np.bool_)
    is_wanted[number] = True
    lasts = calls.is_outermost & calls.is_call
    found = np.full(len(events), NONE, np.int64)
    rows = flagged(len(calls), lambda part: is_wanted[of_shape[calls.shape[part]]] & lasts[part])
    for thread, own in Grouped(of_shape[calls.shape[rows]], rows):
        places = of_thread[thread]
        at_ns = events["at_ns"].to_numpy()[places]
        # The event stands at the return of its call, where the next may begin.
        at = np.searchsorted(calls.start_ns[own], at_ns, "left") - 1
        is_in = (at >= 0) & (calls.end_ns[own[np.maximum(at, 0)]] >= at_ns)
        found[places[is_in]] = own[at[is_in]]
    names = iter(run.shapes.texts("name", calls.shape[found[found != NONE]]))
    return [None if row == NONE else next(names) for row in found.tolist()]


def _with_gpu(run: Run, events: pl.DataFrame) -> pl.DataFrame:
    """Events with their GPU: as recorded, the only one there is, or the one that the thread chose."""
    gpus = (run.facts.footer or {}).get("gpus") or run.facts.header.get("gpus") or []
    if len(gpus) == 1 and isinstance(gpus[0].get("index"), int):
        return events.with_columns(pl.col("gpu").fill_null(gpus[0]["index"]))
    device = pl.col("args").str.json_path_match("$.device").cast(pl.Int64, strict=False).alias("device")
    choices = np.flatnonzero(run.has("name", "cudaSetDevice", run.layer("userspace")))
    chosen = run.rows("userspace", choices, "pid", "tid", "end_ns", "result", "args")
    chosen = chosen.filter(pl.col("result").fill_null(0) == 0)
    chosen = chosen.select("pid", "tid", pl.col("end_ns").alias("at_ns"), device).drop_nulls().sort("at_ns")
    if not len(chosen):
        return events
    current = events.join_asof(chosen, on="at_ns", by=["pid", "tid"], check_sortedness=False)["device"]
    # A thread that chose none is on device 0.
    return events.with_columns(pl.coalesce("gpu", current, pl.lit(0)).alias("gpu"))


def _dead(run: Run) -> Bools:
    """The shapes of main threads that were dead when the scheduler took them off a processor."""
    switches, every = run.layer("scheduler"), np.arange(len(run.shapes), dtype=np.int32)
    pid = run.shapes.column("pid", every)
    is_main: Bools = (pid != NONE) & (pid == run.shapes.column("tid", every))
    dead = np.zeros(len(every), np.bool_)
    for part in parts(len(switches)):
        ends, of = switches.end_args[part], switches.shape[part]
        for number in np.unique(ends[is_main[of] & (ends != NONE)]).tolist():
            if run.args.args(number).get("prev_state") == "dead":
                dead[of[(ends == number) & is_main[of]]] = True
    return dead


def ends_of(run: Run) -> dict[int | None, str]:
    """Process → what ended what is known of it; others end with the recording."""
    ended = dict[int | None, str]()
    shapes, every = run.shapes, np.arange(len(run.shapes), dtype=np.int32)
    exits = shapes.column("name", every) == shapes.number_of("name", "exit_group")
    gone = run.of_shapes("pid", exits & run.seen("syscall"))
    gone += run.of_shapes("pid", _dead(run))
    pids = {*run.of_shapes("pid", run.seen("userspace")), *run.of_shapes("pid", run.seen("memory"))}
    why = str((run.facts.footer or {}).get("ended_by", ""))
    if len(pids) == 1 and why.startswith(("exit", "signal")):
        gone += pids
    ended |= dict.fromkeys(gone, "process end")
    return ended
