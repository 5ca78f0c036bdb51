"""Where the program was while a GPU was idle: the innermost range, the line of Python, and the state of the
thread that launched the next work.

    GPU            ████            idle             ████
    thread     ├─ step ────────────────────────────────────┤
                      ├─ load ──────┤                         75% in load, 25% in step
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from tracepipe.analyses.breakdown import HOOKED, PYTHON_FUNCTIONS
from tracepipe.analyses.cuda_calls import values_by_names
from tracepipe.analyses.gpu_by_line import called_by
from tracepipe.analyses.host_samples import HostSamples, Pieces, place_of
from tracepipe.analyses.host_states import STATES, UNKNOWN, HostStates, Spent
from tracepipe.analyses.idle_gaps import BETWEEN, KEYS, IdleGaps
from tracepipe.analyses.nesting import nearest_of, nearest_of_some, open_at
from tracepipe.analyses.steps import is_loading, is_step, loading_by_stacks, steps_of
from tracepipe.event.columns import NONE, Bools, Int64s, Ints
from tracepipe.event.groups import RowsByNumber, number_rows, run_starts, sums_by
from tracepipe.event.intervals import nothing
from tracepipe.event.stacks import Frame
from tracepipe.event.vocabulary import OPERATORS, PYTHON_LAYERS
from tracepipe.store.python_stacks import frame_of
from tracepipe.store.run import LayerRows, Run
from tracepipe.store.schema import INSTANT, NO_BEGIN
from tracepipe.units import counted

# Functions of a framework: `aten::add_, seq = 5`, `CudnnConvolutionBackward0`.
_OPERATOR: Final = re.compile(r"\w+(::\w+)+([ ,:(].*)?|\w+Backward\d*(, .*)?")
_NUMBER: Final = re.compile(r"\d{1,9}$")


@dataclass(frozen=True, slots=True)
class IdlePlaces:
    """The idle time of GPUs in pieces, as columns of shape `(pieces,)`.

    `gap` is a row of the gaps. `range` is the number of the name of the innermost range that is no operator,
    and in no range in which data is loaded; `line` is an index into `lines`; NONE where there is none.
    `state`, `call` and `syscall` are as in `HostStates.of`. `loads`: its stack says that it takes its
    next batch of data. The pieces of a gap add up to its length.
    """

    gap: Ints
    range: Ints
    line: Ints
    state: Ints
    call: Ints
    syscall: Ints
    dur_ns: Int64s
    loads: Bools
    lines: list[str]
    are_sampled: bool = False
    """Whether the lines are of samples of the threads' stacks."""

    def doing(self) -> Spent:
        """The time of each gap by what the CPU did: the columns gap, state, call, syscall and dur_ns."""
        keys = {key: getattr(self, key) for key in ("gap", *KEYS)}
        of, first = number_rows(*keys.values())
        sums_ns = sums_by(of, self.dur_ns, len(first))
        return {key: column[first] for key, column in keys.items()} | {"dur_ns": sums_ns}

    def name(self, run: Run, row: int) -> str | None:
        """The line of a piece, else its range; None where it has neither."""
        if self.line[row] != NONE:
            return self.lines[int(self.line[row])]
        return None if self.range[row] == NONE else run.shapes.text(int(self.range[row]))

    def sums(self, run: Run, rows: Ints) -> list[Place]:
        """The time of some pieces by range and line, the longest first. Steps count as one range."""
        of, first = number_rows(self.range[rows], self.line[rows])
        sums_ns = sums_by(of, self.dur_ns[rows], len(first))
        found: dict[tuple[str | None, str | None], int] = {}
        for row, sum_ns in zip(rows[first].tolist(), sums_ns.tolist(), strict=True):
            number, line = int(self.range[row]), int(self.line[row])
            name = None if number == NONE else run.shapes.text(number)
            place = name and family(name), None if line == NONE else self.lines[line]
            found[place] = found.get(place, 0) + sum_ns
        order = sorted(found.items(), key=lambda one: (-one[1], str(one[0])))
        return [Place(*place, idle_ns) for place, idle_ns in order]


