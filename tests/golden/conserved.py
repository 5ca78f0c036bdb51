"""What stands in a file is in what is made of it, by the real trace processor, or the command counts it."""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import polars as pl
from hypothesis import settings
from hypothesis import strategies as st

from tests.cli.test_output import piped
from tests.golden.asked import OWN_COUNTERS
from tests.support.cores import cores_here, running
from tests.support.trace_processor import RealTraceProcessor

MORE = 1 if settings.default is None or settings.default.derandomize else 10
"""How many times as many examples `make explore` tries."""
LATEST_NS, FAR_NS = (1 << 62) - 1, 1 << 50
"""The latest time that a recording may have."""


class Slice(NamedTuple):
    """A slice, or an instant, whose length is 0. `dur_ns` is None where the input has no end of it."""

    name: str
    ts_ns: int
    dur_ns: int | None = 0


@dataclass(slots=True)
class Made:
    """A file, and what it has. `skipped` are the records that no reader could use."""

    name: str
    content: bytes | Callable[[Path], object] = b""
    slices: list[Slice] = field(default_factory=list)
    counts: list[tuple[int, float]] = field(default_factory=list)
    skipped: int = 0

    def write(self, folder: Path) -> Path:
        """Write the file."""
        path = folder / self.name
        if isinstance(self.content, bytes):
            path.write_bytes(self.content)
        else:
            self.content(path)
        return path


# Beyond what was recorded, a trace has what tracepipe states and the lives of warps, and shows
# kernels and ranges once more in summaries.
_SLICES = """
select s.name, s.ts, s.dur, s.category from slice s join track t on t.id = s.track_id
left join thread_track using (id) left join thread using (utid)
where s.category not in ('tracepipe', 'summary')
and coalesce(thread.name, t.name, '') not glob '*: annotations of *'
and not (s.category = 'warp' and s.name glob '* block * warp *')"""
_RAN = "select 'running' as name, ts, dur from sched join thread using (utid) where tid > 0"
_WOKEN = """
select 'wakeup' as name, ts, 0 as dur from thread_state where waker_utid is not null
union all select 'wakeup', ts, 0 from spurious_sched_wakeup"""
_UNREAD = re.compile(r": (\d+) (?:records?|rows?) (?:is|are) not read$")
_IN_ALL = re.compile(r"(\d+) lines? skipped in all$")
_NOT_DRAWN = re.compile(
    r"note: (\d+) (?:slices? overlaps? too many|events? (?:is|are) not drawn"
    r"|calls?, kernels? or cop\w+ (?:is|are) in two recordings and drawn once)"
)


class Said(NamedTuple):
    """What a command said: its exit code, its words, and how many records it could not use or draw."""

    code: int
    words: str
    skipped: int
    not_drawn: int


def said(*command: object) -> Said:
    """Run a command."""
    code, _, words = piped([*map(str, command)])
    assert "Traceback" not in words
    skipped = not_drawn = of_file = 0
    before = ""
    for whole in words.splitlines():
        rank, line = whole.split(": ", 1) if whole.startswith("rank ") else ("", whole)
        if rank != before:
            skipped, of_file, before = skipped + of_file, 0, rank
        of_file += line.startswith("skipped: ")
        if found := _IN_ALL.search(line):  # of the file, whose first ones are listed
            of_file = int(found[1])
        if line.startswith("placed: "):  # the last line of a file
            skipped, of_file = skipped + of_file, 0
        skipped += int(found[1]) if (found := _UNREAD.search(line)) else 0
        not_drawn += int(found[1]) if (found := _NOT_DRAWN.match(line)) else 0
    return Said(code, words, skipped + of_file, not_drawn)


def drawn(trace: Path) -> tuple[Counter[Slice], Counter[tuple[int, float]]]:
    """The slices of a trace, and the values of its counters."""
    content = trace.read_bytes()
    is_json = content.startswith(b"{")
    base_ns = json.loads(content)["otherData"]["base_ns"] if is_json else 0
    with RealTraceProcessor(content) as tp:
        assert tp.problems() == [], tp.problems()
        rows = [row for sql in (_SLICES, _RAN, _WOKEN) for row in tp.rows(sql)]
        values = tp.rows(f"select ts, value from counter {OWN_COUNTERS}")
    for row in rows:
        name = row["name"] or ""
        # Of JSON it keeps an escape, and makes up a name.
        row["name"] = name.replace("\\n", "\n").replace("[No name]", "") if is_json else name
    slices = (Slice(row["name"], base_ns + row["ts"], row["dur"]) for row in rows)
    return Counter(slices), Counter((base_ns + row["ts"], row["value"]) for row in values)


