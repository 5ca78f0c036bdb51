"""The programs of all ranks of a dataset, and which rows of them are one collective, some steps at a time.

Their rows are copied to a file in which those of a rank follow each other, as Parquet has no order by steps
and is slow to read in parts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any, Final

from tracepipe.analyses.program import WAIT, Program
from tracepipe.analyses.replay import Part, common_steps, mixed
from tracepipe.dataset.clocks_table import Aligned
from tracepipe.dataset.places import Dataset, files_of
from tracepipe.dataset.rank_tables import PROGRAM
from tracepipe.errors import InputError, TracepipeError
from tracepipe.event.columns import NONE, AnyArray, Int64s
from tracepipe.event.groups import RowsByNumber, number_rows
from tracepipe.libraries import np
from tracepipe.store.tables import connect

_MEMORY_MB: Final = 200
_BUILD: Final = "Build the dataset again."
# So many rows are in memory at once, more where all ranks have more in one step, and what is typical is
# learned of so many.
WINDOW_ROWS: Final = 400_000
_LEARNED_ROWS: Final = 1_000_000
_READ_ROWS: Final = 500_000
# Of the step before a window, so many rows of each rank are in it too: others hardly wait for earlier ones.
_OVER_LEAST, _OVER_MOST = 32, 256
# Steps that are learned from are spread as if by chance, as steps may be alike in turns.
_SPREAD, _SPREAD_MOST = 7_919, 10_007
_NARROW: Final = {"what": "tinyint", "step": "integer"}
_WIDTHS: Final = {"tinyint": "i1", "integer": "i4"}
_ROW: Final = np.dtype(
    [(name, _WIDTHS[_NARROW[name]] if name in _NARROW else "i8") for name in PROGRAM]
    + [("loading_ns", "i8"), ("met", "i8"), ("group", "i4"), ("name", "i4"), ("first", "i8"), ("count", "i4")]
)
"""A row of the file. `met` is the same for the rows of one collective, `group` the index of its operation and
process group, `first` where the rows begin that it waits for, and `count` how many these are.
"""
_COLUMNS: Final = (*PROGRAM, "loading_ns", "group", "name", "met")
_AFTER: Final = np.dtype([("earlier", "i4"), ("lag_ns", "i8")])
_NO_COLLECTIVES: Final = """
select null::bigint as rank, null::bigint as "row", '' as operation, '' as process_group, 0 as group_size,
    0 as seq, 0 as nth, 0 as start_ns, 0 as end_ns, true as leaves_together where false
"""
_MET: Final = "leaves_together or (operation = 'send_recv' and group_size = 2)"
_GROUPS: Final = f"""
select operation, process_group, max(coalesce(group_size, 0)) as size,
    min(greatest(end_ns - start_ns, 0)) as shortest_ns,
    row_number() over (order by operation, process_group) - 1 as code
from collectives where {_MET} group by operation, process_group
"""
_NAMES: Final = """
select name, row_number() over (order by name) - 1 as code
from (select distinct name from program where kernel_row <> -1 and name is not null)
"""
# Where a rank has a collective again, so have the others.
_ROWS: Final = f"""
with met as (
    select rank, "row", g.code as "group", coalesce(seq, nth) as number, seq is not null as is_numbered,
        row_number() over (
            partition by rank, operation, process_group, coalesce(seq, nth), seq is not null order by "row"
        ) as again
    from collectives join groups g using (operation, process_group) where ({_MET}) and {{of_ranks}}
)
select program.rank, place,
    {", ".join(f"program.{name}::{_NARROW.get(name, 'bigint')} as {name}" for name in PROGRAM)},
    loading_ns, case when kernel_row <> -1 then names.code end as name, coalesce(len(after), 0) as count,
    "group", number, is_numbered, again