class Place(NamedTuple):
    """A range and a line, and the time for which a GPU was idle there; None for no range and no line."""

    range: str | None
    line: str | None
    idle_ns: int


def with_others(places: list[Place], most: int) -> list[Place]:
    """The first `most` places, or all for 0, and the sum of the others; if that is only one, it is itself
    there.
    """
    if not 0 < most < len(places) - 1:
        return places
    others = places[most:]
    name = counted(len(others), "other|others")
    return [*places[:most], Place(name, None, sum(one.idle_ns for one in others))]


def family(name: str) -> str:
    """The name of a range; of a step that of all steps, `ProfilerStep#…`."""
    return _NUMBER.sub("…", name) if is_step(name) else name


class _Slices:
    """Slices of threads, of which some are wanted: the innermost wanted one around a time."""

    def __init__(
        self, run: Run, table: str, wanted: Bools, whole: tuple[Ints, list[Any]] | None = None
    ) -> None:
        """`wanted` flags shapes. In slices whose shape has a true value in `whole`, none is wanted."""
        layer = run.layer(table)
        self._layer, self._wanted = layer, wanted[layer.shape] & (layer.kind != INSTANT)
        self._wanted &= layer.kind != NO_BEGIN
        if whole is not None and any(whole[1]):
            is_whole = np.array(whole[1], np.bool_)[whole[0]][layer.shape]
            around = np.append(nearest_of(layer.parent, is_whole), NONE)[layer.parent]
            self._wanted &= around == NONE
        rows = np.flatnonzero(self._wanted)
        of_thread, _ = run.shapes.threads
        self._of_thread = RowsByNumber(of_thread[layer.shape[rows]], rows)
        self.any = len(rows) > 0

    def edges_ns(self, thread: int) -> Int64s:
        """The times at which the innermost one of a thread changes. Shape `(n,)`, not sorted."""
        rows = self._of_thread.of(thread)
        return np.concatenate([self._layer.start_ns[rows], self._layer.end_ns[rows]])

    def around(self, thread: int, at_ns: Int64s) -> Int64s:
        """The row of the innermost one around each time, NONE without one. Shapes `(n,)`."""
        found = np.full(len(at_ns), NONE, np.int64)
        for some, row in open_at(self._layer, self._of_thread.of(thread), at_ns):
            first = self._wanted[row] & (found[some] == NONE)
            found[some[first]] = row[first]
        return found


def idle_places(run: Run, gaps: IdleGaps, states: HostStates) -> IdlePlaces:
    """Split gaps by what the thread was in that launched the next work; after the last work, the thread that
    launched that. Where the next work was launched before the gap, or its call is not known, ranges and lines
    are of the thread that has the steps. The line is of samples of the thread's stack, else of Python's
    functions where they are recorded as slices, else of the launch call.
    """
    finder, called = _Finder(run), _called_rows(run, gaps)
    found: list[tuple[Any, ...]] = [(*(np.zeros(0, np.int64),) * 7, np.zeros(0, np.bool_))]
    for own, place, launching in _by_thread(run, gaps):
        gap, start_ns, end_ns, range_, line, loads = finder.pieces(place, gaps, own)
        if launching == NONE:
            state = np.full(len(gap), STATES.index(UNKNOWN)), np.full(len(gap), NONE), np.full(len(gap), NONE)
            found.append((gap, range_, line, *state, end_ns - start_ns, loads))
            continue
        spent = states.of(run.shapes.ids_of(int(called.shape[own[0]])), start_ns, end_ns)
        piece = spent["stretch"]
        if states.hooked == PYTHON_FUNCTIONS:  # the line says more than the outermost of them
            spent["call"][spent["state"] == STATES.index(HOOKED)] = NONE
        doing = (spent[key] for key in (*KEYS, "dur_ns"))
        found.append((gap[piece], range_[piece], line[piece], *doing, loads[piece]))
    names = ("gap", "range", "line", *KEYS, "dur_ns", "loads")
    columns = {name: np.concatenate([one[at] for one in found]) for at, name in enumerate(names)}
    return IdlePlaces(**columns, lines=finder.lines, are_sampled=finder.samples.any)


