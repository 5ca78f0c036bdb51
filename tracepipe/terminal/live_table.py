"""Formats the totals of a recording as lines of text, which `tracepipe live` draws and leaves behind.

3.20 s   412,034 events   129k/s   ./vec_add -n 1000
userspace 204,331 (64.1k/s) · syscall 201,201 (63.0k/s) · scheduler 6,502 (2.03k/s)
nothing lost
layer      function         count  per s    total      p50  …   histogram
userspace  cuLaunchKernel     600  2.29k  2.51 ms  2.75 µs  …     █▄▁▁▁
thread         tid  running  %  switches  sleeping  preempted  for a processor
standin-gpu  24142  46.3 ms 18       909   25.2 ms    50.3 ms          5.31 ms
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tracepipe.printable import printable
from tracepipe.tracer.live.totals import FOR_A_PROCESSOR, PREEMPTED, FunctionTotal, Snapshot, ThreadTotal
from tracepipe.units import agree, counted, duration_text, size_text, three_digits

SORTS = ("total", "count", "rate")
# Powers of four from 256 ns to 4.3 s. Each is the first duration of a column after the first one.
_EDGES_NS = tuple(1 << bits for bits in range(8, 34, 2))
_HISTOGRAM_HEAD = "  1µs  1ms  1s"  # the column under each name begins there, within 8%
_BARS = " ▁▂▃▄▅▆▇█"
_NAME_COLUMNS = 24  # other columns are left out until a name has this width
_GAP = 2
_THREADS_SHOWN = 6


@dataclass(frozen=True, slots=True)
class View:
    """The part of a snapshot to show: at most `top` functions, in `width` columns, optionally `ascii_only`.
    Rates count from the snapshot `before`; None: from the start.
    """

    title: str
    sort: str = "total"
    top: int | None = None
    width: int = 200
    ascii_only: bool = False
    before: Snapshot | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the view; `kind` is "", "title", "head" (of a table) or "loss"."""

    text: str
    kind: str = ""


@dataclass(frozen=True, slots=True)
class _Cells:
    """A column: cells below a name. `spare`: the order in which columns are left out; 0: never."""

    name: str
    cells: Sequence[str]
    spare: int = 0
    is_text: bool = False

    @property
    def width(self) -> int:
        return max(len(self.name), max(map(len, self.cells), default=0))


def view_lines(snapshot: Snapshot, view: View) -> list[Line]:
    """The whole view; no line is wider than the view."""
    made = [*_head(snapshot, view)]
    functions = ordered(snapshot, view)
    shown = functions[: view.top]
    if shown:
        made += _table(_function_columns(shown, snapshot, view), view.width)
    if len(functions) > len(shown):
        made.append(Line(f"and {counted(len(functions) - len(shown), 'more function|functions')}"))
    if snapshot.threads:
        made += _table(_thread_columns(snapshot), view.width)
        if len(snapshot.threads) > _THREADS_SHOWN:
            rest = _by_time(snapshot)[_THREADS_SHOWN:]
            running = duration_text(sum(thread.running_ns for thread in rest))
            made.append(Line(f"and {counted(len(rest), 'more thread|threads')}, which ran {running}"))
    return [Line(_shown(line.text, view), line.kind) for line in made]


def functions_that_fit(height: int, snapshot: Snapshot) -> int:
    """How many functions fit into `height` lines, with the threads below."""
    threads = len(snapshot.threads)
    below = min(threads, _THREADS_SHOWN) + (threads > 0) + (threads > _THREADS_SHOWN)
    above = 3 + bool(snapshot.allocated or snapshot.copied)
    return max(3, height - above - 2 - below)


def ordered(snapshot: Snapshot, view: View) -> list[FunctionTotal]:
    """The functions in the order of the view."""
    before = _counts_before(view)
    keys: dict[str, Callable[[FunctionTotal], int]] = {
        "total": lambda total: total.latencies.total_ns,
        "count": lambda total: total.count,
        "rate": lambda total: total.count - before.get((total.layer, total.name), 0),
    }
    key = keys[view.sort]
    return sorted(snapshot.functions, key=lambda total: (-key(total), -total.count, total.name))


