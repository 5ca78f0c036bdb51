"""What a thread did in stretches of time: each ns once, off the CPU before driver before system call."""

from __future__ import annotations

from typing import Any

from tracepipe.event.vocabulary import RUNNING
from tracepipe.reports.analyses.breakdown import PARTS
from tracepipe.reports.frames.intervals import Stretches
from tracepipe.reports.frames.libraries import np, pl
from tracepipe.reports.frames.nesting import outermost
from tracepipe.reports.frames.run import Run

IN_CALL, USER, ABSENT, UNKNOWN = "CUDA call", "user code", "not running", "unknown"
"""States beside `LAYERS[1:]`: in a CUDA call and in nothing below it; in none that was recorded; before the
thread first ran and after it last did; no thread is known."""
OFF_CPU = "off-CPU"
Thread = tuple[int | None, int | None]
_INNERMOST_FIRST = tuple(reversed(PARTS[1:]))
STATES = (*_INNERMOST_FIRST, ABSENT, IN_CALL, USER)


class _Named:
    """Spans of one thread that do not overlap, in the order of time, with their names."""

    def __init__(self, spans: pl.DataFrame) -> None:
        self.start_ns, self.end_ns = spans["start_ns"].to_numpy(), spans["end_ns"].to_numpy()
        self.names = spans["name"]

    def at(self, ts_ns: Any) -> Any:
        """The place of the span that each time lies in, -1 for none."""
        place = np.searchsorted(self.start_ns, ts_ns, "right") - 1
        inside = (place >= 0) & (ts_ns < self.end_ns.take(place, mode="clip")) if len(self.names) else False
        return np.where(inside, place, -1)


class _ByThread:
    """The spans of each thread, in the order of time. Made in one go, however many threads there are."""

    def __init__(self, spans: pl.DataFrame) -> None:
        self._spans = spans.select("pid", "tid", "start_ns", "end_ns", "name").sort(
            "pid", "tid", "start_ns", maintain_order=True
        )
        self._places: dict[Thread, tuple[int, int]] = {}
        at = 0
        for pid, tid, count in self._spans.group_by("pid", "tid", maintain_order=True).len().iter_rows():
            self._places[pid, tid] = at, count
            at += count

    def of(self, thread: Thread) -> pl.DataFrame:
        """The spans of one."""
        return self._spans.slice(*self._places.get(thread, (0, 0)))


class HostStates:
    """Tells the states of the threads of a recording. `recorded` are those of `PARTS` that can be told."""

    def __init__(self, run: Run) -> None:
        timed = pl.col("kind") != "instant"
        columns = ("pid", "tid", "start_ns", "end_ns", "kind", "name", "parent")
        syscalls = run.some("syscall", *columns).filter(timed)
        is_ioctl = pl.col("name") == "ioctl"
        frames = {
            "off-CPU": run.some("scheduler", *columns).filter(timed & (pl.col("name") == RUNNING)),
            "driver": run.some("kernel", *columns).filter(timed),
            "ioctl": syscalls.filter(is_ioctl),
            "other system calls": syscalls.filter(~is_ioctl),
        }
        self.recorded = {layer for layer, frame in frames.items() if len(frame)}
        if len(syscalls):
            self.recorded |= {"ioctl", "other system calls"}
        self._frames = {layer: _ByThread(frame) for layer, frame in frames.items()}
        calls = run.some("userspace", *columns)
        self._calls = _ByThread(outermost(calls.filter(pl.col("kind") != "no_begin")))
        self._syscalls = _ByThread(outermost(syscalls.filter(pl.col("kind") != "no_begin")))

    def _layer(self, thread: Thread, layer: str) -> Stretches:
        spans = self._frames[layer].of(thread)
        union = Stretches(spans["start_ns"].to_numpy(), spans["end_ns"].to_numpy())
        return union.gaps() if layer == OFF_CPU else union

    def of(self, thread: Thread, start_ns: Any, end_ns: Any) -> pl.DataFrame:
        """How long a thread was in which state in each of some stretches, in order and apart from each other.

        stretch: the place of it; state: one of `LAYERS[1:]`, `IN_CALL`, `USER`, `ABSENT`; call: the outermost
        CUDA call at that time, or null; syscall: the system call, where it is in no CUDA call; dur_ns.
        """
        calls, syscalls = _Named(self._calls.of(thread)), _Named(self._syscalls.of(thread))
        layers = [self._layer(thread, layer) for layer in _INNERMOST_FIRST]
        running = self._frames[OFF_CPU].of(thread)
        seen_ns = [running["start_ns"].min(), running["end_ns"].max()] if len(running) else []
        edges = [start_ns, end_ns]
        parts: tuple[Any, ...] = (calls, syscalls, *layers)
        edges += [one for part in parts for one in (part.start_ns, part.end_ns)]
        edges.append(np.array(seen_ns, np.int64))
        bounds = np.unique(np.concatenate(edges))
        left, right = bounds[:-1], bounds[1:]
        stretch = np.searchsorted(start_ns, left, "right") - 1
        kept = (stretch >= 0) & (left < end_ns.take(stretch, mode="clip")) if len(start_ns) else left < left
        left, right, stretch = left[kept], right[kept], stretch[kept]
        call, syscall = calls.at(left), syscalls.at(left)
        state = np.where(call >= 0, STATES.index(IN_CALL), STATES.index(USER))
        for code in reversed(range(len(layers))):
            state[_is_in(layers[code], left)] = code
        if seen_ns:
            first_ns, last_ns = seen_ns
            # One that sleeps in a call to the end of the recording is not seen to run again.
            waits = (call >= 0) | (syscall >= 0)
            state[(left < first_ns) | (left >= last_ns)] = STATES.index(ABSENT)
            state[(left >= last_ns) & waits] = STATES.index(OFF_CPU)
        names = pl.DataFrame(
            {
                "stretch": stretch,
                "state": pl.Series(STATES)[state],
                "call": _names(calls, call),
                "syscall": _names(syscalls, syscall),
                "dur_ns": right - left,
            }
        )
        names = names.with_columns(pl.when(pl.col("call").is_null()).then("syscall").alias("syscall"))
        keys = ("stretch", "state", "call", "syscall")
        return names.group_by(*keys, maintain_order=True).agg(pl.col("dur_ns").sum())


def _names(spans: _Named, places: Any) -> pl.Series:
    if not len(spans.names):
        return pl.repeat(None, len(places), dtype=pl.String, eager=True)
    found = pl.Series(places)
    named = spans.names[found.clip(0)]
    return pl.select(pl.when(found >= 0).then(named).alias("name"))["name"]


def _is_in(stretches: Stretches, ts_ns: Any) -> Any:
    if not len(stretches.start_ns):
        return np.zeros(len(ts_ns), bool)
    place = np.searchsorted(stretches.start_ns, ts_ns, "right") - 1
    return (place >= 0) & (ts_ns < stretches.end_ns.take(place, mode="clip"))
