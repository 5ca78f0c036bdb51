"""The timeline on a terminal: a row for each layer of each thread, and for each stream of each GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from tracepipe.event.columns import NONE, Int32s, Int64s, Ints
from tracepipe.event.groups import RowsByNumber, number_rows
from tracepipe.event.vocabulary import RUNNING
from tracepipe.libraries import np
from tracepipe.options import Option
from tracepipe.present.figures.panel import empty_stretch
from tracepipe.present.writing.drawing import ASCII, LABEL_COLUMNS, UNICODE, Group, Spans, Strip, Window, axis
from tracepipe.reports.report import FROM, UNTIL, Drawing, Report, Result
from tracepipe.store.run import Layer, Run
from tracepipe.store.schema import INSTANT, NO_BEGIN
from tracepipe.units import agree, counted, duration_ns, duration_text, known_id

_CELLS_MIN = 20
_COLUMNS_MAX = 10_000
# The most layers of hooks that get separate rows.
_HOOKS_MAX = 64
# The rows of a thread from top to bottom: title, and layer of the run.
_LAYERS = (
    ("CUDA API", "userspace"),
    ("hooks", "hook"),
    ("syscalls", "syscall"),
    ("driver", "kernel"),
    ("scheduler", "scheduler"),
    ("memory", "memory"),
    ("transfers", "transfer"),
)


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `tracepipe timeline`."""

    start: Annotated[str, FROM] = ""
    end: Annotated[str, UNTIL] = ""
    depth: Annotated[int, Option("Draw calls inside calls on at most N rows of each layer.", "N")] = 3
    threads: Annotated[int, Option("Draw the N busiest threads; 0: all.", "N")] = 8
    streams: Annotated[int, Option("Draw the N busiest streams of the GPUs; 0: all.", "N")] = 64
    width: Annotated[int, Option("Draw N columns; 0: as wide as the terminal.", "N")] = 0


def run(run: Run, options: Options) -> Result:
    """The timeline of one recording."""
    start_ns, end_ns = _window(run, options)
    notes: list[str] = []
    threads = [*_threads(run, start_ns, end_ns, options, notes)]
    groups = [*threads, *_gpus(run, start_ns, end_ns, options)]
    if rows := _losses(run, start_ns, end_ns):
        groups.append(Group("lost events", rows))
    if not any(group.rows for group in groups):
        notes.append("no events in this window")

    def draw(columns: int, ascii_only: bool) -> Iterator[str]:
        cells = max(_CELLS_MIN, min(options.width or columns, _COLUMNS_MAX) - LABEL_COLUMNS)
        return _draw(groups, Window(start_ns, end_ns, cells), run.facts.start_ns, ascii_only)

    base_ns = run.facts.start_ns

    def data() -> dict[str, Any]:
        # Whoever reads the first groups alone gets the GPUs too.
        ordered = [*threads[:1], *groups[len(threads) :], *threads[1:]]
        drawn = ({"title": g.title, "rows": (row.as_json(base_ns) for row in g.rows)} for g in ordered)
        return {"start_ns": start_ns - base_ns, "end_ns": end_ns - base_ns, "groups": drawn}

    return Result("", [Drawing("timeline", draw, data)], notes)


def _window(run: Run, options: Options) -> tuple[int, int]:
    """The window of the options, in trace ns; without options, from the first event to the last end."""
    base_ns = run.facts.start_ns
    layers = [run.layer(name) for name in (*(name for _, name in _LAYERS), "gpu_kernel", "gpu_thread")]
    firsts = [int(layer.start_ns[0]) for layer in layers if len(layer)]
    firsts += [] if run.warp_table.first_ns is None else [run.warp_table.first_ns]
    start_ns = base_ns + duration_ns(options.start) if options.start else min(firsts, default=base_ns)
    end_ns = base_ns + duration_ns(options.end) if options.end else run.facts.end_ns
    if (options.start or options.end) and start_ns >= end_ns:
        raise empty_stretch(start_ns - base_ns, end_ns - base_ns, run.facts.end_ns - base_ns)
    return start_ns, max(end_ns, start_ns + 1)


