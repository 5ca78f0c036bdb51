"""Splits calls by layer: how long each spent in ioctls, in the driver, off the processor, and on the GPU."""

from __future__ import annotations

from typing import Any

from tracepipe.event.vocabulary import RUNNING
from tracepipe.reports.frames.intervals import Stretches, nothing
from tracepipe.reports.frames.libraries import np, pl
from tracepipe.reports.frames.nesting import nearest_of
from tracepipe.reports.frames.run import Run

PARTS = ("itself", "ioctl", "other system calls", "driver", "off-CPU")
"""The parts of a call, outermost first. Where they overlap the innermost has the time: a thread that sleeps
in an ioctl is off the CPU."""
GPU = "GPU"
_ID = ["pid", "tid"]
_SYSCALLS = ("ioctl", "other system calls")


class HostTime:
    """Where the threads of a recording were, by layer. `recorded` are the parts that can be told.

    All threads stand on one line, one behind the other, so that one search answers for all calls: a time is
    at its thread's number × the length of the recording + the time since its start. Where that is beyond 62
    bits there are several lines.
    """

    def __init__(self, run: Run) -> None:
        timed = pl.col("kind") != "instant"
        is_ioctl = pl.col("name") == "ioctl"
        columns = (*_ID, "start_ns", "end_ns", "kind", "name")
        syscalls = run.some("syscall", *columns).filter(timed)
        frames = {
            "ioctl": syscalls.filter(is_ioctl),
            "other system calls": syscalls.filter(~is_ioctl),
            "driver": run.some("kernel", *columns).filter(timed),
            "off-CPU": run.some("scheduler", *columns).filter(timed & (pl.col("name") == RUNNING)),
        }
        everyone = pl.concat(
            [
                frame.select(*_ID, "start_ns", "end_ns")
                for frame in (run.some("userspace", *columns), *frames.values())
            ]
        )
        self._ids = everyone.select(_ID).unique().with_row_index("thread")
        starts, ends = everyone["start_ns"].to_numpy(), everyone["end_ns"].to_numpy()
        self._start_ns = int(starts.min()) if len(starts) else 0
        self._length_ns = int(ends.max()) - self._start_ns + 1 if len(ends) else 1
        self._a_line = max(1, (1 << 62) // self._length_ns)
        self._spans = {layer: self._placed(frame) for layer, frame in frames.items()}
        layers = {"itself"} | {layer for layer, frame in frames.items() if len(frame)}
        self.recorded = [
            layer for layer in PARTS if layer in layers or (layer in _SYSCALLS and len(syscalls))
        ]
        self.is_scheduled = np.zeros(len(self._ids), bool)
        """By thread: whether it is ever seen to run."""
        self.is_scheduled[self.threads(frames["off-CPU"])] = True

    def threads(self, frame: pl.DataFrame) -> Any:
        """The number of each row's thread."""
        joined = frame.select(_ID).join(
            self._ids, on=_ID, how="left", nulls_equal=True, maintain_order="left"
        )
        return joined["thread"].to_numpy().astype(np.int64)

    def _placed(self, frame: pl.DataFrame) -> tuple[Any, Any, Any]:
        """The line of each row, and where its start and end are on it."""
        threads = self.threads(frame)
        at = threads % self._a_line * self._length_ns - self._start_ns
        return threads // self._a_line, at + frame["start_ns"].to_numpy(), at + frame["end_ns"].to_numpy()

    def _stretches(self, layer: str, line: int) -> Stretches:
        """When the threads of a line were in a layer."""
        lines, start, end = self._spans[layer]
        union = Stretches(start[lines == line], end[lines == line])
        if layer != "off-CPU":
            return union
        gaps = union.gaps()
        of_one = gaps.start_ns // self._length_ns == gaps.end_ns // self._length_ns
        return Stretches(gaps.start_ns[of_one], gaps.end_ns[of_one])

    def split(self, calls: pl.DataFrame) -> dict[str, Any]:
        """For each of `PARTS` but `itself` and each with what is inside, the ns of each call."""
        lines, start, end = self._placed(calls)
        names = [name for layer in PARTS[1:] for name in (layer, f"{layer} inclusive")]
        found = {name: np.zeros(len(calls), np.int64) for name in names}
        for line in np.unique(lines).tolist():
            rows = np.flatnonzero(lines == line)
            covered, inside_ns = nothing(), np.zeros(len(rows), np.int64)
            for layer in reversed(PARTS[1:]):
                stretches = self._stretches(layer, line)
                covered = covered.joined(stretches)
                now_ns = covered.covered_ns(start[rows], end[rows])
                found[layer][rows] = now_ns - inside_ns
                found[f"{layer} inclusive"][rows] = stretches.covered_ns(start[rows], end[rows])
                inside_ns = now_ns
        return found


def breakdown(run: Run, calls: pl.DataFrame, host: HostTime) -> pl.DataFrame:
    """`calls` with a column for each of `PARTS`, for each with what is inside it (`… inclusive`), and `GPU`.

    `calls` are rows of `numbered(run)` with a known length. Columns are ns, null where it is not known. The
    exclusive ones add up to `dur_ns`, but for `GPU`: the kernels and copies that a call asked for run beside
    it and after it.
    """
    split = host.split(calls)
    itself = calls["dur_ns"] - pl.Series(sum(split[layer] for layer in PARTS[1:]), dtype=pl.Int64)
    scheduled = pl.Series(host.is_scheduled[host.threads(calls)], dtype=pl.Boolean)
    columns = [itself.alias("itself")]
    for name, values in split.items():
        layer = name.removesuffix(" inclusive")
        known = scheduled if layer == "off-CPU" else pl.repeat(layer in host.recorded, len(calls), eager=True)
        given = pl.DataFrame({"known": known, "values": pl.Series(values, dtype=pl.Int64)})
        columns.append(given.select(pl.when("known").then("values").alias(name)).to_series())
    return _with_gpu(run, calls.with_columns(columns)).sort("start_ns")


def on_gpu(run: Run) -> pl.DataFrame:
    """Kernels and copies on a GPU whose launch call was recorded, with `call`, its row in `run.calls`."""
    columns = ("name", "gpu", "stream", "launch", "start_ns", "end_ns", "dur_ns")
    started = [
        frame.filter(pl.col("launch").is_not_null() & pl.col("dur_ns").is_not_null())
        for frame in (
            run.some("gpu_kernel", *columns),
            run.some("transfer", *columns).filter(pl.col("gpu").is_not_null()),
        )
    ]
    return launched(run, pl.concat(started)).drop_nulls("call")


def launched(run: Run, work: pl.DataFrame) -> pl.DataFrame:
    """Work of a GPU (`start_ns`, `launch`) in the order of its starts, with `call`: the row in `run.calls`.

    A launch id may come again: the last call of it before the kernel counts. Null without a recorded call.
    """
    work = work.sort("start_ns")
    calls = run.some("userspace", "launch", "start_ns", "kind").with_row_index("call")
    calls = calls.filter(pl.col("launch").is_not_null())
    calls = calls.filter(pl.col("kind") != "no_begin").select("launch", "start_ns", "call")
    before = work.join_asof(calls, on="start_ns", by="launch", check_sortedness=False)
    # A kernel that starts before its call, by clocks that are off.
    after = work.join_asof(calls, on="start_ns", by="launch", strategy="forward", check_sortedness=False)
    return before.with_columns(pl.coalesce(before["call"], after["call"]).cast(pl.Int64))


def _with_gpu(run: Run, calls: pl.DataFrame) -> pl.DataFrame:
    """`calls` with the time on the GPU of what they, or calls inside them, asked for."""
    work = on_gpu(run)
    parents = run.layer("userspace").parent
    wanted = np.zeros(len(parents), bool)
    wanted[calls["row"].to_numpy()] = True
    rows = nearest_of(parents, wanted)[work["call"].to_numpy()]
    sums = (
        work.with_columns(row=pl.Series(rows, dtype=pl.Int64))
        .filter(pl.col("row") >= 0)
        .group_by("row")
        .agg(pl.col("dur_ns").sum().alias(GPU))
    )
    return calls.join(sums, on="row", how="left")


def numbered(run: Run) -> pl.DataFrame:
    """What `breakdown` needs of `run.calls`, with `row`, the place in it."""
    columns = (*_ID, "name", "kind", "start_ns", "end_ns", "dur_ns", "depth", "parent")
    calls: Any = (
        run.some("userspace", *columns).with_row_index("row").with_columns(pl.col("row").cast(pl.Int64))
    )
    whole: pl.DataFrame = calls
    return whole
