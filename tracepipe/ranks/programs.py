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
from typing import IO, Final

from tracepipe.analyses.program import WAIT, Program
from tracepipe.analyses.replay import Part, Source, common_steps
from tracepipe.dataset.clocks_table import Aligned
from tracepipe.dataset.places import RANKS, Dataset, Rank, files_of
from tracepipe.dataset.rank_tables import PROGRAM
from tracepipe.errors import InputError, TracepipeError
from tracepipe.event.columns import NONE, AnyArray, Int64s
from tracepipe.event.groups import RowsByNumber
from tracepipe.libraries import np
from tracepipe.store.tables import connect

_MEMORY_MB: Final = 300
# So many rows are in memory at once, more where all ranks have more in one step. What is typical is learned
# of so many in the middle.
WINDOW_ROWS: Final = 400_000
_LEARNED_ROWS: Final = 1_000_000
_READ_ROWS: Final = 250_000
# Of the step before a window, so many rows of each rank are in it too: others hardly wait for earlier ones.
_OVER_LEAST, _OVER_MOST = 32, 256
_COLUMNS: Final = (*PROGRAM, "loading_ns", "group", "name", "meeting", "transfer_ns")
# The columns of the files, all of 64 bits. The `count` rows that a row waits for begin with `pair`.
_ROW, _PAIR = (*_COLUMNS, "pair", "count"), ("earlier", "lag_ns")
_NO_COLLECTIVES: Final = """
select null::bigint as rank, null::bigint as "row", '' as operation, '' as process_group, 0 as group_size,
    0 as seq, 0 as nth, 0 as start_ns, 0 as end_ns, true as leaves_together where false
"""
_GROUPS: Final = """
select operation, process_group, row_number() over (order by operation, process_group) - 1 as "group"
from (select distinct operation, process_group from collectives)
"""
_NAMES: Final = """
select name, row_number() over (order by name) - 1 as number
from (select distinct name from program where kernel_row <> -1 and name is not null)
"""
# Where a rank has a collective again, so have the others. The last rank to come has the shortest kernel. If
# that may be one that is not there, the transfer takes as long as the shortest of the group.
_MET: Final = """
with members as (
    select rank, "row", "group", coalesce(group_size, 0) as size, greatest(end_ns - start_ns, 0) as ns,
        coalesce(seq, nth) as number, seq is not null as is_numbered,
        row_number() over (
            partition by rank, "group", coalesce(seq, nth), seq is not null order by "row"
        ) as again
    from collectives join groups using (operation, process_group)
    where leaves_together or (operation = 'send_recv' and group_size = 2)
), met as (
    select *, hash("group", number, is_numbered, again) as meeting,
        count(*) over one as ranks, min(ns) over one as shortest_ns
    from members window one as (partition by "group", number, is_numbered, again)
)
select rank, "row", "group", (meeting >> 1)::bigint as meeting, case
    when ranks < max(greatest(ranks, size)) over (partition by "group")
    then min(ns) over (partition by "group") else shortest_ns end as transfer_ns
from met qualify ranks > 1
"""
_KNOWN: Final = ", ".join(f"count({name})" for name in ("place", *PROGRAM, "loading_ns", "kernel_row"))
_RANKS: Final = f"""
select rank, count(*) as "rows", max(step) as step, arg_min(from_ns, place) as from_ns,
    arg_min(call_ns, place) as call_ns, arg_max(called_ns, place) as called_ns,
    coalesce(
        least({_KNOWN}) = count(*) and count(distinct place) = count(*) and min(place) = 0
        and max(place) = count(*) - 1 and min(step) >= {NONE}
        and max(what) <= {WAIT} and coalesce(min(list_min(after)) >= 0, true)
        and coalesce(max(list_max(after)) < count(*), true)
        and bool_and(len(after) is not distinct from len(after_lag_ns)), false
    ) as is_whole
from program group by rank
"""
_FIRST: Final = (
    f"select rank, step, min(place) as place from program where step <> {NONE} group by rank, step"
)
_STEPS: Final = "select rank, step, start_ns, end_ns, gpu from steps"
_ROWS: Final = f"""
select {", ".join(f"program.{name}::bigint as {name}" for name in PROGRAM)}, loading_ns,
    coalesce("group", {NONE}) as "group", coalesce(names.number, {NONE}) as name,
    coalesce(meeting, {NONE}) as meeting, coalesce(transfer_ns, 0) as transfer_ns,
    coalesce(len(after), 0) as "count"
from program left join names on program.name = names.name and kernel_row <> {NONE}
left join (select * from met where rank in {{ranks}}) met
on program.rank = met.rank and kernel_row = met."row"
where program.rank in {{ranks}} and {{places}} order by program.rank, place
"""
_PAIRS: Final = """
select unnest(after) as earlier, unnest(after_lag_ns) as lag_ns
from program where rank in {ranks} and {places} order by rank, place
"""