def _called_rows(run: Run, gaps: IdleGaps) -> LayerRows:
    """The calls that launched the work after some gaps; any call where none is known."""
    return run.layer("userspace").rows(np.maximum(gaps.call, 0), "shape", "end_ns")


def _by_thread(run: Run, gaps: IdleGaps) -> Iterator[tuple[Int64s, int, int]]:
    """The gaps of one GPU by the thread whose ranges and lines count in them, and the one that launched the
    next work; NONE where none is known. Gaps of several GPUs overlap each other, those of one do not.
    """
    calls, main = run.layer("userspace"), steps_of(run).thread
    is_known, called = gaps.call != NONE, _called_rows(run, gaps)
    threads = run.shapes.threads[0]
    launching = np.where(is_known, threads[called.shape], NONE) if len(calls) else np.full(len(gaps), NONE)
    placed = launching
    if main != NONE:
        queued = (
            is_known & (gaps.where == BETWEEN) & (called.end_ns <= gaps.start_ns) if len(calls) else is_known
        )
        placed = np.where(is_known & ~queued, launching, main)
    of, first = number_rows(gaps.gpu, placed, launching)
    for number, own in RowsByNumber(of):
        at = int(first[number])
        yield own, int(placed[at]), int(launching[at])


def idle_stacks(run: Run, gaps: IdleGaps) -> Iterator[tuple[int, Pieces]]:
    """The sampled stacks of the threads in whose places some gaps are, as in `idle_places`. Stretches are the
    gaps of a GPU and a thread.
    """
    samples = HostSamples(run)
    if not samples.any:
        return
    for own, place, _ in _by_thread(run, gaps):
        yield place, samples.pieces(place, gaps.start_ns[own], gaps.end_ns[own])


def is_operator(name: str, domain: str) -> bool:
    """Whether an annotation is an operator of a framework."""
    return _OPERATOR.fullmatch(name) is not None or (domain in OPERATORS and "#" not in name)


def operators(run: Run) -> Bools:
    """Flags the shapes of annotations that are operators of a framework. Shape `(shapes,)`."""
    domains = [run.shapes.number_of("domain", one) for one in sorted(OPERATORS)]
    (of_names, by_name), (of_hashes, has_hash) = (
        values_by_names(run, "annotation", matches)
        for matches in (lambda name: _OPERATOR.fullmatch(name) is not None, lambda name: "#" in name)
    )
    # Old profilers call `ProfilerStep#7`, `enumerate(DataLoader)#…` and `Optimizer.step#…` operators too.
    is_operator = np.isin(run.shapes.column("domain"), domains) & ~np.array(has_hash, np.bool_)[of_hashes]
    found: Bools = is_operator | np.array(by_name, np.bool_)[of_names]
    return found


