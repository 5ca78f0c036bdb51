"""The functions of a layer: how often each ran, and how long."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import nsmallest
from typing import Any

from tracepipe.analyses.distribution import of_values
from tracepipe.event.columns import NONE, Int32s, Int64s
from tracepipe.event.vocabulary import RUNNING
from tracepipe.reports.frames.arrays import Ints
from tracepipe.reports.frames.grouping import equal, greatest, sort_within
from tracepipe.reports.frames.libraries import np
from tracepipe.reports.frames.stored import Growing, parts
from tracepipe.reports.frames.text_order import in_text_order
from tracepipe.store.run import Run

# The largest count: 32 bits, which is ten digits.
_COUNT_MOST = (1 << 31) - 1
SORTS = ("total", "count", "mean", "p50", "p95", "p99", "max", "name")


@dataclass(frozen=True, slots=True)
class Functions:
    """The functions of a layer, as columns of shape `(functions,)`: the numbers of name and layer in the
    table of shapes, the count of calls, and the range `first`…`last` of their sorted lengths in `lengths_ns`.
    """

    name: Int32s
    layer: Int32s
    count: Int32s
    first: Int32s
    last: Int32s
    lengths_ns: Int64s

    def __len__(self) -> int:
        return len(self.count)

    def row(self, run: Run, at: int) -> tuple[Any, ...]:
        """The cells of a function: name, layer, count, and the distribution of its lengths."""
        known = self.lengths_ns[self.first[at] : self.last[at]]
        return (*self.place(run, at), int(self.count[at]), *of_values(known))

    def place(self, run: Run, at: int) -> tuple[str, str]:
        """The name and the layer of a function."""
        value = run.shapes.value
        return value("name", int(self.name[at])), value("layer", int(self.layer[at]))

    def measures(self, sort: str) -> Ints:
        """The values by which functions are sorted, shape `(functions,)`; NONE where they are not known."""
        known = self.last - self.first
        some = np.flatnonzero(known)
        measures = np.full(len(known), NONE, np.int64)
        if sort == "count":
            return self.count
        if sort in ("total", "mean") and len(some):
            measures[some] = np.add.reduceat(self.lengths_ns, self.first[some])
            if sort == "mean":
                measures[some] = np.rint(measures[some] / known[some])
        elif sort.startswith(("p", "max")):
            percent = 100 if sort == "max" else int(sort.removeprefix("p"))
            at = self.first[some] + np.maximum((known[some].astype(np.int64) * percent + 99) // 100 - 1, 0)
            measures[some] = self.lengths_ns[at]
        return measures

    def ranked(self, run: Run, sort: str, top: int) -> Int32s | list[int]:
        """The indices of the first `top` functions in the order of `sort`, or of all with 0. Names are only
        decoded where numbers do not decide, as there may be a million.
        """
        measure = self.measures(sort)

        def rank(at: int) -> tuple[Any, ...]:
            name, layer = self.place(run, at)
            return name if sort == "name" else -int(measure[at]), -int(self.count[at]), layer, name

        if top <= 0:
            return self._all_ranked(run, measure, by_name=sort == "name")
        surely, perhaps = np.empty(0, np.int32), np.arange(len(self), dtype=np.int32)
        for numbers in () if sort == "name" else (measure, self.count):
            more, perhaps = greatest(numbers, perhaps, top - len(surely))
            surely = np.concatenate([surely, more])
        return nsmallest(top, np.concatenate([surely, perhaps]).tolist(), rank)

    def _all_ranked(self, run: Run, measure: Ints, by_name: bool) -> Int32s:
        """The same order for all functions, as a column of shape `(functions,)`."""

        def by_numbers_first(at: int) -> str:
            name, layer = self.place(run, at)
            return f"{layer}\0{name}"

        def by_name_first(at: int) -> str:
            name, layer = self.place(run, at)
            return f"{name}\0{_COUNT_MOST - int(self.count[at]):010}{layer}"

        if by_name:
            return in_text_order(by_name_first, np.zeros(len(self), np.int32))
        return in_text_order(by_numbers_first, -measure, -self.count)


def functions_of(run: Run, layer_name: str) -> Functions:
    """Return the functions of a layer."""
    layer, every = run.layer(layer_name), np.arange(len(run.shapes), dtype=np.int32)
    names, layers = run.shapes.column("name", every), run.shapes.column("layer", every)
    of_shape, first = equal(layers, names)
    names, layers = names[first], layers[first]
    called = layer.is_call & ~run.has("name", RUNNING, layer)
    has_length, lengths_ns, numbers = layer.has_length, Growing(np.int64), Growing(np.int64)
    count, known = np.zeros((2, len(names)), np.int32)
    for part in parts(len(layer)):
        of = of_shape[layer.shape[part]]
        some = called[part] & has_length[part]
        np.add.at(count, of[called[part]], 1)
        np.add.at(known, of[some], 1)
        numbers.extend(of[some], int(np.count_nonzero(some)))
        lengths_ns.extend((layer.end_ns[part] - layer.start_ns[part])[some], int(np.count_nonzero(some)))
    there = np.flatnonzero(count)
    last = np.cumsum(known[there], dtype=np.int32)
    in_order = sort_within(numbers.whole(), lengths_ns.whole())
    return Functions(names[there], layers[there], count[there], last - known[there], last, in_order)