def _head(snapshot: Snapshot, view: View) -> Iterator[Line]:
    """Elapsed time and events; events by layer; losses."""
    elapsed_ns = max(1, snapshot.now_ns - snapshot.start_ns)
    events = sum(snapshot.counts.values())
    stated = f"{events:,} {agree(events, 'event|events')}"
    numbers = f"{duration_text(elapsed_ns)}   {stated}   {_rate(events, elapsed_ns)}/s"
    yield Line(f"{numbers}   {view.title}", "title")
    before = view.before.counts if view.before else {}
    passed_ns = _passed_ns(snapshot, view)
    layers = [*snapshot.layers, *(name for name in snapshot.counts if name not in snapshot.layers)]
    counts = {layer: snapshot.counts.get(layer, 0) for layer in layers}
    rates = {layer: _rate(count - before.get(layer, 0), passed_ns) for layer, count in counts.items()}
    text = " · ".join(f"{layer} {count:,} ({rates[layer]}/s)" for layer, count in counts.items())
    if len(text) > view.width:
        text = " · ".join(f"{layer} {count:,}" for layer, count in counts.items())
    yield Line(text)
    losses = ", ".join(f"{count:,} {layer}" for layer, count in snapshot.losses.items() if count)
    text = f"lost: {losses}" if losses else "nothing lost"
    if unmeasured := snapshot.unmeasured:
        text += f" · {unmeasured:,} {agree(unmeasured, 'call|calls')} counted without a latency"
    yield Line(text, "loss" if losses else "")
    if snapshot.allocated or snapshot.copied:
        yield Line(_memory_text(snapshot))


def _memory_text(snapshot: Snapshot) -> str:
    """How much was allocated and copied; from the GPU's own records if no call states it."""
    by_calls = {name: one for name, one in snapshot.copied.items() if not name.endswith("(GPU)")}
    parts = []
    for what, found in (("allocated", snapshot.allocated), ("copied", by_calls or snapshot.copied)):
        if not found:
            continue
        size = size_text(sum(one.size_bytes for one in found.values()))
        text = f"{what} {size} in {sum(one.count for one in found.values()):,}"
        if len(found) > 1:
            each = (f"{name} {size_text(one.size_bytes)}" for name, one in found.items())
            text += f" ({', '.join(each)})"
        parts.append(text)
    return ("at least " if snapshot.is_memory_partial else "") + " · ".join(parts)


def _function_columns(functions: list[FunctionTotal], snapshot: Snapshot, view: View) -> list[_Cells]:
    before, passed_ns = _counts_before(view), _passed_ns(snapshot, view)
    measured = [total.latencies if total.latencies.count else None for total in functions]
    rates = [_rate(total.count - before.get((total.layer, total.name), 0), passed_ns) for total in functions]
    sizes = [size_text(total.size_bytes) if total.size_bytes else "" for total in functions]
    columns = [
        _Cells("layer", [total.layer for total in functions], 3, is_text=True),
        _Cells("function", [printable(total.name) for total in functions], is_text=True),
        _Cells("count", [f"{total.count:,}" for total in functions]),
        _Cells("per s", rates, 4),
        *([_Cells("bytes", sizes, 5)] if any(sizes) else []),
        _Cells("total", [duration_text(m.total_ns) if m else "" for m in measured]),
        _Cells("p50", [duration_text(m.percentile_ns(50)) if m else "" for m in measured]),
        _Cells("p95", [duration_text(m.percentile_ns(95)) if m else "" for m in measured], 6),
        _Cells("max", [duration_text(m.max_ns) if m else "" for m in measured]),
    ]
    if any(total.open_count for total in functions):
        now_ns = snapshot.now_ns
        # `2 for 3.20 s`: the number of open calls, and how long the oldest has taken so far.
        progress = [
            f"{total.open_count} for {duration_text(max(0, now_ns - total.oldest_ns))}"
            if total.open_count
            else ""
            for total in functions
        ]
        columns.append(_Cells("in progress", progress, 5))
    if any(total.unmeasured for total in functions):
        unmeasured = [f"{total.unmeasured:,}" if total.unmeasured else "" for total in functions]
        columns.append(_Cells("no latency", unmeasured, 2))
    if not view.ascii_only:
        bars = [_bars(m.spread(_EDGES_NS)) if m else "" for m in measured]
        columns.append(_Cells(_HISTOGRAM_HEAD, bars, 1, is_text=True))
    return columns


