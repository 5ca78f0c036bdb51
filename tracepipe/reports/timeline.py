"""The timeline on a terminal: a row for each layer of each thread, and for each stream of each GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

from tracepipe.errors import TracepipeError
from tracepipe.event.vocabulary import RUNNING
from tracepipe.reports.frames.grouping import grouped
from tracepipe.reports.frames.libraries import np, pl
from tracepipe.reports.frames.run import Run
from tracepipe.reports.report import Drawing, Option, Report, Result
from tracepipe.reports.writing.drawing import (
    ASCII,
    UNICODE,
    Glyphs,
    Window,
    axis,
    instants_line,
    level_line,
    spans_line,
)
from tracepipe.units import duration_ns, duration_text, three_digits

_LABEL_COLUMNS = 13
_CELLS_MIN = 20
_COLUMNS_MAX = 10_000
# Rows of a thread, top to bottom: title, layer of the run.
_LAYERS = (
    ("CUDA API", "userspace"),
    ("syscalls", "syscall"),
    ("driver", "kernel"),
    ("scheduler", "scheduler"),
    ("memory", "memory"),
    ("transfers", "transfer"),
)
_OF_THREAD = ("pid", "tid", "start_ns", "end_ns", "kind", "name", "depth")
_ON_STREAM = ("gpu", "stream", "start_ns", "end_ns", "kind", "name")


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `tracepipe timeline`."""

    start: Annotated[str, Option("From this time after the start of the run: 1.5ms, 20us, 2s.", "TIME")] = ""
    end: Annotated[str, Option("Until this time after the start of the run.", "TIME")] = ""
    depth: Annotated[int, Option("Rows for calls inside calls, in each layer.", "N")] = 3
    threads: Annotated[int, Option("How many threads, the busiest; 0: all.", "N")] = 8
    width: Annotated[int, Option("Columns; 0: as wide as the terminal.", "N")] = 0


@dataclass(slots=True)
class Strip:
    """One row: its spans as columns, and times of its instants. `level`: how many there are at a time."""

    label: str
    start_ns: Any
    end_ns: Any
    names: pl.Series
    instants_ns: Any
    level: bool = False

    @classmethod
    def of(cls, label: str, spans: pl.DataFrame) -> Strip:
        """A row of a frame of the run."""
        is_instant = pl.col("kind").is_in(["instant", "no_begin"])
        drawn, instants = spans.filter(~is_instant), spans.filter(is_instant)
        columns = drawn["start_ns"].to_numpy(), drawn["end_ns"].to_numpy(), drawn["name"]
        return cls(label, *columns, instants["start_ns"].to_numpy())

    def draw(self, window: Window, glyphs: Glyphs) -> str:
        """Its label and letters; where a span is drawn, no instant is."""
        label = self.label
        if self.level:
            line, most = level_line(window, self.start_ns, self.end_ns, glyphs)
            label = f"{label} {glyphs.at_most}{three_digits(most)}"
        else:
            spans = spans_line(window, self.start_ns, self.end_ns, self.names, glyphs)
            marks = instants_line(window, self.instants_ns, glyphs.instant)
            line = "".join(mark if cell == " " else cell for cell, mark in zip(spans, marks, strict=True))
        return f"{label[: _LABEL_COLUMNS - 1]:<{_LABEL_COLUMNS}}{line}".rstrip()

    def as_json(self, base_ns: int) -> dict[str, Any]:
        """The spans and instants of the row, times from the start of the run."""
        times = zip(self.start_ns.tolist(), self.end_ns.tolist(), self.names, strict=True)
        return {
            "row": self.label.strip(),
            "spans": [
                {"name": name, "start_ns": start - base_ns, "dur_ns": end - start}
                for start, end, name in times
            ],
            "instants_ns": [ts_ns - base_ns for ts_ns in self.instants_ns.tolist()],
        }


@dataclass(slots=True)
class Group:
    """Rows under a title: a thread, a GPU, what the recording lacks."""

    title: str
    rows: list[Strip] = field(default_factory=list)


