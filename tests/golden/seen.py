"""What a person should see of a recording: plain tracks, slices, flows and counts, from the operations.

`replay` is the reference of the tests in this folder. It takes the items of `layout/timeline.py` at their
word, and shares no code with the writers but how a `Drawn` is read one by one: what the trace processor says
of their output must be equal to it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, BinaryIO

from tracepipe.converters import CONVERTERS
from tracepipe.converters.writer import TraceInfo
from tracepipe.layout.timeline import BEGIN, COUNTER, END, INSTANT, Drawn, Item, Track
from tracepipe.printable import printable

Path = tuple[str, ...]


@dataclass(slots=True)
class SeenSlice:
    """A slice, or an instant, which has no length. `args` are flat: `grid[0]`, `decoded.nr`.

    `stacked` counts the instants of the same time right before an instant: Perfetto draws each one row lower
    than the last, so that none hides another.
    """

    ts_ns: int
    dur_ns: int
    name: str
    depth: int
    category: str = ""
    args: dict[str, Any] = field(default_factory=dict)
    stacked: int = 0
    instant: bool = False

    def shown(self) -> str:
        """One line; arguments in the order of their names, which is not the files' matter."""
        args = "".join(f" {key}={value!r}" for key, value in sorted(self.args.items()))
        where = f"{self.ts_ns} +{self.dur_ns} depth {self.depth + self.stacked}"
        return f"{where} [{self.category}] {self.name!r}{args}"


# Which slice: its track's path, and its place among the slices of that track.
SliceId = tuple[Path, int]
Flow = tuple[str, str]
_STARTS_WITH_A_TIME = re.compile(r" *-?\d+ ( -?\d\S*$|\+ *\d+  | {10}  )")


class _Empty(str):
    """The text of a value that holds nothing: `[]`, `{}` or `null`, and not of a text that is such."""

    __slots__ = ()


_INT_MAX = (1 << 63) - 1


@dataclass(slots=True)
class Seen:
    """Everything that is drawn. Tracks may share a path: each is a list of its own."""

    slices: list[tuple[Path, list[SeenSlice]]] = field(default_factory=list)
    counters: list[tuple[Path, list[tuple[int, float]]]] = field(default_factory=list)
    flows: Counter[Flow] = field(default_factory=Counter)

    def as_json_says(self) -> Seen:
        """The same less what Chrome's JSON cannot say: Perfetto drops values that hold nothing, leaves
        escapes as they are, and has no integers beyond 63 bits in JSON, which are written as text.
        """
        for _, slices in self.slices:
            for one in slices:
                one.name = _json_value(one.name)
                one.args = {
                    key: _json_value(value) for key, value in one.args.items() if type(value) is not _Empty
                }
        return self

    def lines(self) -> list[str]:
        """All of it as text, in an order of its own: what differs shows in the diff of an assert."""
        out = []
        for path, slices in self.slices:
            out += [f"{' / '.join(path)}: {one.shown()}" for one in _numbered(slices)]
        for path, values in self.counters:
            # 16 digits: the trace processor's own reader of JSON is off by one in the 17th.
            out += [f"{' / '.join(path)}: at {ts_ns} = {float(value):.16g}" for ts_ns, value in values]
        out += [f"{start} → {end} x{count}" for (start, end), count in self.flows.items()]
        return sorted(out)


def _json_value(value: Any) -> Any:
    if type(value) is int and value > _INT_MAX:
        return str(value)
    if not isinstance(value, str):
        return value
    # Perfetto v52 undoes escapes only where a quote is escaped. A backslash at the end is written by its code
    # point, as it refuses a file with another there.
    raw = json.dumps(value, ensure_ascii=False)[1:-1]
    if '"' in value:
        return value
    return raw[:-2] + "\\u005c" if value.endswith("\\") else raw


class _Numbered:
    """A slice with its place on the track, so that two equal ones are distinct."""

    def __init__(self, at: int, one: SeenSlice) -> None:
        self._at, self._one = at, one

    def shown(self) -> str:
        return f"#{self._at:05} {self._one.shown()}"


def _numbered(slices: list[SeenSlice]) -> list[_Numbered]:
    return [_Numbered(at, one) for at, one in enumerate(slices)]


def slice_id(path: Path, at: int, one: SeenSlice) -> str:
    """The words for the end of a flow."""
    return f"{' / '.join(path)} #{at:05} {one.name!r} at {one.ts_ns}"


def flat(args: dict[str, Any]) -> dict[str, Any]:
    """Arguments as Perfetto keeps them: one value a key, and nothing for None."""
    out: dict[str, Any] = {}
    for key, value in args.items():
        if value is not None:
            _flatten(key, value, out)
    return out


def _flatten(key: str, value: Any, out: dict[str, Any]) -> None:
    if (not value and isinstance(value, dict | list)) or value is None:
        out[key] = _Empty(json.dumps(value))  # as text, since Perfetto has no value for it
    elif isinstance(value, dict):
        for inner, item in value.items():
            _flatten(f"{key}.{inner}", item, out)
    elif isinstance(value, list):
        for at, item in enumerate(value):
            _flatten(f"{key}[{at}]", item, out)
    else:
        out[key] = value


Step = Track | Item
"""What a writer gets: a track that exists from here on, or has a new name, or an operation."""