def assert_drawn(
    trace: Path,
    outcome: Said,
    wanted: Iterable[Slice],
    known: Iterable[Slice],
    values: Iterable[tuple[int, float]],
) -> None:
    """All `wanted` slices and values are in a trace, or the command has counted them as not drawn; and every
    slice of the trace is `known`.
    """
    assert outcome.code == 0, outcome.words
    slices, counts = drawn(trace)
    wanted_ones, known_ones = Counter(wanted), Counter(known)
    missing, more = wanted_ones - slices, slices - known_ones
    any_length = Counter(Slice(one.name, one.ts_ns, None) for one in more.elements())
    missing, more = missing - any_length, any_length - known_ones
    assert missing.total() == outcome.not_drawn, (missing, more, outcome.words)
    assert more == Counter(), (missing, more, outcome.words)
    assert Counter(values) - counts == Counter(), outcome.words


def assert_converted(makers: list[Made], core: str, to: str = "perfetto") -> Said:
    """Convert files as one timeline, by one of the implementations of the inner loops."""
    slices = [one for made in makers for one in made.slices]
    with tempfile.TemporaryDirectory() as folder, running(core):
        paths = [made.write(Path(folder)) for made in makers]
        if any(one.ts_ns + (one.dur_ns or 0) > FAR_NS for one in slices):
            to = "perfetto"  # Chrome's times are floats of microseconds
        trace = Path(folder, f"out.{to}")
        offsets = [word for path in paths if paths[1:] for word in ("--offset", f"{path.name}=0")]
        outcome = said("convert", *paths, *offsets, "-f", to, "-o", trace)
        assert_drawn(trace, outcome, slices, slices, [one for made in makers for one in made.counts])
        assert outcome.skipped == sum(made.skipped for made in makers), outcome.words
        return outcome


def assert_cut(made: Made, at_ns: int, core: str) -> None:
    """Cut a file in two, and convert the parts. Each has all that overlaps it, and nothing unknown."""
    with tempfile.TemporaryDirectory() as folder, running(core):
        path = made.write(Path(folder))
        for start_ns, end_ns in ((0, at_ns), (at_ns, LATEST_NS + 1)):
            part, trace = Path(folder, f"{start_ns}.jsonl"), Path(folder, f"{start_ns}.pftrace")
            stretch = ("--from", f"@{start_ns}", *(("--to", f"@{end_ns}") if end_ns == at_ns else ()))
            outcome = said("cut", path, *stretch, "-o", part)
            assert (outcome.code, outcome.skipped) == (0, made.skipped), outcome.words
            inside = [
                one
                for one in made.slices
                if one.ts_ns < end_ns
                and (one.ts_ns >= start_ns or one.dur_ns is None or one.ts_ns + one.dur_ns > start_ns)
            ]
            values = [(ts_ns, value) for ts_ns, value in made.counts if start_ns <= ts_ns < end_ns]
            assert_drawn(trace, said("convert", part, "-o", trace), inside, made.slices, values)


_LAYERS = ("annotations", "calls", "hooks", "scheduler", "kernels", "memory", "transfers", "ranges")


def assert_built(makers: list[Made], core: str) -> None:
    """Build a dataset of files, each of which is a rank: its tables have all slices, and nothing else."""
    with tempfile.TemporaryDirectory() as folder, running(core):
        paths = [made.write(Path(folder)) for made in makers]
        outcome = said("dataset", "build", *paths, "-o", Path(folder, "ds"))
        assert (outcome.code, outcome.skipped) == (0, sum(made.skipped for made in makers)), outcome.words
        assert f"({len(makers)} written, 0 unchanged, 0 left out)" in outcome.words
        for made in makers:
            tables = [
                pl.read_parquet(file)
                for layer in _LAYERS
                for file in Path(folder, "ds", f"layer={layer}").glob(f"host=*/rank={made.name[0]}/*.parquet")
            ]
            rows = [row for table in tables for row in table.iter_rows(named=True)]
            wanted = Counter(made.slices)
            found = Counter(Slice(row["name"], row["start_ns"], row["dur_ns"] or 0) for row in rows)
            missing, more = wanted - found, found - wanted
            any_length = Counter(one._replace(dur_ns=None) for one in more.elements())
            assert (missing - any_length, any_length - missing) == (Counter(), Counter()), made


formats = st.sampled_from(["perfetto", "perfetto", "chrome"])
cores = st.sampled_from(cores_here())