def run(run: Run, options: Options) -> Result:
    """The timeline of one recording."""
    start_ns, end_ns = _window(run, options)
    notes: list[str] = []
    groups = [*_threads(run, start_ns, end_ns, options, notes), *_gpus(run, start_ns, end_ns)]
    lost = run.losses.filter(pl.col("start_ns") <= end_ns)
    lost = lost.filter(pl.col("start_ns") + pl.col("dur_ns").fill_null(0) >= start_ns)
    if len(lost):
        rows = [_losses(f"{layer or 'unknown'}", part) for (layer,), part in _parts(lost, "layer")]
        groups.append(Group("lost events", rows))
    if not any(group.rows for group in groups):
        notes.append("nothing happened in this stretch of time")

    def draw(columns: int, ascii_only: bool) -> Iterator[str]:
        cells = max(_CELLS_MIN, min(options.width or columns, _COLUMNS_MAX) - _LABEL_COLUMNS)
        return _draw(groups, Window(start_ns, end_ns, cells), run.facts.start_ns, ascii_only)

    base_ns = run.facts.start_ns

    def data() -> dict[str, Any]:
        drawn = [{"title": g.title, "rows": [row.as_json(base_ns) for row in g.rows]} for g in groups]
        return {"start_ns": start_ns - base_ns, "end_ns": end_ns - base_ns, "groups": drawn}

    return Result("", [Drawing("timeline", draw, data)], notes)


def _window(run: Run, options: Options) -> tuple[int, int]:
    """The stretch that is asked for, trace ns; without options from the first event to the last end."""
    base_ns = run.facts.start_ns
    layers = [run.layer(name) for name in (*(name for _, name in _LAYERS), "gpu_kernel", "gpu_thread")]
    firsts = [int(layer.start_ns[0]) for layer in layers if len(layer)]
    firsts += [] if run.warp_table.first_ns is None else [run.warp_table.first_ns]
    start_ns = base_ns + duration_ns(options.start) if options.start else min(firsts, default=base_ns)
    end_ns = base_ns + duration_ns(options.end) if options.end else run.facts.end_ns
    if options.start or options.end:
        length = duration_text(run.facts.end_ns - base_ns)
        if start_ns >= end_ns:
            raise TracepipeError(
                "the stretch of time is empty", f"the run lasts {length}; --start before --end"
            )
    return start_ns, max(end_ns, start_ns + 1)


def _between(frame: pl.DataFrame, start_ns: int, end_ns: int) -> pl.DataFrame:
    return frame.filter((pl.col("start_ns") <= end_ns) & (pl.col("end_ns") >= start_ns))


def _parts(frame: pl.DataFrame, *keys: str) -> Iterator[tuple[tuple[Any, ...], pl.DataFrame]]:
    """The rows of each key, in the order of the keys; what has none comes last."""
    yield from (
        frame.sort(*keys, nulls_last=True, maintain_order=True).partition_by(*keys, as_dict=True).items()
    )


def _threads(run: Run, start_ns: int, end_ns: int, options: Options, notes: list[str]) -> Iterator[Group]:
    frames = {}
    for title, name in _LAYERS:
        columns = (*_OF_THREAD, "gpu") if name == "transfer" else _OF_THREAD
        frame = _between(run.some(name, *columns), start_ns, end_ns)
        frames[title] = frame.filter(pl.col("gpu").is_null()) if name == "transfer" else frame
    ids = pl.concat([frame.select("pid", "tid") for frame in frames.values()])
    busiest = ids.group_by("pid", "tid").len().sort("len", "pid", "tid", descending=[True, False, False])
    shown = busiest.head(options.threads) if options.threads > 0 else busiest
    if len(busiest) > len(shown):
        notes.append(f"{len(busiest) - len(shown)} threads with fewer events are not drawn: --threads 0")
    by_thread = {
        title: frame.select(_OF_THREAD)
        .join(shown, on=["pid", "tid"], how="semi", nulls_equal=True)
        .partition_by("pid", "tid", as_dict=True)
        for title, frame in frames.items()
        if len(frame)
    }
    deeper = 0
    for pid, tid in shown.select("pid", "tid").sort("pid", "tid", nulls_last=True).iter_rows():
        name = run.thread_name(pid, tid) or run.process_name(pid)
        ids_text = "" if tid is None else f" thread {tid}" + ("" if pid == tid else f" of {pid}")
        group = Group(f"{name}{ids_text}")
        for title, parts in by_thread.items():
            part = parts.get((pid, tid))
            if part is not None:
                group.rows += _layer_rows(title, part, options.depth)
                deeper += int((part["depth"] >= options.depth).sum())
        yield group
    if deeper:
        notes.append(f"{deeper} calls are too deep in others to be drawn: --depth")