def _by_time(snapshot: Snapshot) -> list[ThreadTotal]:
    return sorted(snapshot.threads, key=lambda thread: -thread.running_ns)


def _thread_columns(snapshot: Snapshot) -> list[_Cells]:
    threads = _by_time(snapshot)[:_THREADS_SHOWN]
    elapsed_ns = max(1, snapshot.now_ns - snapshot.start_ns)
    reasons = {reason for thread in threads for reason in thread.waits}
    last = [reason for reason in (PREEMPTED, FOR_A_PROCESSOR) if reason in reasons]
    waits = [*sorted(reasons - set(last), reverse=True), *last]  # sleeping before disk
    names = [f"{one.ended} {one.name}" if one.ended else one.name or "?" for one in threads]
    columns = [
        _Cells("thread", [printable(name) for name in names], is_text=True),
        _Cells("pid", [str(thread.pid or "") for thread in threads], 1),
        _Cells("tid", [str(thread.tid or "") for thread in threads]),
        _Cells("running", [duration_text(thread.running_ns) for thread in threads]),
        _Cells("%", [f"{100 * thread.running_ns / elapsed_ns:.0f}" for thread in threads]),
        _Cells("switches", [f"{thread.switches:,}" for thread in threads], 3),
    ]
    for wait in waits:
        cells = [duration_text(thread.waits[wait]) if wait in thread.waits else "" for thread in threads]
        columns.append(_Cells(wait, cells, 2 if wait == PREEMPTED else 4))
    return columns


def _table(columns: list[_Cells], width: int) -> Iterator[Line]:
    """Rows under a head. Without enough room, columns are left out and names cut, never numbers."""
    name = next(column for column in columns if column.is_text and not column.spare)

    def columns_for_name(shown: list[_Cells]) -> int:
        return width - sum(column.width + _GAP for column in shown if column is not name)

    shown = columns
    while (
        columns_for_name(shown) < min(name.width, _NAME_COLUMNS)
        and (spare := min((c for c in shown if c.spare), key=lambda c: c.spare, default=None)) is not None
    ):
        shown = [column for column in shown if column is not spare]
    name_width = max(8, min(name.width, columns_for_name(shown)))
    for row in range(-1, len(name.cells)):
        cells = []
        for column in shown:
            cell = column.name if row < 0 else column.cells[row]
            if column is name and len(cell) > name_width:
                cell = cell[: name_width - 1] + "…"
            columns_wide = name_width if column is name else column.width
            cells.append(cell.ljust(columns_wide) if column.is_text else cell.rjust(columns_wide))
        yield Line((" " * _GAP).join(cells)[:width].rstrip(), "head" if row < 0 else "")


def _bars(counts: list[int]) -> str:
    """A bar for each count, in eighths of the highest; a count above 0 is always visible."""
    most = max(counts)
    return "".join(_BARS[-(-8 * count // most)] if count else " " for count in counts) if most else ""


def _counts_before(view: View) -> dict[tuple[str, str], int]:
    before = view.before
    return {(total.layer, total.name): total.count for total in before.functions} if before else {}


def _passed_ns(snapshot: Snapshot, view: View) -> int:
    since_ns = view.before.now_ns if view.before else snapshot.start_ns
    return max(1, snapshot.now_ns - since_ns)


def _rate(count: int, passed_ns: int) -> str:
    """The rate per second with three digits: `64.1k`."""
    rate = count * 1e9 / passed_ns
    for letter, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if rate >= size * 0.9995:
            return three_digits(rate / size) + letter
    return three_digits(rate) if rate < 10 and count else f"{rate:.0f}"


def _shown(text: str, view: View) -> str:
    """Text that is safe for a terminal, as names come from the recorded program."""
    text = printable(text)
    if view.ascii_only:
        text = text.replace("µ", "u").replace("·", "-").replace("…", "~")
        text = text.encode("ascii", "replace").decode()
    return text if len(text) <= view.width else text[: view.width - 1] + ("~" if view.ascii_only else "…")
