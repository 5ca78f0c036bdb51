"""Give collectives without a number the same one on all ranks, though recordings begin at different ones.

Where nothing numbers collectives, their order does: `nth`. A recording that begins some collectives later
than that of another rank has other numbers for the same ones. All ranks leave a collective together, so the
intervals between ends are the same on all ranks: where those of two ranks agree to some µs, they are the same
collectives.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from tracepipe.dataset.places import Dataset, asking
from tracepipe.event.columns import Int64s
from tracepipe.present.writing.table_formats import write_table
from tracepipe.recording.outputs import writing
from tracepipe.store.tables import object_column

LAYER: Final = "collectives"
_Key = tuple[str, str]
"""Operation and process group."""
_COMPARED: Final = 64
_LEAST: Final = 16
_ENDS_MAX: Final = 20_000
# Ends of one collective are some µs apart; intervals of different ones differ by far more, or are all alike.
_ALIKE_NS: Final = 30_000
_BETTER: Final = 2
# The ends of collectives without numbers, on one GPU.
_UNNUMBERED: Final = """
select operation, process_group, min(nth), list(end_ns order by nth)
from (select * from part where seq is null and leaves_together qualify gpu = min(gpu) over ())
group by all
"""
_MOVED: Final = """
select part.* replace (part.nth + if(part.seq is null, coalesce(move, 0), 0) as nth)
from part left join moves using (operation, process_group) order by part.row
"""


def shift_of(own_ns: Int64s, other_ns: Int64s) -> int:
    """What to add to the place of an end of one rank to get that of the same collective on another rank.

    The columns have the ends of collectives in their order, on the clock of each rank. Shapes `(n,)`, `(m,)`.
    The shift is 0 where the places agree already, and where intervals do not tell.
    """
    own, other = np.diff(own_ns), np.diff(other_ns)
    # Half of the shorter one at most: the other half is room to shift it.
    count = min(_COMPARED, len(own) // 2, len(other) // 2)
    if count < _LEAST:
        return 0
    begin = (len(own) - count) // 2
    windows = np.lib.stride_tricks.sliding_window_view(other, count)
    away_ns = np.median(np.abs(windows - own[begin : begin + count]), axis=1)
    best = int(away_ns.argmin())
    limit_ns = _BETTER * max(float(away_ns[best]), 1_000.0)
    if begin < len(away_ns) and away_ns[begin] <= limit_ns:
        return 0
    is_alone = np.count_nonzero(away_ns <= limit_ns) == 1
    return best - begin if is_alone and away_ns[best] <= _ALIKE_NS else 0


def renumber(dataset: Dataset) -> None:
    """Make `nth` the same on all ranks. Raises OutputError."""
    references: dict[_Key, Int64s] = {}
    firsts: dict[tuple[str, int], dict[_Key, tuple[int, int]]] = {}
    for host, rank in dataset.ranks():
        file = dataset.part(LAYER, host, rank)
        if not file.is_file():
            continue
        with asking(file) as connection:
            found = connection.execute(_UNNUMBERED).fetchall()
        for operation, group, first, ends in found:
            key, ends_ns = (operation, group), np.array(ends[:_ENDS_MAX], np.int64)
            reference = references.setdefault(key, ends_ns)
            shift = 0 if reference is ends_ns else shift_of(ends_ns, reference)
            firsts.setdefault((host, rank), {})[key] = first, shift
    # Numbers begin at 0.
    least = {key: min(of[key][1] for of in firsts.values() if key in of) for key in references}
    for (host, rank), of in firsts.items():
        moves = {key: shift - least[key] - first for key, (first, shift) in of.items()}
        if any(moves.values()):
            _move(dataset, host, rank, moves)


def _move(dataset: Dataset, host: str, rank: int, moves: dict[_Key, int]) -> None:
    """Add to the numbers of a rank, whose file is replaced in one step."""
    file = dataset.part(LAYER, host, rank)
    columns = zip(*((*key, move) for key, move in moves.items()), strict=True)
    names = "operation", "process_group", "move"
    place = file.relative_to(dataset.folder).as_posix()
    with (
        writing(str(file)),
        dataset.part_at(place) as part,
        part.open("wb") as out,
        asking(file) as connection,
    ):
        connection.register("moves", dict(zip(names, map(object_column, columns), strict=True)))
        write_table(connection, _MOVED, out, "parquet")