def _layer_rows(title: str, spans: pl.DataFrame, depth: int) -> Iterator[Strip]:
    if title == "scheduler":
        on_cpu = pl.col("name") == RUNNING
        for label, part in (("running", spans.filter(on_cpu)), ("scheduler", spans.filter(~on_cpu))):
            if len(part):
                yield Strip.of(label, part)
        return
    for (level,), part in _parts(spans.filter(pl.col("depth") < depth), "depth"):
        yield Strip.of(title if level == 0 else f"  inside {level}", part)


def _gpus(run: Run, start_ns: int, end_ns: int) -> Iterator[Group]:
    copies = run.some("transfer", *_ON_STREAM).filter(pl.col("gpu").is_not_null())
    on_stream = pl.concat([run.some("gpu_kernel", *_ON_STREAM), copies]).sort("start_ns")
    on_stream = _between(on_stream, start_ns, end_ns).with_columns(pl.col("gpu", "stream").fill_null(0))
    began = (pl.col("entry_ns") <= end_ns) & (pl.col("last_exit_ns").fill_null(end_ns) >= start_ns)
    warps = run.warp_table.frame("gpu", "name", "entry_ns", "last_exit_ns").filter(began)
    warps = warps.with_columns(pl.col("gpu").fill_null(0))
    threads = _timed_threads(run, start_ns, end_ns)
    gpus = sorted({*on_stream["gpu"].unique(), *warps["gpu"].unique(), *threads})
    said = [*run.facts.header.get("gpus", []), *(run.facts.footer or {}).get("gpus", [])]
    names = {gpu["index"]: gpu.get("name", "") for gpu in said if isinstance(gpu.get("index"), int)}
    for gpu in gpus:
        group = Group(f"GPU {gpu} {names.get(gpu, '')}".rstrip())
        for (stream,), part in _parts(on_stream.filter(gpu=gpu), "stream"):
            group.rows.append(Strip.of(f"stream {stream}", part))
        if len(part := warps.filter(gpu=gpu)):
            ends = part["last_exit_ns"].fill_null(run.facts.end_ns).to_numpy()
            group.rows.append(
                Strip("warps", part["entry_ns"].to_numpy(), ends, part["name"], np.zeros(0), True)
            )
        if gpu in threads:
            nothing = np.zeros(0, np.int64)
            group.rows.append(
                Strip("threads", nothing, nothing, pl.Series([], dtype=pl.String), threads[gpu])
            )
        yield group


def _timed_threads(run: Run, start_ns: int, end_ns: int) -> dict[int, Any]:
    """GPU → when single threads of it entered or left."""
    layer = run.layer("gpu_thread")
    first, last = np.searchsorted(layer.start_ns, start_ns), np.searchsorted(layer.start_ns, end_ns, "right")
    gpu = run.shapes.series("gpu", layer.shape[first:last]).fill_null(0).to_numpy()
    return {one: layer.start_ns[first:last][rows] for one, rows in grouped(gpu)}


def _losses(layer: str, losses: pl.DataFrame) -> Strip:
    starts = losses["start_ns"].to_numpy()
    ends = starts + losses["dur_ns"].fill_null(0).to_numpy()
    return Strip(layer, starts, ends, _names(losses), starts)


def _names(losses: pl.DataFrame) -> pl.Series:
    return losses.select(pl.format("lost {}", "count")).to_series()


def _draw(groups: list[Group], window: Window, base_ns: int, ascii_only: bool) -> Iterator[str]:
    glyphs = ASCII if ascii_only else UNICODE
    blank = " " * _LABEL_COLUMNS
    cell_ns = (window.end_ns - window.start_ns) / window.cells
    length = duration_text(window.end_ns - window.start_ns)
    yield f"{length} from {duration_text(window.start_ns - base_ns)} on; a cell is {duration_text(cell_ns)}"
    yield blank + axis(window, base_ns)
    for group in groups:
        if group.rows:
            yield group.title
        yield from (row.draw(window, glyphs) for row in group.rows)
    yield f"{glyphs.shades[0]}…{glyphs.shades[-1]}  share of a cell that short spans take"
    yield f"{glyphs.instant}    an instant, or several"
    if any(row.level for group in groups for row in group.rows):
        bars = f"{glyphs.bars[0]}…{glyphs.bars[-1]}"
        yield f"{bars}  how many run at a time, mean of a cell; {glyphs.at_most}N: the most of a cell"


REPORT = Report(
    "timeline",
    Options,
    run,
)
