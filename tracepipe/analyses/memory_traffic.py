"""The bytes that were allocated and copied, by events of memory and copies, or by the calls that did it."""

from __future__ import annotations

from typing import Any

from tracepipe.analyses.cuda_calls import directions, rows_by_effect
from tracepipe.analyses.distribution import rank
from tracepipe.event.columns import Int64s
from tracepipe.event.groups import RowsByNumber
from tracepipe.event.vocabulary import MEMORY_IN_USE
from tracepipe.hooks.sets import MEMORY_EFFECTS, effect_of
from tracepipe.libraries import np
from tracepipe.reports.report import Column, Table
from tracepipe.store.run import Layer, Run

_ON_GPU = " (GPU)"
Pieces = dict[str, list[tuple[Layer, Int64s]]]
"""Operation on memory → the layers and rows of its events."""


def _all_of(run: Run, name: str, found: Pieces) -> None:
    """Add all events of a layer; those on a GPU get a separate name."""
    layer = run.layer(name)
    names = run.shapes.column("name", layer.shape)
    on_gpu = ~run.has("gpu", None, layer) if name == "transfer" else np.zeros(len(layer), np.bool_)
    kinds = RowsByNumber(names.astype(np.int64) * 2 + on_gpu)
    for number, rows in sorted(kinds, key=lambda kind: int(kind[1][0])):
        what = run.shapes.value("name", number // 2)
        found.setdefault(what + _ON_GPU if number % 2 else what, []).append((layer, rows))


def _of_calls(run: Run, found: Pieces, *, copies: bool) -> None:
    """Add the allocations and frees of calls that succeeded; with `copies`, also their copies."""
    calls = run.layer("userspace")
    for effect, rows in rows_by_effect(run).items():
        results, known = run.args.result(calls.args[rows], calls.end_args[rows])
        rows = rows[~known | (results == 0)]
        if effect != "transfer" and len(rows):
            found.setdefault(effect, []).append((calls, rows))
        elif copies and len(rows):
            by_direction: dict[str, list[int]] = {}
            for row, direction in zip(rows.tolist(), directions(run, rows), strict=True):
                by_direction.setdefault(direction, []).append(row)
            for direction, some in by_direction.items():
                found.setdefault(direction, []).append((calls, np.array(some, np.int64)))


def memory_traffic(run: Run) -> list[Table]:
    """Allocations and copies, in total and by operation: how many, how large, how fast."""
    note = (
        "Rate: bytes divided by the time of the call that copied them; for “(GPU)”, by the time of the copy "
        "on the GPU."
    )
    found: Pieces = {}
    _all_of(run, "memory", found)
    found.pop(MEMORY_IN_USE, None)  # it moves nothing
    from_calls = not found.keys() & set(MEMORY_EFFECTS) and len(run.layer("userspace")) > 0
    if from_calls:
        _of_calls(run, found, copies=not len(run.layer("transfer")))
        note += " The recording has no memory events: allocations are those of the calls that succeeded."
    _all_of(run, "transfer", found)
    rows = [_row(run, what, pieces) for what, pieces in found.items()]
    columns = (
        Column("what", ""),
        Column("count", "count", "count"),
        Column("total_bytes", "bytes", "bytes"),
        Column("p50_bytes", "p50", "bytes"),
        Column("max_bytes", "largest", "bytes"),
        Column("total_ns", "time", "ns"),
        Column("bytes_per_s", "rate", "bytes_per_s"),
        Column("p50_bytes_per_s", "p50", "bytes_per_s"),
    )
    # A copy that both a call and the GPU recorded counts once.
    copies = [what for what, ((layer, _), *_) in found.items() if _is_copy(run, what, layer)]
    by_calls = [what for what in copies if not what.endswith(_ON_GPU)]
    allocated = [row for row in rows if row[0] == "alloc" or effect_of(row[0])[0] == "alloc"]
    copied = [row for row in rows if row[0] in (by_calls or copies)]
    in_all: list[int | None] = []
    for some in (allocated, copied):
        sizes = [size_bytes for _, _, size_bytes, *_ in some if size_bytes is not None]
        in_all += [sum(sizes) if sizes or not some else None, sum(count for _, count, *_ in some)]
    of_all = (
        Column("allocated_bytes", "allocated", "bytes"),
        Column("allocations", "allocations", "count"),
        Column("copied_bytes", "copied", "bytes"),
        Column("copies", "copies", "count"),
    )
    return [
        Table("bytes", "Total bytes", of_all, [tuple(in_all)] if allocated or copied else []),
        Table("memory", "Memory and copies", columns, rows, note),
    ]


def _is_copy(run: Run, what: str, layer: Layer) -> bool:
    """Whether events of a layer are copies. The time of an allocation does not depend on its size."""
    return layer is not run.layer("memory") and what not in MEMORY_EFFECTS


def _row(run: Run, what: str, pieces: list[tuple[Layer, Int64s]]) -> tuple[Any, ...]:
    known_bytes, known_ns, rates, timed_bytes, took_ns = [], [], [], 0, 0
    for layer, rows in pieces:
        size_bytes, is_sized = run.args.size_bytes(layer.args[rows], layer.end_args[rows])
        dur_ns, has_length = layer.end_ns[rows] - layer.start_ns[rows], layer.has_length[rows]
        timed = is_sized & has_length & (dur_ns > 0) & _is_copy(run, what, layer)
        timed_bytes += int(size_bytes[timed].sum())
        took_ns += int(dur_ns[timed].sum())
        known_bytes.append(size_bytes[is_sized])
        known_ns.append(dur_ns[has_length])
        rates.append(size_bytes[timed] / dur_ns[timed] * 1e9)
    sizes, lengths_ns = np.concatenate(known_bytes), np.concatenate(known_ns)
    return (
        what,
        sum(len(rows) for _, rows in pieces),
        int(sizes.sum()) if len(sizes) else None,
        rank(sizes, 50),
        rank(sizes, 100),
        int(lengths_ns.sum()) if len(lengths_ns) else None,
        timed_bytes * 1e9 / took_ns if took_ns else None,
        rank(np.concatenate(rates), 50),
    )