class Replay:
    """A writer that keeps what is drawn, and can say what it means."""

    def __init__(self, out: BinaryIO, info: TraceInfo) -> None:
        self.info = info
        self.steps: list[Step] = []

    def write(self, drawn: Drawn) -> None:
        """Keep what a batch draws, as long as its numbers mean something."""
        self.steps += drawn.declared
        self.steps += drawn.items()

    def forget(self, *, shapes: bool) -> None:
        """Nothing that is kept has numbers."""

    def finish(self) -> None:
        """Nothing is left to write."""

    def seen(self) -> Seen:
        """What these operations draw."""
        return replay(self.steps)


class ReplayFormat:
    """Keeps what an `OutputFormat` is given; `writer` is that of the conversion."""

    writer: Replay
    of = "timeline"

    def __init__(self, to: str = "text") -> None:
        self.has_switches = CONVERTERS[to].has_switches
        self.has_loads = CONVERTERS[to].has_loads
        self.has_summaries = CONVERTERS[to].has_summaries
        self.takes_several = CONVERTERS[to].takes_several

    def open(self, out: BinaryIO, info: TraceInfo) -> Replay:
        """The writer."""
        self.writer = Replay(out, info)
        return self.writer


def path_of(track: Track, named: Mapping[int, Track]) -> Path:
    """The labels from the root to a track, with the names that tracks have at last."""
    labels: list[str] = []
    at: Track | None = track
    while at is not None:
        labels.insert(0, named[at.id].label())
        at = at.parent
    return tuple(labels)


def replay(steps: Iterable[Step], *, may_lack_starts: bool = False) -> Seen:
    """What a timeline draws, by its contract: a stable sort by time makes each track nest. `may_lack_starts`:
    a recording may have ends of flows alone.
    """
    named: dict[int, Track] = {}
    by_track: dict[int, list[Item]] = {}
    items: list[Item] = []
    for step in steps:
        if isinstance(step, Track):
            assert step.parent is None or step.parent.id in named, "declared before its parent"
            named[step.id] = step
            by_track.setdefault(step.id, [])
        else:
            by_track[step.track.id].append(step)
            items.append(step)
    seen = Seen()
    names: dict[int, str] = {}
    for track_id, own in by_track.items():
        own.sort(key=lambda item: item.ts_ns)
        track = named[track_id]
        path = path_of(track, named)
        if track.kind == "counter":
            assert {item.kind for item in own} <= {COUNTER}
            seen.counters.append((path, [(item.ts_ns, item.name) for item in own]))
        elif own:
            seen.slices.append((path, _nest(path, own, track.category, names)))
    seen.flows = _flows(items, names, may_lack_starts=may_lack_starts)
    return seen


def _nest(path: Path, items: list[Item], category: str, names: dict[int, str]) -> list[SeenSlice]:
    """The slices of one track; `names` gets the words for each item that begins one."""
    drawn: list[SeenSlice] = []
    stack: list[SeenSlice] = []
    before: SeenSlice | None = None
    for item in items:
        kind, _, ts_ns, name, args, _ = item
        if kind != INSTANT:
            before = None
        if kind == END:
            assert stack, f"an end without a begin on {path}"
            ended = stack.pop()
            ended.dur_ns = ts_ns - ended.ts_ns
            ended.args |= flat(args or {})
            continue
        assert kind in (BEGIN, INSTANT)
        one = SeenSlice(ts_ns, 0, name, len(stack), category, flat(args or {}))
        names[id(item)] = slice_id(path, len(drawn), one)
        drawn.append(one)
        if kind != INSTANT:
            stack.append(one)
            continue
        one.instant = True
        if before is not None and before.ts_ns == ts_ns:
            one.stacked = before.stacked + 1
        before = one
    assert not stack, f"{len(stack)} slices without an end on {path}"
    return drawn


def _flows(items: Iterable[Item], names: dict[int, str], *, may_lack_starts: bool) -> Counter[Flow]:
    """Flows go from each slice of a flow to the next one in time."""
    through: dict[int, list[str]] = {}
    started: set[int] = set()
    for item in sorted(items, key=lambda item: item.ts_ns):
        for flow in item.flows:
            through.setdefault(abs(flow), []).append(names[id(item)])
            started |= {-flow} if flow < 0 else set()
    assert may_lack_starts or started == set(through), "a flow without a start"
    return Counter(pair for steps in through.values() for pair in pairwise(steps))


def lines_by_track(text: str) -> list[tuple[Path, list[str]]]:
    """The lines of `--format text` under each track that has any, less their indent."""
    found: list[tuple[Path, list[str]]] = []
    path: Path = ()
    for line in text.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        if _STARTS_WITH_A_TIME.match(line):
            found[-1][1].append(line[2 * len(path) :])
            continue
        name = line.strip().removeprefix("process ").removeprefix("thread ")
        path = (*path[:depth], _without_unit(name))
        found.append((path, []))
    return [(path, lines) for path, lines in found if lines]


def _without_unit(name: str) -> str:
    """The name of a counter without what it is in; some names end so themselves."""
    return re.sub(r" \[[\w %/.]+\]$", "", name)


def starts_of_lines(seen: Seen, base_ns: int) -> list[tuple[Path, list[str]]]:
    """What each of those lines must start with: time, length, name. Arguments and flows follow."""
    out = []
    for path, slices in seen.slices:
        starts = []
        for one in slices:
            dur = "" if one.instant else f"+{one.dur_ns:>9}"
            starts.append(f"{one.ts_ns - base_ns:>12} {dur:<10}  {'  ' * one.depth}{printable(one.name)}")
        out.append((path, starts))
    for path, values in seen.counters:
        bare = (*path[:-1], _without_unit(path[-1]))
        out.append((bare, [f"{ts_ns - base_ns:>12}  {value}" for ts_ns, value in values]))
    return out
