"""Reads what Triton's Proton recorded inside of kernels, in its own form of Chrome's trace JSON.

    {"traceEvents": [{"ph":"X","name":"load","cat":"matmul","pid":"matmul Core7 CTA2","tid":"warp 3 (line 0)",
                              scope          kernel        kernel, SM, block         warp
        "ts":1.234,"dur":0.5,"args":{"Frequency (MHz)":1000.0,"Init Time (ns)":…,"call_stack":[…]}}, …]}

The times of a block are cycles of its SM, as if each took 1 ns, after the time of %globaltimer at which the
block began. Without `Frequency (MHz)` they are those of %globaltimer. Lines are for viewers: a warp's scopes
are its ranges. Events come block by block. The same block may come again, from another launch of the kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Final

import numpy as np
import orjson

from tracepipe.event.columns import NONE, SPECIAL, SourceBatch, event_columns
from tracepipe.event.model import INDEX_LIMIT, SM_LIMIT, TIME_LIMIT_NS, Header, Problem, Record, cut_text
from tracepipe.event.tables import Tables
from tracepipe.event.warps import Others, Warps
from tracepipe.readers.json_elements import JsonElements, events_of, ns_of
from tracepipe.readers.recording import FirstProblems, Recording, Unusable
from tracepipe.readers.sorted_rows import Rows, SortedRow, row_sorter
from tracepipe.units import counted

CYCLES: Final = "cycles"
_GLOBALTIMER: Final = "globaltimer:0"
_FREQUENCY, _BEGAN, _ENDED = "Frequency (MHz)", "Init Time (ns)", "Finalization Time (ns)"
_BLOCK = re.compile(r"(.*) Core(\d{1,5}) CTA(\d{1,9})", re.DOTALL)
_WARP = re.compile(r"warp (\d{1,4}) \(line \d+\)")
_SNIFFED = re.compile(
    rb'"pid"\s*:\s*"(?:[^"\\]|\\.)* Core\d+ CTA\d+"\s*,\s*"tid"\s*:\s*"warp \d+ \(line \d+\)"'
)
_TREE = re.compile(rb'\s*\[\s*\{\s*"children"\s*:.*"frame"\s*:\s*\{', re.DOTALL)
# The most that a block may have. Events after these are read as another life of its warps.
_EVENTS_MAX: Final = 1 << 16
_NAMES_MAX: Final = 1 << 21
_KERNELS_MAX: Final = 1 << 12
# The most warps of a batch, and the most text of their scopes, which take many times that much as numbers.
_WARPS_AT_ONCE: Final = 1 << 10
_BATCH_BYTES: Final = 1 << 18
_THREADS: Final = 32
_YEAR_NS: Final = 365 * 86_400 * 10**9
# So that times are possible when the least one has become 0.
_LATEST_NS: Final = TIME_LIMIT_NS // 2 - _YEAR_NS


@dataclass(slots=True)
class _Block:
    """Scopes of a block so far: name, begin and length of each, by warp."""

    key: tuple[Any, ...]
    args: dict[str, Any]
    warps: dict[int, list[tuple[int, int, str]]] = field(default_factory=dict)
    count: int = 0
    names_length: int = 0
    last_warp: int = -1

    @property
    def is_full(self) -> bool:
        """Whether the block has the most that it may have."""
        return self.count >= _EVENTS_MAX or self.names_length >= _NAMES_MAX


class _Trace:
    """Turns one trace into batches of warps, in the order of time."""

    def __init__(self, stream: BinaryIO) -> None:
        self._rows = row_sorter()
        self._block: _Block | None = None
        self._warps_of: dict[str, int] = {}
        self._tables = Tables()
        """By kernel: how many warps its blocks have, as far as was seen."""
        self._problems = FirstProblems()
        self._flows = self._first_ns = 0
        self.is_of_cycles = False
        elements = JsonElements(stream)
        if elements.begin():
            for batch in elements.batches():
                faults = list(batch.faults)
                for place, text, event in (
                    one for at, whole in batch.texts() for one in events_of(whole, at)
                ):
                    try:
                        if type(event) is str:
                            faults.append((place, event))
                        else:
                            self._add_event(event, text)
                    except Unusable as e:
                        faults.append((place, f"{e.field}: {e.message}"))
                self._problems.add(*map(batch.problem, sorted(faults)))
        if elements.rest:
            self._problems.add(Problem(0, "", elements.rest))
        self._put_away()

    def _add_event(self, event: dict[str, Any], text: bytes) -> None:
        """Add an event. Raises Unusable."""
        phase = event.get("ph")
        if phase == "M":
            return
        if phase != "X":
            raise Unusable("ph", f"{str(phase)[:8]!r} is not a phase that is read inside kernels")
        block, warp = _BLOCK.fullmatch(str(event.get("pid"))), _WARP.fullmatch(str(event.get("tid")))
        if block is None or int(block[2]) > SM_LIMIT:
            raise Unusable("pid", "is not a kernel with its SM and block")
        if warp is None:
            raise Unusable("tid", "is not a warp")
        ts_ns, dur_ns = (ns_of(event.get(key), key, text) for key in ("ts", "dur"))
        if ts_ns is None or abs(ts_ns) > _LATEST_NS:
            raise Unusable("ts", "is not a time that a trace can have")
        if dur_ns is None or not 0 <= dur_ns <= _YEAR_NS:
            raise Unusable("dur", "is not a time that a trace can have")
        if not isinstance(event.get("name"), str):
            raise Unusable("name", "is missing, or is not a string")
        self._add(event, block, int(warp[1]), (ts_ns, dur_ns, cut_text(event["name"])))

    def _add(
        self, event: dict[str, Any], found: re.Match[str], warp: int, scope: tuple[int, int, str]
    ) -> None:
        """Add a scope to its block. If the block's arguments differ, it is a new block."""
        args = event.get("args")
        args = args if type(args) is dict else {}
        self.is_of_cycles |= _FREQUENCY in args
        self._flows += event.get("flow_out") is True
        block = self._block
        # Asynchronous events follow the block's warps, and do not have its times.
        is_of_block = event.get("cat") in ("async", "flow") and _BEGAN not in args and _ENDED not in args
        key = (found[0], args.get(_BEGAN), args.get(_ENDED))
        is_same = block is not None and (
            block.key[0] == found[0] if is_of_block else block.key == key and warp >= block.last_warp
        )
        if block is None or not is_same or block.is_full:
            self._put_away()
            block = self._block = _Block(key, args)
        block.warps.setdefault(warp, []).append(scope)
        block.count += 1
        block.names_length += len(scope[2])
        if not is_of_block:
            block.last_warp = warp
        self._first_ns = min(self._first_ns, scope[0])

    def _put_away(self) -> None:
        """Add the warps of the block to the rows that are sorted."""
        block, self._block = self._block, None
        if block is None:
            return
        found = _BLOCK.fullmatch(block.key[0])
        assert found is not None
        name, sm, number = self._tables.long_names.cut(found[1]), int(found[2]), int(found[3])
        known = {key: value for key, value in block.args.items() if key != _FREQUENCY}
        launched = orjson.dumps({"name": name, "args": known})
        if name in self._warps_of or len(self._warps_of) < _KERNELS_MAX:
            self._warps_of[name] = max(self._warps_of.get(name, 0), 1 + max(block.warps))
        for warp, scopes in block.warps.items():
            scopes.sort(key=lambda scope: (scope[0], -scope[1]))
            entry_ns = scopes[0][0]
            life_ns = max(ts_ns + dur_ns for ts_ns, dur_ns, _ in scopes) - entry_ns
            columns = [sm, number, warp, *([*column] for column in zip(*scopes, strict=True))]
            self._rows.add(SortedRow(entry_ns, 0, life_ns, 0, launched, orjson.dumps(columns)))

    def recording(self) -> Recording:
        """The recording of the warps."""
        clock = CYCLES if self.is_of_cycles else _GLOBALTIMER
        header = Header(clock=clock, clocks=[clock], engine="Triton Proton, inside of kernels")
        return Recording(header, self._batches(), self._tables)

    # Batches --------------------------------------------------------------------------------------------

    def _batches(self) -> Iterator[SourceBatch]:
        """Batches of consecutive warps of one kernel, as many as fit, with the problems."""
        problems = [*self._problems.pop(), *self._stated()]
        for rows in self._rows.in_order():
            at = 0
            while at < len(rows):
                end, size_bytes = at + 1, len(rows.second[at])
                while end < min(len(rows), at + _WARPS_AT_ONCE) and rows.first[end] == rows.first[at]:
                    size_bytes += len(rows.second[end])
                    if size_bytes > _BATCH_BYTES:
                        break
                    end += 1
                yield self._batch(rows, at, end, problems)
                at, problems = end, []
        if problems:
            yield SourceBatch(event_columns([]), problems=problems)

    def _batch(self, rows: Rows, at: int, end: int, problems: list[Problem]) -> SourceBatch:
        launched: Record = {"type": "gpu_warp", "gpu": 0, **orjson.loads(rows.firsts[rows.first[at]])}
        warps_of_block = self._warps_of.get(launched["name"], 0)
        if warps_of_block:
            launched["block"] = [_THREADS * warps_of_block, 1, 1]
        stated = [orjson.loads(text) for text in map(rows.second.__getitem__, range(at, end))]
        ts_ns = int(rows.ts_ns[at]) - self._first_ns
        entry_ns = rows.ts_ns[at:end] - rows.ts_ns[at]
        ranges: dict[str, int] = {}
        names = [ranges.setdefault(name, len(ranges)) for one in stated for name in one[5]]
        columns = {
            "warp": [min(one[1] * max(warps_of_block, 1) + one[2], INDEX_LIMIT) for one in stated],
            "sm": [one[0] for one in stated],
            "range_count": [len(one[3]) for one in stated],
            "range_name": names,
            "range_clk": [ts - one[3][0] for one in stated for ts in one[3]],
            "range_dur_clk": [dur for one in stated for dur in one[4]],
        }
        warps = Warps(
            launched=launched,
            ts_ns=ts_ns,
            entry_ns=entry_ns,
            exit_ns=rows.dur_ns[at:end],
            exit_clk=rows.dur_ns[at:end],
            ranges=list(ranges),
            **{key: np.array(values, np.int64) for key, values in columns.items()},
        )
        events = event_columns([(ts_ns, SPECIAL, 0, 0, 0, None, NONE)])
        return SourceBatch(events, Others([warps]), problems)

    def _stated(self) -> Iterator[Problem]:
        if self.is_of_cycles:
            words = "times are cycles of an SM, drawn as if each took 1 ns"
            yield Problem(0, "ts", f"{words}: a clock shows only when blocks began", skipped=False)
        if self._first_ns:
            words = f"times begin {-self._first_ns} ns before 0: this is added to all of them"
            yield Problem(0, "ts", words, skipped=False)
        if self._flows:
            words = counted(self._flows, "flow|flows between warps is|are not drawn")
            yield Problem(0, "flow_out", words, skipped=False)
        yield from self._problems.rest("object|objects cannot be read")


def sniff(head: bytes) -> bool:
    """Whether content has events of warps."""
    return b'"traceEvents"' in head and _SNIFFED.search(head) is not None


def is_tree(head: bytes) -> bool:
    """Whether content is Proton's other form, Hatchet's tree."""
    return _TREE.match(head) is not None


def read(stream: BinaryIO) -> Recording:
    """The recording in a stream, which is read to its end first."""
    return _Trace(stream).recording()