@dataclass(slots=True, eq=False)
class RankProgram(Program):
    """The program of a rank in some steps. `loading_ns` is how much of the host's time before each row data
    was loaded for. `group` is the index of a collective's operation and process group, `name` that of a
    kernel's name, and `place` where the first row is in the program of all steps.
    """

    loading_ns: Int64s
    group: Int64s
    name: Int64s
    meeting: Int64s
    transfer_ns: Int64s
    place: int


@dataclass(slots=True, eq=False)
class _Rank:
    """What is known of the program of a rank before its rows are read: how many these are, the first of each
    step, shape `(steps + 1,)`, when it begins, and the first and the last call.
    """

    rank: int
    numbers: Int64s
    begins_ns: Int64s | None
    has_calls: bool
    unknown: dict[str, float]
    first: Int64s
    rows: int
    from_ns: int
    call_ns: int
    called_ns: int
    row: int = 0
    """The first row in the file."""


class Programs:
    """The programs of the ranks of a job, by rank, and the `source` of their replay. Raises InputError of a
    damaged file, and TracepipeError without any program. `clocks` has the clock of each rank. A window has
    about `window_rows` rows.
    """

    def __init__(
        self, dataset: Dataset, aligned: Aligned, clocks: dict[int, str], window_rows: int = WINDOW_ROWS
    ) -> None:
        self._dataset = dataset
        self._rows, self._pairs = TemporaryFile(), TemporaryFile()  # noqa: SIM115 - as long as this
        with TemporaryDirectory(prefix="tracepipe-ranks-") as folder:
            self._connection = connect(":memory:", Path(folder), memory_mb=_MEMORY_MB)
            self._copy()
            self._connection.close()
        self.ranks = [one.rank for one in self._of]
        self.has_calls = all(one.has_calls for one in self._of)
        self.spans_ns = np.array([(one.from_ns, one.called_ns) for one in self._of])
        """When the program of each rank begins, and its last call ends. Shape `(ranks, 2)`."""
        self._sends = [at for at, (operation, _) in enumerate(self.groups) if operation == "send_recv"]
        placed = [(one, aligned.placements.get(clocks[one.rank])) for one in self._of]
        ahead_ns = np.array(
            [0 if place is None else place.line.place(one.call_ns) - one.call_ns for one, place in placed]
        )
        begins_ns, numbers = self.spans_ns[:, 0] + ahead_ns, [one.numbers for one in self._of]
        self._common = common_steps(numbers)
        self._cuts, self._firsts = self._windows(window_rows)
        self.source = Source(
            numbers, self._common, all(len(one) > 1 for one in numbers), [one.unknown for one in self._of],
            ahead_ns, begins_ns - begins_ns.min(), len(self._cuts) - 1, self._part, self._sample,
        )  # fmt: skip

    def _copy(self) -> None:
        """Copy the rows of all programs to the files, with what belongs to them in other layers."""
        layers = self._dataset.layers()
        for layer in ("program", "steps", "collectives"):
            sql = f"select * from {files_of(self._dataset.layer(layer).absolute())}"
            self._connection.execute(
                f"create temp view {layer} as {sql if layer in layers else _NO_COLLECTIVES}"
            )
        self._of = [*self._ranks()] if "program" in layers else []
        if not self._of:
            raise TracepipeError("No rank has work of a GPU in a step.", "Record it: capture --gpu kernels.")
        for name, sql in (("groups", _GROUPS), ("names", _NAMES), ("met", _MET)):
            self._connection.execute(f"create temp table {name} as {sql}")
        groups = self._connection.execute('select operation, process_group from groups order by "group"')
        self.groups: list[tuple[str, str]] = groups.fetchall()
        """The operation and the process group of collectives."""
        names = self._connection.execute("select name from names order by number").fetchall()
        self.names: list[str] = [name for (name,) in names]
        """The names of kernels, sorted."""
        rows = np.array([one.rows for one in self._of])
        first, pair = np.cumsum(rows) - rows, 0
        for one, row in zip(self._of, first.tolist(), strict=True):
            one.row = row
        # Small ranks are read together, and large ones in parts.
        for _, own in RowsByNumber(first // _READ_ROWS):
            ranks = f"({', '.join(str(self._of[at].rank) for at in own.tolist())})"
            for at in range(0, int(rows[own].max()), _READ_ROWS):
                asked = {"ranks": ranks, "places": f"place between {at} and {at + _READ_ROWS - 1}"}
                table, pairs = (self._columns(sql.format(**asked)) for sql in (_ROWS, _PAIRS))
                table["pair"] = pair + np.cumsum(table["count"]) - table["count"]
                pair += len(pairs["earlier"])
                for file, names, columns in ((self._rows, _ROW, table), (self._pairs, _PAIR, pairs)):
                    file.write(np.stack([columns[name] for name in names], axis=1).astype(np.int64).data)

    def _ranks(self) -> Iterator[_Rank]:
        """The ranks that have a program and steps."""
        counted, steps, placed = (self._columns(sql) for sql in (_RANKS, _STEPS, _FIRST))
        of_rank, of_steps, of_placed = (RowsByNumber(one["rank"]) for one in (counted, steps, placed))
        for rank in self._dataset.rank_rows():
            at, own = of_rank.of(rank.rank), of_steps.of(rank.rank)
            if not len(at) or not len(own):
                continue
            own = own[steps["gpu"][own] == steps["gpu"][own].min()]
            own = own[np.argsort(steps["start_ns"][own], kind="stable")]
            if any(np.ma.getmaskarray(column)[own].any() for column in steps.values()):
                raise self._damaged("steps", rank, "its steps have no number or no time")
            first, some = np.full(len(own) + 1, counted["rows"][at[0]]), of_placed.of(rank.rank)
            if not counted["is_whole"][at[0]] or (placed["step"][some] >= len(own)).any():
                raise self._damaged("program", rank, "its rows do not belong together")
            first[placed["step"][some]] = placed["place"][some]
            try:
                unknown = dict(json.loads(rank.unknown))
            except (TypeError, ValueError):
                raise self._damaged(RANKS, rank, "what is not known of a rank cannot be read") from None
            begins_ns = np.append(steps["start_ns"][own], steps["end_ns"][own][-1:])
            yield _Rank(
                rank.rank, steps["step"][own], None if rank.far_ahead else begins_ns, rank.has_calls, unknown,
                np.minimum.accumulate(first[::-1])[::-1],
                *(int(counted[name][at[0]]) for name in ("rows", "from_ns", "call_ns", "called_ns")),
            )  # fmt: skip

    def _columns(self, sql: str) -> dict[str, AnyArray]:
        found: dict[str, AnyArray] = self._connection.execute(sql).fetchnumpy()
        return found

    def _damaged(self, layer: str, rank: Rank, reason: str) -> InputError:
        path = str(self._dataset.part(layer, rank.host, rank.rank))
        return InputError(f"is damaged: {reason}", "Build the dataset again.", path=path)

    def _windows(self, window_rows: int) -> tuple[list[int], Int64s]:
        """Where windows begin, and the last one ends: before which of the common steps, and before which step
        of each rank. Shape `(windows + 1, ranks)`.
        """
        common, steps = np.stack(self._common), np.array([len(one.numbers) for one in self._of])
        count, total = common.shape[1], sum(one.rows for one in self._of)
        if not count:
            # Nothing can be replayed, but how long work takes is known.
            windows = -(-total // window_rows)
            return [0] * (windows + 1), np.arange(windows + 1)[:, None] * steps // windows
        # Ranks may have steps in different orders.
        before = np.maximum.accumulate(common, axis=1)[:, :-1]
        later = np.minimum.accumulate(common[:, ::-1], axis=1)[:, ::-1][:, 1:]
        rows = np.sum([one.first[own] for one, own in zip(self._of, self._common, strict=True)], axis=0)
        rows, cuts = np.concatenate([[0], rows[1:], [total]]), [0]
        places = np.flatnonzero((before < later).all(axis=0)) + 1
        for at, following in pairwise([*places.tolist(), count]):
            if rows[following] - rows[cuts[-1]] > window_rows:
                cuts.append(at)
        firsts = common[:, cuts].T
        firsts[0] = 0
        return [*cuts, count], np.vstack([firsts, steps])

    def _bounds(self, part: int) -> tuple[Int64s, Int64s]:
        """The first row of each rank in a window, and how many rows before it are in it too. Shapes
        `(ranks,)`.
        """
        if part in (0, len(self._cuts) - 1):
            rows = np.array([one.rows for one in self._of])
            return rows * (part > 0), 0 * rows
        steps = self._firsts[part].tolist()
        places, before = np.array(
            [one.first[[step, max(step - 1, 0)]] for one, step in zip(self._of, steps, strict=True)]
        ).T
        return places, np.minimum(np.clip(places - before, _OVER_LEAST, _OVER_MOST), places)

    def _sample(self) -> Sequence[Program]:
        windows, rows = len(self._cuts) - 1, sum(one.rows for one in self._of)
        count = min(-(-windows * _LEARNED_ROWS // rows), windows)
        return self._programs(range((windows - count) // 2, (windows + count) // 2))[0]

    def _part(self, at: int) -> Part:
        programs, table = self._programs(range(at, at + 1))
        return Part(
            programs, self._bounds(at)[1], self._bounds(at + 1)[1], self._firsts[at],
            slice(self._cuts[at], self._cuts[at + 1]), table["meeting"], table["transfer_ns"],
            np.isin(table["group"], self._sends),
        )  # fmt: skip

    def _programs(self, parts: range) -> tuple[list[RankProgram], dict[str, Int64s]]:
        """The programs in some windows that follow each other, and the columns of all of them."""
        (places, over), (until, _) = self._bounds(parts.start), self._bounds(parts.stop)
        places, counts = places - over, until - places + over
        every = [
            _read(self._rows, one.row + place, count, _ROW)
            for one, place, count in zip(self._of, places.tolist(), counts.tolist(), strict=True)
        ]
        table = dict(zip(_ROW, np.concatenate(every).T, strict=True))
        bounds = np.cumsum([0, *counts.tolist()])
        # Of the rows before, nothing but their times counts.
        is_over = np.arange(bounds[-1]) < np.repeat(bounds[:-1] + over, counts)
        for name in ("step", "name", "meeting"):
            table[name][is_over] = NONE
        firsts, lasts = self._firsts[parts.start], self._firsts[parts.stop]
        table["step"] -= np.where(table["step"] == NONE, 0, np.repeat(firsts, counts))
        found = list[RankProgram]()
        for number, one in enumerate(self._of):
            own, place = slice(*bounds[number : number + 2].tolist()), int(places[number])
            steps = slice(int(firsts[number]), int(lasts[number]))
            waits = table["count"][own]
            pair = int(table["pair"][own.start]) if len(waits) else 0
            earlier, lag_ns = _read(self._pairs, pair, int(waits.sum()), _PAIR).T
            after = np.stack([np.repeat(np.arange(len(waits)), waits), earlier - place], axis=1)
            is_here = (after[:, 1] >= 0) & (after[:, 1] < len(waits))
            found.append(
                RankProgram(
                    **{name: table[name][own] for name in _COLUMNS},
                    after=after[is_here],
                    lag_ns=lag_ns[is_here],
                    work=np.zeros(0, np.int64),
                    numbers=one.numbers[steps],
                    has_steps=len(one.numbers) > 1,
                    begins_ns=None if one.begins_ns is None else one.begins_ns[steps.start : steps.stop + 1],
                    has_calls=one.has_calls,
                    unknown=one.unknown,
                    place=place,
                )
            )
        return found, table


def _read(file: IO[bytes], first: int, count: int, names: Sequence[str]) -> Int64s:
    """Some rows of a file. Shape `(rows, columns)`."""
    file.seek(8 * len(names) * first)
    return np.frombuffer(file.read(8 * len(names) * count), np.int64).reshape(-1, len(names))
