"""The programs of all ranks of a dataset, and which rows of them are one collective, ready to be replayed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from tracepipe.analyses.program import WAIT, Program
from tracepipe.analyses.replay import Replay
from tracepipe.dataset.clocks_table import Aligned
from tracepipe.dataset.places import Dataset, files_of
from tracepipe.dataset.rank_tables import PROGRAM
from tracepipe.errors import InputError, TracepipeError
from tracepipe.event.columns import NONE, Int64s
from tracepipe.event.groups import count_earlier, number_rows
from tracepipe.libraries import np
from tracepipe.store.tables import connect

_MEMORY_MB: Final = 300
_BUILD: Final = "Build the dataset again."
_OF_COLLECTIVE: Final = {
    "rank": "rank", "row": '"row"', "operation": "operation", "process_group": "process_group",
    "number": "coalesce(seq, nth)", "is_numbered": "seq is not null", "group_size": "coalesce(group_size, 0)",
    "dur_ns": "greatest(end_ns - start_ns, 0)",
}  # fmt: skip
_NARROW: Final = {"what": "tinyint", "step": "integer", "stream": "bigint"}


@dataclass(slots=True, eq=False)
class Programs:
    """The programs of the ranks of a job, by rank. `loading_ns` has for each row how much of the host's time
    before it data was loaded for, and `collective` which collective it is, or NONE: a number that all its
    members have. Shapes `(rows,)`.
    """

    ranks: list[int]
    programs: list[Program]
    loading_ns: list[Int64s]
    collective: list[Int64s]
    groups: list[tuple[str, str]]
    """The operation and the process group of each collective, by its number."""
    transfer_ns: Int64s
    """How long each collective takes when its last rank has come, by its number."""

    def replay(self, aligned: Aligned, clocks: dict[int, str]) -> Replay:
        """The replay of the job, on the clock that all clocks are put on where they are."""
        ahead_ns = []
        for rank, one in zip(self.ranks, self.programs, strict=True):
            place = aligned.placements.get(clocks[rank])
            first_ns = int(one.call_ns[0]) if len(one) else 0
            ahead_ns.append(0 if place is None else place.line.place(first_ns) - first_ns)
        sent = [number for number, (operation, _) in enumerate(self.groups) if operation == "send_recv"]
        return Replay(self.programs, self.collective, ahead_ns, self.transfer_ns, np.array(sent, np.int64))


def programs_of(dataset: Dataset) -> Programs:
    """Read the programs of a dataset. Raises InputError of a damaged file, and TracepipeError without any."""
    ranks = dataset.rank_rows()
    with TemporaryDirectory(prefix="tracepipe-ranks-") as folder:
        connection = connect(":memory:", Path(folder), memory_mb=_MEMORY_MB)

        def columns(layer: str, asked: str, more: str = "") -> dict[str, Any]:
            found = connection.execute(
                f"select rank, {asked} from {files_of(dataset.layer(layer).absolute())} {more}"
            )
            return {
                name: column.filled(NONE) if isinstance(column, np.ma.MaskedArray) else column
                for name, column in found.fetchnumpy().items()
            }

        if "program" not in dataset.layers():
            raise TracepipeError("No rank has work of a GPU in a step.", "Record it: capture --gpu kernels.")
        narrowed = ", ".join(f"{name}::{_NARROW.get(name, 'bigint')} as {name}" for name in PROGRAM)
        rows = columns("program", f"place, {narrowed}, loading_ns, kernel_row")
        after = columns("program", "place, unnest(after) as earlier, unnest(after_lag_ns) as lag_ns")
        steps = columns("steps", "step, start_ns, end_ns, gpu")
        met: dict[str, Any] = {name: np.zeros(0, np.int64) for name in _OF_COLLECTIVE}
        if "collectives" in dataset.layers():
            met = columns(
                "collectives",
                ", ".join(f'{sql} as "{name}"' for name, sql in _OF_COLLECTIVE.items() if name != "rank"),
                "where leaves_together or (operation = 'send_recv' and group_size = 2)",
            )
        connection.close()
    of_rank = {name: _by_rank(table) for name, table in (("rows", rows), ("after", after), ("steps", steps))}
    numbers, groups, transfer_ns = _numbers(met)
    of_met = _by_rank(met)
    found = Programs([], [], [], [], groups, transfer_ns)
    for rank in ranks:
        own = of_rank["rows"].get(rank.rank)
        if own is None or rank.rank not in of_rank["steps"]:
            continue
        own = own[np.argsort(rows["place"][own], kind="stable")]
        # A slice is not copied.
        order = slice(int(own[0]), int(own[-1]) + 1) if (np.diff(own) == 1).all() else own
        pairs = of_rank["after"].get(rank.rank, np.zeros(0, np.int64))
        of_steps = of_rank["steps"][rank.rank]
        of_steps = of_steps[steps["gpu"][of_steps] == steps["gpu"][of_steps].min(initial=1 << 62)]
        of_steps = of_steps[np.argsort(steps["start_ns"][of_steps], kind="stable")]
        begins_ns = np.append(steps["start_ns"][of_steps], steps["end_ns"][of_steps][-1:])
        path = str(dataset.part("program", rank.host, rank.rank))
        damaged = InputError("is damaged: its rows do not belong together", _BUILD, path=path)
        try:
            unknown = dict(json.loads(rank.unknown))
        except (TypeError, ValueError):
            raise damaged from None
        program = Program(
            **{name: rows[name][order] for name in PROGRAM},
            after=np.stack([after["place"][pairs], after["earlier"][pairs]], axis=1),
            lag_ns=after["lag_ns"][pairs],
            work=np.zeros(0, np.int64),
            numbers=steps["step"][of_steps],
            has_steps=len(of_steps) > 1,
            begins_ns=None if rank.far_ahead else begins_ns,
            has_calls=rank.has_calls,
            unknown=unknown,
        )
        if not _is_whole(program, rows["place"][order]):
            raise damaged
        collective = np.full(len(own), NONE)
        if rank.rank in of_met:
            some = of_met[rank.rank]
            by_row = some[np.argsort(met["row"][some], kind="stable")]
            at = np.searchsorted(met["row"][by_row], rows["kernel_row"][order])
            inside = at < len(by_row)
            inside[inside] = met["row"][by_row][at[inside]] == rows["kernel_row"][order][inside]
            collective[inside] = numbers[by_row[at[inside]]]
        found.ranks.append(rank.rank)
        found.programs.append(program)
        found.loading_ns.append(rows["loading_ns"][order])
        found.collective.append(collective)
    if not found.ranks:
        raise TracepipeError("No rank has work of a GPU in a step.", "Record it: capture --gpu kernels.")
    return found


def _is_whole(program: Program, place: Int64s) -> bool:
    """Whether the rows of a program are all there, and what they refer to."""
    rows, steps = len(program), len(program.numbers)
    parts = (
        (place, 0, rows),
        (program.after, 0, rows),
        (program.step, NONE, steps),
        (program.what, 0, WAIT + 1),
    )
    is_inside = all(((low <= part) & (part < high)).all() for part, low, high in parts)
    return is_inside and bool((np.diff(place) == 1).all())


def _by_rank(table: dict[str, Any]) -> dict[int, Int64s]:
    """The rows of each rank in a table, in their order."""
    order = np.argsort(table["rank"], kind="stable")
    ranks, first = np.unique(table["rank"][order], return_index=True)
    return dict(zip(ranks.tolist(), np.split(order, first[1:])[: len(ranks)], strict=True))


def _numbers(met: dict[str, Any]) -> tuple[Int64s, list[tuple[str, str]], Int64s]:
    """The number of the collective that each row of the layer is, NONE for one that only one rank has, shape
    `(rows,)`; and for each number the operation and the process group, and how long the transfer takes. Where
    a rank has a collective again, so have the others.
    """
    texts = [
        np.unique(met[name].astype(str), return_inverse=True)[1].reshape(-1)
        for name in ("operation", "process_group")
    ]
    key, _ = number_rows(*texts, met["number"], met["is_numbered"])
    again = count_earlier(met["rank"], key)
    number, first = number_rows(key, again)
    ranks = np.bincount(number, minlength=len(first))
    # The last rank to come has the shortest kernel. If that may be one that is not there, the transfer takes
    # as long as the shortest of the group.
    shortest_ns = np.full(len(first), np.iinfo(np.int64).max)
    np.minimum.at(shortest_ns, number, met["dur_ns"])
    of, firsts = number_rows(*(text[first] for text in texts))
    size, of_group_ns = np.zeros(len(firsts), np.int64), np.full(len(firsts), np.iinfo(np.int64).max)
    np.maximum.at(size, of, np.maximum(ranks, met["group_size"][first]))
    np.minimum.at(of_group_ns, of, shortest_ns)
    transfer_ns = np.where(ranks < size[of], of_group_ns[of], shortest_ns)
    groups = zip(met["operation"][first].tolist(), met["process_group"][first].tolist(), strict=True)
    return np.where(ranks[number] > 1, number, NONE).astype(np.int64), list(groups), transfer_ns