class _Finder:
    """Finds ranges and lines at times of a thread."""

    def __init__(self, run: Run) -> None:
        self._run, shapes = run, run.shapes
        own = ~operators(run) & (shapes.column("gpu") == NONE)
        self._ranges = _Slices(run, "annotation", own, values_by_names(run, "annotation", is_loading))
        frames_of, frames = values_by_names(run, "hook", frame_of)
        is_python = np.isin(
            shapes.column("layer"), [shapes.number_of("layer", one) for one in sorted(PYTHON_LAYERS)]
        )
        self._frames_of, self._frames = frames_of, frames
        has_frame = np.array([one is not None for one in frames])
        is_user = np.array([one is not None and not one.is_library for one in frames])
        self._functions = _Slices(run, "hook", has_frame[frames_of] & is_python)
        self._own = is_user[frames_of]
        self.samples = HostSamples(run)
        self._of_stack: dict[tuple[int, bool], int] = {}
        self.lines: list[str] = []
        self._numbers: dict[str, int] = {}

    def _line(self, frame: Frame | None) -> int:
        """The number of a frame's line, NONE without a frame."""
        return NONE if frame is None else self._number(str(frame))

    def _number(self, text: str) -> int:
        number = self._numbers.setdefault(text, len(self.lines))
        if number == len(self.lines):
            self.lines.append(text)
        return number

    def pieces(
        self, thread: int, gaps: IdleGaps, own: Int64s
    ) -> tuple[Int64s, Int64s, Int64s, Int64s, Int64s, Bools]:
        """Some gaps, cut where the range or the line of a thread changes: for each piece its gap, start and
        end, the name of the range, the line, and `loads`. Shapes `(pieces,)`.
        """
        start_ns, end_ns = gaps.start_ns[own], gaps.end_ns[own]
        sampled = self.samples.pieces(thread, start_ns, end_ns) if self.samples.any else None
        changes_ns = self._functions.edges_ns(thread) if sampled is None else sampled.start_ns
        loading = loading_by_stacks(self._run).get(thread, nothing())
        edges_ns = np.concatenate([start_ns, self._ranges.edges_ns(thread), changes_ns])
        edges_ns = np.unique(np.concatenate([edges_ns, loading.start_ns, loading.end_ns]))
        gap = np.searchsorted(start_ns, edges_ns, "right") - 1
        inside = (gap >= 0) & (edges_ns < end_ns[gap])
        at_ns, gap = edges_ns[inside], gap[inside]
        range_ = self._names(self._ranges.around(thread, at_ns))
        loads = loading.covered_ns(at_ns, at_ns + 1) > 0
        if sampled is not None:
            line = self._sampled(sampled)[np.searchsorted(sampled.start_ns, at_ns, "right") - 1]
        else:
            line = self._lines(thread, at_ns) if self._functions.any else self._called(gaps.call[own])[gap]
        first = run_starts(gap, range_, line, loads)
        gap, at_ns = gap[first], at_ns[first]
        until_ns = np.minimum(np.append(at_ns[1:], np.iinfo(np.int64).max), end_ns[gap])
        return own[gap], at_ns, until_ns, range_[first], line[first], loads[first]

    def _names(self, rows: Int64s) -> Int64s:
        layer = self._run.layer("annotation")
        names = self._run.shapes.column("name", layer.shape[np.maximum(rows, 0)]) if len(layer) else rows
        found: Int64s = np.where(rows == NONE, NONE, names).astype(np.int64)
        return found

    def _lines(self, thread: int, at_ns: Int64s) -> Int64s:
        """The user's line at some times, else the innermost one."""
        rows, hook = self._functions.around(thread, at_ns), self._run.layer("hook")
        found = np.full(len(rows), NONE, np.int64)
        known = np.flatnonzero(rows != NONE)
        innermost = rows[known]
        own = nearest_of_some(hook.parent, self._own[hook.shape], innermost)
        shown = np.where(own == NONE, innermost, own)
        frames, of = np.unique(self._frames_of[hook.shape[shown]], return_inverse=True)
        lines = np.array([self._line(self._frames[frame]) for frame in frames.tolist()], np.int64)
        found[known] = lines[of] if len(lines) else NONE
        return found

    def _sampled(self, pieces: Pieces) -> Int64s:
        """What a thread executes in each piece."""
        of, first = number_rows(pieces.stack, pieces.waits)
        lines = np.full(len(first), NONE, np.int64)
        for at, row in enumerate(first.tolist()):
            stack, waits = int(pieces.stack[row]), bool(pieces.waits[row])
            if stack != NONE and (stack, waits) not in self._of_stack:
                text = place_of(self._run.stacks, stack, waits=waits)
                self._of_stack[stack, waits] = self._number(text)
            lines[at] = self._of_stack.get((stack, waits), NONE)
        return lines[of]

    def _called(self, calls: Ints) -> Int64s:
        """The user's lines in the stacks of some calls."""
        stacks = self._run.stacks
        numbers, of = np.unique(called_by(self._run, calls), return_inverse=True)
        lines = [NONE] * len(numbers)
        for at, number in enumerate(numbers.tolist()):
            own = int(stacks.own(np.array([number]))[0]) if number >= 0 else NONE
            lines[at] = self._line(stacks.frames[own]) if own >= 0 else NONE
        found: Int64s = np.array(lines, np.int64)[of]
        return found