@dataclass(frozen=True, slots=True)
class _Drawn:
    """The events of a layer that are drawn: those in the window, of shapes that have a track. `tracks` has
    the number of the thread or stream of each shape, NONE where it is not drawn; its shape is `(shapes,)`.
    """

    run: Run
    name: str
    start_ns: int
    end_ns: int
    tracks: Ints

    def rows(self) -> tuple[Layer, Int64s, Ints]:
        """The layer, the rows of it that are drawn, and their tracks."""
        layer = self.run.layer(self.name)
        tracks = self.tracks[layer.shape]
        inside = (layer.start_ns <= self.end_ns) & (layer.end_ns >= self.start_ns)
        rows = np.flatnonzero(inside & (tracks != NONE))
        return layer, rows, tracks[rows]

    def counts(self, count: int) -> Int64s:
        """How many events each of `count` tracks has. Shape `(count,)`."""
        return np.bincount(self.rows()[2], minlength=count)

    def strips(self, level: Callable[[Layer, Int64s], Any], levels: int) -> dict[int, dict[int, _Strip]]:
        """By track, then by level below `levels`: the slices and the instants of that level, in order."""
        layer, rows, tracks = self.rows()
        at, kind = level(layer, rows), layer.kind[rows]
        code = (tracks.astype(np.int64) * levels + at) * 2 + ((kind == INSTANT) | (kind == NO_BEGIN))
        shown, shapes = at < levels, self.run.shapes
        found: dict[int, dict[int, _Strip]] = {}
        for number, own in RowsByNumber(code[shown], rows[shown]):
            track, at = divmod(number // 2, levels)
            spans = Spans(layer.start_ns, layer.end_ns, lambda of: shapes.texts("name", layer.shape[of]), own)
            found.setdefault(track, {}).setdefault(at, ([], []))[number % 2].append(spans)
        return found


_Strip = tuple[list[Spans], list[Spans]]


def _every(run: Run) -> Int32s:
    """The numbers of all shapes."""
    return np.arange(len(run.shapes), dtype=np.int32)


def _threads(run: Run, start_ns: int, end_ns: int, options: Options, notes: list[str]) -> Iterator[Group]:
    every = _every(run)
    of_shape, first = number_rows(run.shapes.column("pid", every), run.shapes.column("tid", every))
    by_host = np.where(run.shapes.column("gpu", every) == NONE, of_shape, NONE)
    tracks = [(name, by_host if name == "transfer" else of_shape) for _, name in _LAYERS]
    counts: Int64s = np.zeros(len(first), np.int64)
    for name, of in tracks:
        counts += _Drawn(run, name, start_ns, end_ns, of).counts(len(first))
    # Threads are in the order of their ids.
    shown, left_out = _busiest(counts, options.threads)
    shown = np.sort(shown)
    if more := len(left_out):
        words = "thread|threads with fewer events is|are not drawn: --threads 0 draws all"
        notes.append(counted(more, words))
    is_shown = np.zeros(len(first), np.bool_)
    is_shown[shown] = True
    depth, deeper, layers = max(options.depth, 0), 0, []
    hooked = np.zeros(0, np.int64)
    for name, of in tracks:
        drawn = _Drawn(run, name, start_ns, end_ns, np.where(is_shown[of] & (of != NONE), of, NONE))
        layer, rows, _ = drawn.rows()
        deeper += int(np.count_nonzero(layer.depth[rows] >= depth))
        if name == "hook":
            hooked, own, more = _own_layers(drawn)
            layers.append(drawn.strips(*_levels_of_hooks(own, len(hooked), depth)))
            if more:
                notes.append(counted(more, "layer|layers of hooks with fewer events is|are not drawn"))
        else:
            layers.append(drawn.strips(*_levels(run, name, depth)))
    # Those without an id are last.
    ids = {thread: run.shapes.ids_of(int(first[thread])) for thread in shown.tolist()}
    for thread in sorted(ids, key=lambda of: [(number is None, number or 0) for number in ids[of]]):
        pid, tid = ids[thread]
        called = run.thread_name(pid, tid) or run.process_name(pid)
        ids_text = "" if known_id(tid) is None else f" thread {tid}" + ("" if pid == tid else f" of {pid}")
        group = Group(f"{called}{ids_text}")
        for (title, name), strips in zip(_LAYERS, layers, strict=True):
            for level, (spans, instants) in strips.get(thread, {}).items():
                label = _label(title, level)
                if name == "hook":
                    own, at = divmod(level, depth)
                    label = _label(run.shapes.value("layer", int(hooked[own])), at)
                group.rows.append(Strip(label, spans, instants))
        yield group
    if deeper:
        words = "call|calls is|are nested too deep to be drawn: --depth draws more rows"
        notes.append(counted(deeper, words))


def _busiest(counts: Int64s, most: int) -> tuple[Int64s, Int64s]:
    """The tracks that have events, at most `most`, or all with 0, those with the most events first if there
    are more; and the other tracks.
    """
    there = np.flatnonzero(counts)
    if 0 < most < len(there):
        there = there[np.argsort(-counts[there], kind="stable")]
        return there[:most], there[most:]
    return there, there[:0]


def _levels(run: Run, name: str, depth: int) -> tuple[Callable[[Layer, Int64s], Any], int]:
    """A function that returns the levels of rows of a layer, and how many levels are drawn."""
    if name == "scheduler":
        is_running = run.shapes.column("name", _every(run)) == run.shapes.number_of("name", RUNNING)
        return lambda layer, rows: np.where(is_running[layer.shape[rows]], 0, 1), 2
    deepest = int(run.layer(name).depth.max(initial=0))
    return lambda layer, rows: layer.depth[rows].astype(np.int64), min(depth, deepest + 1)


def _levels_of_hooks(own: Ints, count: int, depth: int) -> tuple[Callable[[Layer, Int64s], Any], int]:
    """The same for hooks: a row for each level of each of `count` layers; `own` has each shape's layer."""

    def level(layer: Layer, rows: Int64s) -> Int64s:
        at, of = layer.depth[rows].astype(np.int64), own[layer.shape[rows]]
        return np.where((at < depth) & (of < count), of * depth + at, count * depth)

    return level, count * depth


def _own_layers(hooks: _Drawn) -> tuple[Any, Any, int]:
    """The layers of hooks that are drawn (the busiest, in the order of their first events); for each shape
    the index of its layer among them, or their number if it is not among them; and how many others there are.
    """
    numbers = hooks.run.shapes.column("layer", _every(hooks.run))
    own, first = number_rows(~numbers.astype(np.int64))
    layer, rows, _ = hooks.rows()
    shown, others = _busiest(np.bincount(own[layer.shape[rows]], minlength=len(first)), _HOOKS_MAX)
    shown = np.sort(shown)
    drawn_at = np.full(len(first), len(shown), np.int64)
    drawn_at[shown] = np.arange(len(shown))
    return numbers[first[shown]], drawn_at[own], len(others)


def _label(title: str, level: int) -> str:
    if title == "scheduler":
        return "scheduler" if level else "running"
    return f"  inside {level}" if level else title


def _gpus(run: Run, start_ns: int, end_ns: int, options: Options) -> Iterator[Group]:
    streams, others = _streams(run, start_ns, end_ns, options.streams)
    warps = _warps(run, start_ns, end_ns)
    # The entries and exits of single threads.
    layer = run.layer("gpu_thread")
    of_shape = run.shapes.numbers("gpu", _every(run), 0)
    rows_in = np.flatnonzero((layer.start_ns >= start_ns) & (layer.start_ns <= end_ns))
    threads = {
        gpu: Spans(layer.start_ns, layer.end_ns, lambda of: [None] * len(of), some)
        for gpu, some in RowsByNumber(of_shape[layer.shape[rows_in]], rows_in)
    }
    about = run.facts.gpus()
    for gpu in sorted({*streams, *warps, *threads}):
        rows = [*streams.get(gpu, [])]
        if gpu in warps:
            rows.append(Strip("warps", [warps[gpu]], level=True))
        if gpu in threads:
            rows.append(Strip("threads", instants=[threads[gpu]]))
        yield Group(f"GPU {gpu} {about.get(gpu, {}).get('name', '')}".rstrip(), rows)
    if others is not None:
        yield others


def _streams(run: Run, start_ns: int, end_ns: int, most: int) -> tuple[dict[int, list[Strip]], Group | None]:
    """GPU → its streams: the `most` busiest of all GPUs; and one group for all others."""
    every = _every(run)
    gpu, stream = (run.shapes.numbers(key, every, 0) for key in ("gpu", "stream"))
    of_shape, first = number_rows(gpu, stream)
    on_gpu = np.where(run.shapes.column("gpu", every) == NONE, NONE, of_shape)
    layers = (("gpu_kernel", of_shape), ("transfer", on_gpu))
    counts = np.sum(
        [_Drawn(run, name, start_ns, end_ns, of).counts(len(first)) for name, of in layers], axis=0
    )
    _, left_out = _busiest(counts, most)
    # The others share one track after those of the streams.
    track = np.arange(len(first) + 1, dtype=np.int32)
    track[left_out], track[NONE] = len(first), NONE
    found: dict[int, _Strip] = {}
    for name, of in layers:
        strips = _Drawn(run, name, start_ns, end_ns, track[of]).strips(
            lambda _, rows: np.zeros(len(rows), np.int64), 1
        )
        for at, ((spans, instants),) in ((at, levels.values()) for at, levels in strips.items()):
            both = found.setdefault(at, ([], []))
            both[0].extend(spans)
            both[1].extend(instants)
    others, _ = found.pop(len(first), ([], []))
    streams: dict[int, list[Strip]] = {}
    for at, (spans, instants) in sorted(found.items()):
        strip = Strip(f"stream {stream[first[at]]}", spans, instants)
        streams.setdefault(int(gpu[first[at]]), []).append(strip)
    title = f"{len(left_out):,} other {agree(len(left_out), 'stream|streams')}, with less work"
    together = Group(f"{title}: --streams 0 draws all", [Strip("work", others, level=True)])
    return streams, together if len(left_out) else None


def _warps(run: Run, start_ns: int, end_ns: int) -> dict[int, Spans]:
    """GPU → its warps that ran in the window."""
    table = run.warp_table
    entry_ns, last_ns = table.times_ns(slice(0, len(table)), run.facts.end_ns)
    _, has_exit = table.column("last_exit_ns")
    rows = np.flatnonzero((entry_ns <= end_ns) & ((last_ns >= start_ns) | ~has_exit))
    gpu, has_gpu = table.column("gpu", rows)

    def names(tracks: Ints) -> list[str | None]:
        numbers, is_named = table.column("name", tracks)
        known = zip(numbers.tolist(), is_named.tolist(), strict=True)
        return [table.launches.name(number) if named else None for number, named in known]

    own = RowsByNumber(np.where(has_gpu, gpu, 0), rows)
    return {gpu: Spans(entry_ns, last_ns, names, tracks) for gpu, tracks in own}


def _losses(run: Run, start_ns: int, end_ns: int) -> list[Strip]:
    """A row for each layer that lost events, by name; losses of an unknown layer are the last row."""
    losses = run.loss_columns
    texts = [*dict.fromkeys(layer for layer in losses["layer"] if layer is not None)]
    layers = np.array([NONE if layer is None else texts.index(layer) for layer in losses["layer"]], np.int64)
    counts, starts_ns = (np.array(losses[name], np.int64) for name in ("count", "start_ns"))
    ends_ns = starts_ns + np.array([dur_ns or 0 for dur_ns in losses["dur_ns"]], np.int64)
    is_inside = (starts_ns <= end_ns) & (ends_ns >= start_ns)

    def names(rows: Ints) -> list[str | None]:
        return [f"lost {count}" for count in counts[rows].tolist()]

    def strip(track: int, label: str) -> Strip:
        spans = Spans(starts_ns, ends_ns, names, np.flatnonzero(is_inside & (layers == track)))
        return Strip(label, [spans], [spans])

    tracks = [*sorted(range(len(texts)), key=texts.__getitem__), NONE]
    strips = (strip(track, "unknown" if track == NONE else texts[track]) for track in tracks)
    return [one for one in strips if len(one.spans[0].rows)]


def _draw(groups: list[Group], window: Window, base_ns: int, ascii_only: bool) -> Iterator[str]:
    glyphs = ASCII if ascii_only else UNICODE
    blank = " " * LABEL_COLUMNS
    cell_ns = (window.end_ns - window.start_ns) / window.cells
    length = duration_text(window.end_ns - window.start_ns)
    start = duration_text(window.start_ns - base_ns)
    yield f"{length}, starting at {start}; a cell is {duration_text(cell_ns)}"
    yield blank + axis(window, base_ns)
    for group in groups:
        if group.rows:
            yield group.title
        yield from (row.draw(window, glyphs) for row in group.rows)
    yield f"{glyphs.shades[0]}…{glyphs.shades[-1]}  share of the cell that short slices cover"
    yield f"{glyphs.instant}    one instant or more"
    if any(row.level for group in groups for row in group.rows):
        bars = f"{glyphs.bars[0]}…{glyphs.bars[-1]}"
        yield f"{bars}  how many run at a time, mean over a cell; {glyphs.at_most}N: the most at a time"


REPORT = Report("timeline", Options, run)