from program left join names on program.name = names.name
left join met on program.rank = met.rank and kernel_row = met."row"
where {{which}} order by program.rank, place
"""
_PAIRS: Final = """
select rank, place, unnest(after) as earlier, unnest(after_lag_ns) as lag_ns from program where {which}
order by rank, place
"""


@dataclass(slots=True, eq=False)
class RankProgram(Program):
    """The program of a rank. `loading_ns` is how much of the host's time before each row data was loaded for.
    `group` is the index of the collective's group, `name` that of the kernel's name, and `place` where the
    first row is in the program of all steps.
    """

    loading_ns: Int64s
    group: Int64s
    name: Int64s
    met: Int64s
    place: int


@dataclass(slots=True, eq=False)
class RankPart(Part):
    """`groups` has for each collective the index of its operation and process group."""

    groups: Int64s


@dataclass(slots=True, eq=False)
class _Rank:
    """A rank: where its rows begin in the file, how many these are, and the first row of each of its steps,
    and past the last. Shape `(steps + 1,)`.
    """

    rank: int
    row: int
    rows: int
    numbers: Int64s
    begins_ns: Int64s | None
    has_calls: bool
    unknown: dict[str, float]
    damaged: InputError
    first: Int64s
    read: int = 0

    def add(self, table: dict[str, Any], earlier: Int64s) -> None:
        """Check the next rows, and count those of each step. Raises InputError where they are damaged."""
        place, step, what = table["place"], table["step"], table["what"]
        is_whole = np.array_equal(place, np.arange(self.read, self.read + len(place)))
        parts = ((earlier, 0, self.rows), (step, NONE, len(self.numbers)), (what, 0, WAIT + 1))
        if not is_whole or not all(((low <= part) & (part < high)).all() for part, low, high in parts):
            raise self.damaged
        inside = np.flatnonzero(step != NONE)
        if not self.first[1:].any():
            # Rows before the first step have none.
            self.first[0] = self.read + (int(inside[0]) if len(inside) else len(step))
        self.first[1:] += np.bincount(step[inside], minlength=len(self.numbers))
        self.read += len(place)

    def close(self) -> None:
        """Sum up, when all rows are added. Raises InputError where some are not there."""
        if self.read != self.rows:
            raise self.damaged
        self.first = self.first.cumsum()

    def over(self, step: int) -> int:
        """How many rows before a step are in its window."""
        first = int(self.first[step])
        return min(first, max(_OVER_LEAST, min(first - int(self.first[max(step - 1, 0)]), _OVER_MOST)))


class _Database:
    """Answers as columns without nulls, which are NONE."""

    def __init__(self, connection: Any) -> None:  # noqa: ANN401
        self.execute, self.close = connection.execute, connection.close

    def columns(self, sql: str) -> dict[str, Any]:
        return {
            name: column.filled(NONE) if isinstance(column, np.ma.MaskedArray) else column
            for name, column in self.execute(sql).fetchnumpy().items()
        }


def _ranks(dataset: Dataset, database: _Database) -> Iterator[_Rank]:
    """The ranks that have a program and steps."""
    counts = dict(database.execute("select rank, count(*) from program group by rank").fetchall())
    steps, row = database.columns("select rank, step, start_ns, end_ns, gpu from steps"), 0
    of_rank = RowsByNumber(steps["rank"])
    for rank in dataset.rank_rows():
        own = of_rank.of(rank.rank)
        if rank.rank not in counts or not len(own):
            continue
        own = own[steps["gpu"][own] == steps["gpu"][own].min()]
        own = own[np.argsort(steps["start_ns"][own], kind="stable")]
        path = str(dataset.part("program", rank.host, rank.rank))
        damaged = InputError("is damaged: its rows do not belong together", _BUILD, path=path)
        try:
            unknown = dict(json.loads(rank.unknown))
        except (TypeError, ValueError):
            raise damaged from None
        begins_ns = np.append(steps["start_ns"][own], steps["end_ns"][own][-1:])
        yield _Rank(
            rank.rank, row, counts[rank.rank], steps["step"][own], None if rank.far_ahead else begins_ns,
            rank.has_calls, unknown, damaged, np.zeros(len(own) + 1, np.int64),
        )  # fmt: skip
        row += counts[rank.rank]


class Programs:
    """The programs of the ranks of a job, by rank: a source of `analyses.replay.Replay`. Raises InputError of
    a damaged file, and TracepipeError without any program. `clocks` has the clock of each rank. A window has
    about `window_rows` rows.
    """

    def __init__(
        self, dataset: Dataset, aligned: Aligned, clocks: dict[int, str], window_rows: int = WINDOW_ROWS
    ) -> None:
        if "program" not in dataset.layers():
            raise TracepipeError("No rank has work of a GPU in a step.", "Record it: capture --gpu kernels.")
        self._rows, self._after = TemporaryFile(), TemporaryFile()  # noqa: SIM115 - as long as this
        with TemporaryDirectory(prefix="tracepipe-ranks-") as folder:
            database = _Database(connect(":memory:", Path(folder), memory_mb=_MEMORY_MB))
            self._read(dataset, database)
            database.close()
        if not self._of:
            raise TracepipeError("No rank has work of a GPU in a step.", "Record it: capture --gpu kernels.")
        self.ranks = [one.rank for one in self._of]
        self.numbers, self.unknown = [one.numbers for one in self._of], [one.unknown for one in self._of]
        self.has_steps = all(len(one.numbers) > 1 for one in self._of)
        self.has_calls = all(one.has_calls for one in self._of)
        self.common = common_steps(self.numbers)
        first = np.concatenate([self._records(one, slice(0, 1)) for one in self._of])
        placed = [aligned.placements.get(clocks[rank]) for rank in self.ranks]
        self.ahead_ns = np.array(
            [
                0 if place is None else place.line.place(call_ns) - call_ns
                for place, call_ns in zip(placed, first["call_ns"].tolist(), strict=True)
            ],
            np.int64,
        )
        last = [self._records(one, slice(one.rows - 1, one.rows)) for one in self._of]
        self.spans_ns: tuple[Int64s, Int64s] = first["from_ns"], np.concatenate(last)["called_ns"]
        """When the programs begin, and their last call ends."""
        begins_ns = first["from_ns"] + self.ahead_ns
        self.ready_ns: Int64s = begins_ns - begins_ns.min()
        self._cuts = self._windows(window_rows)
        self._whole = self._part(0) if len(self._cuts) == 2 else None

    def _read(self, dataset: Dataset, database: _Database) -> None:
        """Copy the rows of all programs to the file, with what belongs to them in other layers."""
        for layer in ("program", "steps", "collectives"):
            folder = dataset.layer(layer).absolute()
            rows = f"select * from {files_of(folder)}" if layer in dataset.layers() else _NO_COLLECTIVES
            database.execute(f"create temp view {layer} as {rows}")
        database.execute(f"create temp table groups as {_GROUPS}")
        database.execute(f"create temp table names as {_NAMES}")
        groups = database.columns("select * from groups order by code")
        self.groups = [*zip(groups["operation"].tolist(), groups["process_group"].tolist(), strict=True)]
        """The operation and the process group of collectives."""
        self._sizes, self._shortest_ns = groups["size"], groups["shortest_ns"]
        self.names: list[str] = database.columns("select name from names order by code")["name"].tolist()
        """The names of kernels, sorted."""
        self._of = [*_ranks(dataset, database)]
        after = 0
        for some, places in self._chunks():
            of_ranks = f"rank in ({', '.join(str(one.rank) for one in some)})"
            which = f"program.{of_ranks} and place between {places.start} and {places.stop - 1}"
            table, pairs = (
                database.columns(sql.format(which=which, of_ranks=of_ranks)) for sql in (_ROWS, _PAIRS)
            )
            for one in some:
                own, its = (
                    slice(*np.searchsorted(rank, [one.rank, one.rank + 1]))
                    for rank in (table["rank"], pairs["rank"])
                )
                one.add({name: column[own] for name, column in table.items()}, pairs["earlier"][its])
            number = mixed(
                *(table[name] for name in ("group", "number", "is_numbered", "again"))
            ) >> np.uint64(1)
            table["met"] = np.where(table["group"] == NONE, NONE, number.astype(np.int64))
            table["first"] = after + np.cumsum(table["count"]) - table["count"]
            after += len(pairs["rank"])
            for file, columns, kinds in ((self._rows, table, _ROW), (self._after, pairs, _AFTER)):
                records = np.empty(len(columns["rank"]), kinds)
                for name in kinds.names or ():
                    records[name] = columns[name]
                records.tofile(file)
        for one in self._of:
            one.close()

    def _chunks(self) -> Iterator[tuple[list[_Rank], range]]:
        """Ranks whose rows are read together, and which rows of each."""
        some, rows = list[_Rank](), 0
        for one in self._of:
            if some and rows + one.rows > _READ_ROWS:
                yield some, range(rows)
                some, rows = [], 0
            if one.rows > _READ_ROWS:
                for at in range(0, one.rows, _READ_ROWS):
                    yield [one], range(at, at + _READ_ROWS)
            else:
                some.append(one)
                rows += one.rows
        if some:
            yield some, range(rows)

    def _windows(self, window_rows: int) -> list[tuple[int, list[int]]]:
        """Where windows begin, and the last one ends: before which of the steps that all ranks have, and
        before which step of each rank.
        """
        common, steps = np.stack(self.common), [len(one.numbers) for one in self._of]
        # Ranks may have steps in different orders.
        is_cut = np.ones(common.shape[1], np.bool_)
        rows = np.zeros(common.shape[1], np.int64)
        for one, own in zip(self._of, common, strict=True):
            is_cut[1:] &= np.maximum.accumulate(own)[:-1] < np.minimum.accumulate(own[::-1])[::-1][1:]
            rows += one.first[own]
        cuts, begin = [(0, [0] * len(steps))], 0
        if not len(rows):
            # Nothing can be replayed, but how long work takes is known.
            count = -(-sum(one.rows for one in self._of) // window_rows)
            return [(0, [of * at // count for of in steps]) for at in range(count + 1)]
        places = np.flatnonzero(is_cut)[1:]
        for at, following in pairwise([*places.tolist(), common.shape[1]]):
            until = int(rows[following]) if following < len(rows) else sum(one.rows for one in self._of)
            if until - begin > window_rows:
                cuts.append((at, common[:, at].tolist()))
                begin = int(rows[at])
        return [*cuts, (common.shape[1], steps)]

    def sample(self) -> Sequence[Program]:
        if self._whole is not None:
            return self._whole.programs
        share = min(_LEARNED_ROWS / sum(one.rows for one in self._of), 1)
        wanted = []
        for one in self._of:
            steps = np.argsort(np.arange(len(one.numbers)) * _SPREAD % _SPREAD_MOST)
            some = np.sort(steps[: max(1, int(share * len(steps)))]).tolist()
            rows = [slice(int(one.first[step]), int(one.first[step + 1])) for step in some]
            wanted.append((one, [slice(0, one.rows)] if share == 1 else rows))
        return self._programs(wanted)[0]

    def parts(self) -> Iterator[Part]:
        if self._whole is not None:
            yield self._whole
            return
        for at in range(len(self._cuts) - 1):
            yield self._part(at)

    def _part(self, at: int) -> RankPart:
        (begin, first), (end, last) = self._cuts[at : at + 2]
        is_last = at + 2 == len(self._cuts)
        over, then, wanted = list[int](), list[int](), []
        for one, low, high in zip(self._of, first, last, strict=True):
            over.append(one.over(low) if at else 0)
            then.append(0 if is_last else one.over(high))
            start = int(one.first[low]) - over[-1] if at else 0
            wanted.append((one, [slice(start, one.rows if is_last else int(one.first[high]))]))
        programs, columns = self._programs(wanted)
        for one, program, low, high, count in zip(self._of, programs, first, last, over, strict=True):
            program.step[:count] = program.met[:count] = program.name[:count] = NONE
            program.step[program.step != NONE] -= low
            program.numbers = one.numbers[low:high]
            program.begins_ns = None if one.begins_ns is None else one.begins_ns[low : high + 1]
        counts = np.array(over, np.int64), np.array(then, np.int64)
        steps = np.array(first, np.int64), slice(begin, end)
        return RankPart(programs, columns, *counts, *steps, *self._collectives(columns))

    def around(self, number: int, step: int) -> RankProgram:
        """The rows of a step of a rank, and of the steps next to it."""
        first = self._of[number].first
        rows = slice(int(first[max(step - 1, 0)]), int(first[min(step + 2, len(first) - 1)]))
        return self._programs([(self._of[number], [rows])])[0][0]

    def rows(self, number: int, step: int, program: RankProgram) -> slice:
        """The rows of a step of a rank in a part of its program."""
        first = self._of[number].first - program.place
        return slice(int(first[step]), int(first[step + 1]))

    def steps(self, number: int) -> int:
        """How many steps a rank has."""
        return len(self._of[number].numbers)

    def _records(self, one: _Rank, rows: slice) -> AnyArray:
        self._rows.seek((one.row + rows.start) * _ROW.itemsize)
        return np.frombuffer(self._rows.read((rows.stop - rows.start) * _ROW.itemsize), _ROW)

    def _awaited(self, table: AnyArray) -> AnyArray:
        """What rows wait for that follow each other in the file."""
        self._after.seek(int(table["first"][0]) * _AFTER.itemsize if len(table) else 0)
        return np.frombuffer(self._after.read(int(table["count"].sum()) * _AFTER.itemsize), _AFTER)

    def _programs(
        self, wanted: Sequence[tuple[_Rank, list[slice]]]
    ) -> tuple[list[RankProgram], dict[str, AnyArray]]:
        """Some rows of some ranks, and the columns of all of them."""
        tables = [[self._records(one, some) for some in rows] for one, rows in wanted]
        every = [table for some in tables for table in some]
        columns = {name: np.concatenate([table[name] for table in every]) for name in _COLUMNS}
        found, begin = list[RankProgram](), 0
        for (one, rows), some in zip(wanted, tables, strict=True):
            counts = np.concatenate([table["count"] for table in some])
            after = np.concatenate([self._awaited(table) for table in some])
            places = np.concatenate([np.arange(some.start, some.stop) for some in rows])
            later, earlier = (
                np.repeat(np.arange(len(counts)), counts),
                np.searchsorted(places, after["earlier"]),
            )
            is_here = np.append(places, NONE)[earlier] == after["earlier"]
            own = slice(begin, begin + len(counts))
            begin = own.stop
            found.append(
                RankProgram(
                    **{name: column[own] for name, column in columns.items()},
                    after=np.stack([later, earlier], axis=1)[is_here],
                    lag_ns=after["lag_ns"][is_here],
                    work=np.zeros(0, np.int64),
                    numbers=one.numbers,
                    has_steps=len(one.numbers) > 1,
                    begins_ns=one.begins_ns,
                    has_calls=one.has_calls,
                    unknown=one.unknown,
                    place=rows[0].start,
                )
            )
        return found, columns

    def _collectives(self, columns: dict[str, AnyArray]) -> tuple[Int64s, Int64s, Int64s, Int64s]:
        """The number of the collective that each row is, NONE for one that only one rank has; and by that
        number, how long the transfer takes, those that are a send and its receive, and the group.
        """
        met, group, lengths_ns = columns["met"], columns["group"], columns["end_ns"] - columns["start_ns"]
        members = np.flatnonzero(met != NONE)
        number, first = number_rows(met[members])
        ranks, groups = np.bincount(number, minlength=len(first)), group[members[first]]
        # The last rank to come has the shortest kernel. If that may be one that is not there, the transfer
        # takes as long as the shortest of the group.
        shortest_ns = np.full(len(first), np.iinfo(np.int64).max)
        np.minimum.at(shortest_ns, number, np.maximum(lengths_ns[members], 0))
        sizes = self._sizes.copy()
        np.maximum.at(sizes, groups, ranks)
        transfer_ns = np.where(ranks < sizes[groups], self._shortest_ns[groups], shortest_ns)
        met[members] = np.where(ranks[number] > 1, number, NONE)
        sent = [at for at, (operation, _) in enumerate(self.groups) if operation == "send_recv"]
        return met, transfer_ns, np.flatnonzero(np.isin(groups, sent)), groups
