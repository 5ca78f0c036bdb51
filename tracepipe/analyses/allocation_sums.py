"""Sums of allocations by group: by their place, or by the call that made them."""

from __future__ import annotations

from collections.abc import Iterator

from tracepipe.analyses.allocations import Allocations
from tracepipe.event.columns import NONE, Bools, Int32s, Int64s
from tracepipe.reports.frames.arrays import Floats, Ints
from tracepipe.reports.frames.grouping import Grouped, each, equal, numbered
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.stored import flagged, made, parts, taken, zeros

_LOW_BITS = 32


class AllocationSums:
    """The number and the bytes of the allocations in each of `count` groups. `numbers` has the group of each
    row, shape `(rows,)`.
    """

    def __init__(self, found: Allocations, numbers: Ints, count: int) -> None:
        self.count, self._sized, self._addressed, self._live, self._live_sized = (
            zeros(count, np.int32) for _ in range(5)
        )
        self._bytes, self._live_bytes = (zeros(count, np.int64, (2,)) for _ in range(2))
        for part in parts(len(found)):
            is_made = found.column("is_made")[part]
            size, of = found.column("size_bytes")[part][is_made], numbers[part][is_made]
            has_address = found.column("key")[part][is_made] != NONE
            is_live = has_address & (found.column("ended")[part][is_made] == NONE)
            for sums, which in (
                (self.count, slice(None)),
                (self._sized, size != NONE),
                (self._addressed, has_address),
                (self._live, is_live),
                (self._live_sized, is_live & (size != NONE)),
            ):
                np.add.at(sums, of[which], 1)
            for bytes_of, which in (
                (self._bytes, size != NONE),
                (self._live_bytes, is_live & (size != NONE)),
            ):
                # In two halves, as sums of many large sizes exceed 64 bits.
                np.add.at(bytes_of[:, 0], of[which], size[which] >> _LOW_BITS)
                np.add.at(bytes_of[:, 1], of[which], size[which] & ((1 << _LOW_BITS) - 1))

    def bytes_of(self, number: int) -> int | None:
        """The bytes of a group's allocations with known sizes; None where it has some, but no size
        is known.
        """
        return _known(self._bytes[number], self.count[number], self._sized[number])

    def never_freed(self, number: int) -> tuple[int | None, int | None]:
        """How many of a group were never freed, and their bytes; None where no address was recorded."""
        if self.count[number] and not self._addressed[number]:
            return None, None
        live = int(self._live[number])
        return live, _known(self._live_bytes[number], live, self._live_sized[number])

    def most_first(self) -> Int32s:
        """The groups that have allocations, those with the most bytes that were never freed first, then by
        all bytes. Shape `(n,)`.
        """
        some = flagged(len(self.count), lambda part: self.count[part] > 0)

        def most(of: Ints) -> Floats:
            return made(len(some), np.float64, lambda part: -_about(of[some[part]]))

        return taken(some, np.lexsort((most(self._bytes), most(self._live_bytes))))


_Sums = tuple[Int64s, Floats]
"""Sorted times, and the sum of the bytes before each and of all; shapes `(n,)` and `(n + 1,)`."""


def _known(halves: Ints, count: int, sized: int) -> int | None:
    total = (int(halves[0]) << _LOW_BITS) + int(halves[1])
    return total if sized or not count else None


def _about(halves: Ints) -> Floats:
    return halves[:, 0] * float(1 << _LOW_BITS) + halves[:, 1]


class Sites:
    """Allocations in groups by site (the call that made them), thread and place, sorted by these."""

    def __init__(self, found: Allocations) -> None:
        self._found = found
        numbers, self._first = equal(*(found.column(name) for name in ("site", "tid", "place")))
        self.sums = AllocationSums(found, numbers, len(self._first))
        rows = flagged(len(found), lambda part: found.column("is_made")[part])
        self._rows = Grouped(made(len(rows), np.int32, lambda part: numbers[rows[part]]), rows)

    def first(self, number: int) -> int:
        """The first row of a group."""
        return int(self._first[number])

    def sizes(self, number: int) -> Int64s:
        """The known sizes of a group's allocations. Shape `(n,)`."""
        sizes = self._found.column("size_bytes")[self._rows.of(number)]
        found: Int64s = sizes[sizes != NONE]
        return found

    def lived_ns(self, number: int) -> Int64s:
        """The times from allocation to free of a group's allocations that were freed. Shape `(n,)`."""
        rows = self._rows.of(number)
        return lived_ns(self._found, rows[was_freed(self._found, rows)])


def was_freed(found: Allocations, rows: Ints) -> Bools:
    """Flags the allocations that a free ended, and not another allocation at their address. Shapes `(n,)`."""
    ended = found.column("ended")[rows]
    return np.asarray((ended != NONE) & ~found.column("is_made")[np.maximum(ended, 0)])


