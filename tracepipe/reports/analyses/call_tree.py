"""All that happened in one call, as a tree: calls, system calls, driver functions, sleep, the GPU."""

from __future__ import annotations

from typing import Any

from tracepipe.event.vocabulary import RUNNING
from tracepipe.reports.analyses.breakdown import numbered, on_gpu
from tracepipe.reports.frames.intervals import Stretches
from tracepipe.reports.frames.libraries import np, pl
from tracepipe.reports.frames.nesting import nearest_of
from tracepipe.reports.frames.run import Run
from tracepipe.reports.report import Column, Table

# Layers from the outermost in: of two that start together, the first encloses the other.
_RANKS = {"call": 0, "syscall": 1, "driver": 2, "off-CPU": 3, "scheduler": 4, "GPU": 5}
Item = tuple[int, int | None, str, str]
"""Start, end (None of an instant), layer, name."""

_COLUMNS = ("pid", "tid", "start_ns", "end_ns", "kind", "name")


def tree_of(run: Run, call: dict[str, Any], is_scheduled: bool, top: int) -> tuple[Table, int]:
    """The tree of a row of `numbered(run)`, and how many lines beyond `top` are left out (0: none are).

    `is_scheduled`: the recording tells when threads run.
    """
    items = _on_thread(run, call)
    if is_scheduled:
        items += _off_cpu(run, call)
    items.sort(key=lambda item: (item[0], _RANKS[item[2]], -(item[1] or item[0])))
    lines = _lines(items, call["start_ns"])
    for name, start_ns, end_ns, gpu, stream in _on_gpu(run, call["row"]):
        length_ns = end_ns - start_ns
        where = f"{name} (GPU {gpu or 0} stream {stream or 0})"
        lines.append((where, "GPU", start_ns - call["start_ns"], length_ns, length_ns, 0))
    shown = lines[:top] if top > 0 else lines
    columns = (
        Column("name", "what"),
        Column("layer", "layer"),
        Column("at_ns", "at", "ns"),
        Column("dur_ns", "length", "ns"),
        Column("itself_ns", "itself", "ns"),
        Column("depth", "depth", "count", spare=True),
    )
    rows = [("  " * depth + name, *rest, depth) for name, *rest, depth in shown]
    note = "Times from the start of the call. itself: less what stands under it."
    return Table("tree", "In this call", columns, rows, note), len(lines) - len(shown)


def _same_thread(call: dict[str, Any]) -> pl.Expr:
    same = pl.lit(True)
    for key in ("pid", "tid"):
        same &= pl.col(key).is_null() if call[key] is None else pl.col(key) == call[key]
    return same


def _on_thread(run: Run, call: dict[str, Any]) -> list[Item]:
    """What began in the call on its thread; ends beyond the call's are cut to it."""
    end_ns = call["end_ns"]
    began = _same_thread(call) & pl.col("start_ns").is_between(call["start_ns"], end_ns)
    began &= (pl.col("name") != RUNNING) & (pl.col("kind") != "no_begin")
    inside = numbered(run).filter(nearest_is(run, call["row"]))
    names = {"syscall": "syscall", "driver": "kernel", "scheduler": "scheduler"}
    frames = {"call": inside} | {layer: run.some(name, *_COLUMNS) for layer, name in names.items()}
    items: list[Item] = []
    for layer, frame in frames.items():
        rows = frame.filter(began).select("start_ns", "end_ns", "kind", "name").iter_rows()
        items += [
            (start, None if kind == "instant" else min(end, end_ns), layer, name)
            for start, end, kind, name in rows
        ]
    return items


def nearest_is(run: Run, row: int) -> pl.Series:
    """Which rows of `run.calls` are that row or inside it."""
    parents = run.layer("userspace").parent
    return pl.Series(nearest_of(parents, np.arange(len(parents)) == row) == row)


def _off_cpu(run: Run, call: dict[str, Any]) -> list[Item]:
    running = run.some("scheduler", *_COLUMNS).filter(_same_thread(call) & (pl.col("name") == RUNNING))
    gaps = Stretches(running["start_ns"].to_numpy(), running["end_ns"].to_numpy()).gaps()
    items: list[Item] = []
    for start_ns, end_ns in zip(gaps.start_ns.tolist(), gaps.end_ns.tolist(), strict=True):
        start_ns, end_ns = max(start_ns, call["start_ns"]), min(end_ns, call["end_ns"])
        if start_ns < end_ns:
            items.append((start_ns, end_ns, "off-CPU", "off-CPU"))
    return items


def _on_gpu(run: Run, row: int) -> list[tuple[Any, ...]]:
    inside = nearest_is(run, row).arg_true()
    work = on_gpu(run).filter(pl.col("call").is_in(inside.to_list()))
    return work.select("name", "start_ns", "end_ns", "gpu", "stream").rows()


def _lines(items: list[Item], base_ns: int) -> list[tuple[Any, ...]]:
    """A line for each item: name, layer, start, length, length less what is inside, depth."""
    lines: list[list[Any]] = []
    around: list[tuple[int, int]] = []  # end and line of those that are open
    for start_ns, end_ns, layer, name in items:
        while around and around[-1][0] <= start_ns:
            around.pop()
        length_ns = None if end_ns is None else end_ns - start_ns
        if around and length_ns is not None:
            # A thread may sleep on beyond the end of what it was in when it began to.
            lines[around[-1][1]][4] -= min(end_ns or 0, around[-1][0]) - start_ns
        lines.append([name, layer, start_ns - base_ns, length_ns, length_ns, len(around)])
        if end_ns is not None:
            around.append((end_ns if not around else min(end_ns, around[-1][0]), len(lines) - 1))
    return [tuple(line) for line in lines]