def lived_ns(found: Allocations, rows: Ints) -> Int64s:
    """The times from allocation to end, for rows of allocations that ended. Shapes `(n,)`."""
    at_ns = found.column("at_ns")
    return at_ns[found.column("ended")[rows]] - at_ns[rows]


def never_freed(found: Allocations) -> Int32s:
    """The rows of allocations that were never freed, the largest first. Shape `(n,)`."""

    def is_live(part: slice) -> Bools:
        addressed = found.column("is_made")[part] & (found.column("key")[part] != NONE)
        return np.asarray(addressed & (found.column("ended")[part] == NONE))

    rows = flagged(len(found), is_live)
    return rows[np.argsort(-np.maximum(found.column("size_bytes")[rows], 0), kind="stable")]


def faults_of(found: Allocations) -> Int32s:
    """The rows of faults, sorted by kind, then by time. Shape `(n,)`."""
    rows = flagged(len(found), lambda part: found.column("fault")[part] != NONE)
    return rows[np.argsort(found.column("fault")[rows], kind="stable")]


def given_again(found: Allocations) -> int:
    """How many allocations end because their address was allocated again."""
    count = 0
    for part in parts(len(found)):
        ended = found.column("ended")[part]
        count += int(np.count_nonzero(found.column("is_made")[ended[ended != NONE]]))
    return count


def places_with_most(found: Allocations, most: int) -> tuple[Int32s, int]:
    """The `most` places with the highest peaks, or all for 0, shape `(n,)`, and how many others there are."""
    some = np.asarray(found.counted)
    if not 0 < most < len(some):
        return some, 0
    peaks = np.asarray(found.most_bytes)[some]
    kept = np.sort(np.argsort(-peaks, kind="stable")[:most])
    return some[kept], len(some) - most


def steps_of(found: Allocations, places: Int32s) -> Iterator[tuple[int, Int64s, Int64s]]:
    """Yield each of some places, with the times at which its bytes changed and the bytes from then on, shapes
    `(steps,)`.
    """
    of: Int32s = found.step_column("place")
    is_wanted = np.zeros(found.place_count, np.bool_)
    is_wanted[places] = True
    rows = flagged(len(of), lambda part: is_wanted[of[part]])
    by_place = Grouped(taken(of, rows), rows)
    for place in each(places):
        own = by_place.of(place)
        yield place, taken(found.step_column("ts_ns"), own), taken(found.step_column("total_bytes"), own)


class LiveAt:
    """Answers how many allocations of a process were live at a time, and their bytes."""

    def __init__(self, found: Allocations) -> None:
        self._pids, self._of_place = numbered(found.place_pids)
        rows = flagged(
            len(found), lambda part: found.column("is_made")[part] & (found.column("key")[part] != NONE)
        )
        self._rows = Grouped(self._of_place[found.column("place")[rows]], rows)
        self._found = found
        self._sums: dict[int, tuple[_Sums, _Sums]] = {}

    def at(self, pid: int | None, at_ns: int) -> tuple[int, int]:
        """The count and the bytes of the allocations that began before a time, and had not ended by then."""
        known = NONE if pid is None else pid
        number = int(np.searchsorted(self._pids, known))
        if number == len(self._pids) or self._pids[number] != known:
            return 0, 0
        if number not in self._sums:
            # Only one process is kept, as processes seldom end contexts in turn.
            self._sums = {number: self._sums_of(self._rows.of(number))}
        begun, ended = (_before(sums, at_ns) for sums in self._sums[number])
        return begun[0] - ended[0], round(begun[1] - ended[1])

    def _sums_of(self, rows: Ints) -> tuple[_Sums, _Sums]:
        """The sorted begins of allocations and their cumulative bytes, and the same for their ends."""
        at_ns, size = self._found.column("at_ns"), np.maximum(self._found.column("size_bytes")[rows], 0)
        ended = self._found.column("ended")[rows]
        has_ended = ended != NONE
        # An allocation that ends in the ns of its begin is never live.
        ends_ns = np.maximum(at_ns[ended[has_ended]], at_ns[rows[has_ended]] + 1) - 1
        order = np.argsort(ends_ns, kind="stable")
        return (at_ns[rows], _sums(size)), (ends_ns[order], _sums(size[has_ended][order]))


def _sums(sizes: Ints) -> Floats:
    return np.concatenate([[0.0], np.cumsum(sizes, dtype=np.float64)])


def _before(sums: _Sums, at_ns: int) -> tuple[int, float]:
    """How many times are before `at_ns`, and the sum of their bytes."""
    place = int(np.searchsorted(sums[0], at_ns, "left"))
    return place, float(sums[1][place])
