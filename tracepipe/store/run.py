"""A recording as the reports use it: the columns of its layers, its shapes, arguments, warps and facts."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property, wraps
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import numpy as np

from tracepipe.errors import OutputError
from tracepipe.event.columns import NONE, Bools, Bytes, Int32s, Int64s
from tracepipe.event.stacks import Stacks
from tracepipe.kernel_names import short_kernel_name
from tracepipe.store import views
from tracepipe.store.args import ArgsTable
from tracepipe.store.cache import forget, kept_or_built
from tracepipe.store.samples import SERIES, GpuSamples
from tracepipe.store.schema import FROM_DURATION, INSTANT, KINDS, NO_BEGIN, SPAN, SPANS
from tracepipe.store.shapes import ShapeTable
from tracepipe.store.stalls import StallTable
from tracepipe.store.store import Facts, Store, stacks_of
from tracepipe.store.warps import WarpTable

if TYPE_CHECKING:
    from tracepipe.recording.files import Progress

    Ints = np.ndarray[Any, np.dtype[np.integer[Any]]]

Answer = TypeVar("Answer")
Relation = Any
"""A relation of DuckDB: `.df()`, `.pl()`, `.arrow()`, `.fetchall()`, `.filter(…)`."""

__all__ = ["Facts", "Layer", "Run", "load_run"]
# The columns that are None where no row has a value, and which of `Store.has` says so.
_OPTIONAL: Final = {
    "launch": "launch", "stack": "stack", "source_ns": "moved", "end_source_ns": "moved", "bound_ns": "moved",
}  # fmt: skip
# A question about a few rows takes as long as reading a column and a half.
_FEW: Final = 16
# What DuckDB may use for the questions of users.
_ASKED_MB: Final = 1_000
_OF_THREADS: Final[dict[str, int]] = {
    "kind": INSTANT,
    "depth": 0,
    "lane": 0,
    "parent": NONE,
    "end_args": NONE,
}
"""The values of all events of single threads of a GPU, which do not nest."""


class Layer:
    """A row for each slice and instant of a layer, sorted by start. Columns have the shape `(rows,)`; they
    are those of `schema.SPANS`, and are read when they are first used.

    `kind` is an index into `KINDS`. `shape`, `args` and `stack` are numbers of the begin, and `end_args` of
    the end, NONE without a value. `parent` is the row of the innermost slice around it in this layer, or
    NONE. `launch`, `stack`, `source_ns`, `end_source_ns`, `bound_ns` and `index` are None where no row has a
    value.
    """

    start_ns: Int64s
    end_ns: Int64s
    kind: Bytes
    depth: Int32s
    parent: Int32s
    top: Int32s
    lane: Bytes
    shape: Int32s
    args: Int32s
    end_args: Int32s
    launch: Int64s | None
    bound_ns: Int64s | None
    source_ns: Int64s | None
    end_source_ns: Int64s | None
    stack: Int32s | None

    def __init__(self, store: Store, table: str) -> None:
        self._store, self._table = store, table
        self._count = store.count(table)

    def __len__(self) -> int:
        return self._count

    def __getattr__(self, name: str) -> Any:
        if name not in SPANS or name == "id":
            raise AttributeError(name)
        if name in _OPTIONAL and not self._store.has(self._table, _OPTIONAL[name]):
            column = None
        elif self._table == "gpu_thread" and name in _OF_THREADS:
            column = np.broadcast_to(SPAN_KINDS[name](_OF_THREADS[name]), self._count)
        elif self._table == "gpu_thread" and name == "end_ns":
            column = self.start_ns
        elif self._table == "gpu_thread" and name not in (
            "start_ns",
            "shape",
            "args",
            "launch",
            "source_ns",
            "bound_ns",
        ):
            column = None
        else:
            column = self._store.by_id(self._table, (name,))[name]
        setattr(self, name, column)
        return column

    def read(self, rows: Ints, columns: Sequence[str]) -> dict[str, Any]:
        """Columns of some rows, which are sorted and different, without reading the rest."""
        names = ", ".join(columns)
        return self._store.columns(
            f'select {names} from store."{self._table}" where id in (select id from wanted) order by id',
            wanted={"id": rows.astype(np.int32)},
        )

    @cached_property
    def index(self) -> Int32s | None:
        """The index of a block and that of a thread in it, x, y and z each, for events of single threads of a
        GPU. Shape `(rows, 6)`.
        """
        if not self._store.has(self._table, "index"):
            return None
        names = [f"{what}_{axis}" for what in ("block", "thread") for axis in "xyz"]
        found = self._store.by_id(self._table, names)
        return np.stack([found[name] for name in names], axis=1)

    @cached_property
    def has_length(self) -> Bools:
        """Flags the rows whose length is known."""
        return self.rows(slice(None)).has_length

    @property
    def is_call(self) -> Bools:
        """Flags all rows except ends without a begin."""
        calls: Bools = self.kind != NO_BEGIN
        return calls

    @property
    def is_outermost(self) -> Bools:
        """Flags the slices that are inside no other: their lengths can be summed."""
        outermost: Bools = (self.parent == NONE) & (self.kind != INSTANT)
        return outermost

    def rows(self, rows: Ints | slice, *columns: str) -> LayerRows:
        """Some rows, in which `parent` is still a row of the whole layer. Of few rows, the named columns are
        read at once, and only there.
        """
        return LayerRows(self, rows, columns)

    def lengths_ns(self, rows: Ints | Bools) -> Int64s:
        """The known lengths of some rows, which are flags or row numbers. Shape `(known,)`."""
        numbers: Ints = np.flatnonzero(rows) if rows.dtype == np.bool_ else cast("Ints", rows)
        some = self.rows(numbers, "kind", "start_ns", "end_ns")
        lengths_ns: Int64s = (some.end_ns - some.start_ns)[some.has_length]
        return lengths_ns


class LayerRows:
    """Some rows of a layer. It has the same columns."""

    def __init__(self, layer: Layer, rows: Ints | slice, columns: Sequence[str] = ()) -> None:
        self._layer, self._rows = layer, rows
        unread = [name for name in columns if name not in layer.__dict__]
        if unread and not isinstance(rows, slice) and len(rows) * _FEW < len(layer):
            ids, at = np.unique(rows, return_inverse=True)
            for name, column in layer.read(ids, unread).items():
                setattr(self, name, column[at])

    def __getattr__(self, name: str) -> Any:
        column = getattr(self._layer, name)
        return None if column is None else column[self._rows]

    @property
    def has_length(self) -> Bools:
        """Flags the rows whose length is known."""
        known: Bools = (self.kind == SPAN) | (self.kind == FROM_DURATION)
        return known


SPAN_KINDS: Final[dict[str, Any]] = {
    "kind": np.uint8, "lane": np.uint8, "depth": np.int32, "parent": np.int32, "end_args": np.int32,
}  # fmt: skip


class Run:
    """A recording in a store. `layer` has the columns of a layer, `values` a few values of some rows, and
    `store` answers questions about the tables of `schema.TABLES`.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.facts: Facts = store.facts()
        self.shapes = ShapeTable(store)
        self.args = ArgsTable(store.folder, store.fact("args_count"))
        self.warp_table = WarpTable(store)
        self._layers: dict[str, Layer] = {}
        self.answers: dict[Any, Any] = {}
        """Those of functions with `once_a_run`."""

    @cached_property
    def stacks(self) -> Stacks:
        """The stacks of Python that were recorded."""
        return stacks_of(self.store)

    @cached_property
    def stall_table(self) -> StallTable:
        """The sums of stall samples."""
        return StallTable.of_state(self.store.fact("stalls"))

    @cached_property
    def loss_columns(self) -> dict[str, list[Any]]:
        """The stretches in which events were lost, in file order: layer, count, start_ns, dur_ns, cpu,
        reason; None where a value was not recorded.
        """
        names = ("layer", "count", "start_ns", "dur_ns", "cpu", "reason")
        rows = self.store.rows("select * from store.losses")
        return {name: [row[at] for row in rows] for at, name in enumerate(names)}

    @cached_property
    def gpu_samples(self) -> dict[int, GpuSamples]:
        """The samples of the counters of each GPU."""
        found = self.store.columns("select * from store.gpu_samples")
        samples = {}
        for gpu in sorted(set(found["gpu"].tolist())):
            own = found["gpu"] == gpu
            # DuckDB takes NaN for a missing value.
            values = np.stack([np.ma.filled(found[name], np.nan)[own] for name in SERIES], axis=1)
            samples[gpu] = GpuSamples(found["start_ns"][own], found["end_ns"][own], values)
        return samples

    def layer(self, name: str) -> Layer:
        """The columns of a layer, which is one of `FRAMES`."""
        if name not in self._layers:
            self._layers[name] = Layer(self.store, name)
        return self._layers[name]

    def forget_columns(self) -> None:
        """Free the columns of layers, and the answers made of them; both are made again when needed."""
        self._layers.clear()
        self.answers.clear()

    def has(self, column: str, value: Hashable, layer: Layer) -> Bools:
        """Flags the rows of a layer whose shapes have a value in a column. Shape `(rows,)`."""
        number = self.shapes.number_of(column, value)
        every = np.arange(len(self.shapes), dtype=np.int32)
        flagged: Bools = (self.shapes.column(column, every) == number)[layer.shape]
        return flagged

    def used_shapes(self, name: str) -> Bools:
        """Flags the shapes that rows of a layer have. Shape `(shapes,)`."""
        used = np.zeros(len(self.shapes), np.bool_)
        found = self.store.columns(f"select shape from store.shape_sums where layer = '{name}'")
        used[found["shape"]] = True
        return used

    def values(self, name: str, rows: Ints | slice, *columns: str) -> dict[str, list[Any]]:
        """A few columns of some rows of a layer as lists, None where a value is not known: those of `Shape`
        (`name`, `pid`, …), start_ns, end_ns, dur_ns (None for instants and calls without an end), kind (one
        of `KINDS`), depth, lane, parent, launch, bound_ns, size_bytes, address, result (of the end, else of
        the begin), args and end_args (JSON text), kernel (the longest name that the recording has for a
        kernel), stack, python (the user's line), thread (of a GPU).
        """
        layer, found = self.layer(name), {}
        for column in columns:
            found[column] = self._values(layer, rows, column)
        return found

    def _values(self, layer: Layer, rows: Ints | slice, name: str) -> list[Any]:
        shape = layer.shape[rows]
        if name in ("start_ns", "end_ns", "depth", "lane"):
            return _list(getattr(layer, name)[rows])
        if name == "kind":
            return [KINDS[kind] for kind in layer.kind[rows].tolist()]
        if name == "dur_ns":
            return _known(layer.end_ns[rows] - layer.start_ns[rows], layer.has_length[rows])
        if name in ("parent", "stack"):
            column = getattr(layer, name)
            return [None] * len(shape) if column is None else _known(column[rows], column[rows] != NONE)
        if name == "launch":
            launch = np.zeros(len(shape), np.int64) if layer.launch is None else layer.launch[rows]
            return _known(launch.view(np.uint64), self.shapes.has_launch(shape))
        if name == "bound_ns":
            if layer.bound_ns is None or layer.source_ns is None:
                return [None] * len(shape)
            # A time that was recorded on the trace's clock has no error from an alignment.
            return _known(layer.bound_ns[rows], layer.source_ns[rows] != NONE)
        if name in ("size_bytes", "result"):
            of = self.args.size_bytes if name == "size_bytes" else self.args.result
            return _known(*of(layer.args[rows], layer.end_args[rows]))
        if name == "address":
            return self.args.addresses(layer.args[rows], layer.end_args[rows])
        if name in ("args", "end_args"):
            source_ns = layer.source_ns if name == "args" else layer.end_source_ns
            texts = self.args.jsons(getattr(layer, name)[rows])
            return texts if source_ns is None else list(map(_with_source, texts, source_ns[rows].tolist()))
        if name == "python":
            if layer.stack is None:
                return [None] * len(shape)
            frames = self.stacks.frames
            return [
                None if at == NONE else str(frames[at]) for at in self.stacks.own(layer.stack[rows]).tolist()
            ]
        if name == "kernel":
            shorts, wholes = self.shapes.values("name", shape), self.shapes.values("kernel", shape)
            of_args = self.args.texts_of("function", layer.args[rows])
            return [
                one if one is not None and short_kernel_name(one) == short else recorded or short
                for short, recorded, one in zip(shorts, wholes, of_args, strict=True)
            ]
        if name == "thread" or (name == "block" and layer.index is not None):
            if layer.index is None:
                return [None] * len(shape)
            index = layer.index[rows][:, 3:] if name == "thread" else layer.index[rows][:, :3]
            return _known(index, index[:, 0] != NONE)
        if name in ("grid", "block"):
            known = self.shapes.values(name, shape)
            if None not in known:
                return known
            of_args_3 = self.args.sizes(name, layer.args[rows])
            return [one or other for one, other in zip(known, of_args_3, strict=True)]
        return self.shapes.values(name, shape)

    def table(self, name: str) -> Relation:
        """One of `views.VIEWS` as a relation of DuckDB, with its rows in order: `.df()`, `.pl()`, `.arrow()`,
        `.fetchall()`, `.filter(…)`.
        """
        return self.sql(views.question(name))

    def sql(self, question: str) -> Relation:
        """The answer to a question in DuckDB's SQL about `views.VIEWS`, as a relation."""
        self.connection.execute(f"set memory_limit = '{_ASKED_MB}MB'")
        return self.connection.sql(question)

    @cached_property
    def connection(self) -> Any:
        """A connection of DuckDB that has `views.VIEWS`."""
        self.store.connection.execute(f"set memory_limit = '{_ASKED_MB}MB'")
        views.create(self)
        return self.store.connection

    if TYPE_CHECKING:
        annotations: Relation
        calls: Relation
        hooks: Relation
        syscalls: Relation
        driver: Relation
        scheduler: Relation
        host_samples: Relation
        kernels: Relation
        warps: Relation
        exits: Relation
        ranges: Relation
        gpu_threads: Relation
        memory: Relation
        transfers: Relation
        losses: Relation
    else:

        def __getattr__(self, name: str) -> Relation:
            if name in views.VIEWS:
                return self.table(name)
            raise AttributeError(f"'Run' object has no attribute {name!r}", name=name, obj=self)

    def thread_name(self, pid: int | None, tid: int | None) -> str | None:
        """The last name of a thread."""
        return self.shapes.thread_name(pid, tid)

    def process_name(self, pid: int | None) -> str:
        """The last name of the process's main thread, else the command that was recorded."""
        if pid is None:
            return "process (pid not recorded)"
        command = self.facts.header.command
        recorded = PurePath(command[0]).name if command else "process"
        # Formats without thread ids only name the process.
        given = self.shapes.given_name(pid, None)
        return given or self.thread_name(pid, pid) or self.thread_name(pid, None) or recorded


def once_a_run(function: Callable[[Run], Answer]) -> Callable[[Run], Answer]:
    """Remember what a function of a run returns, which nobody may change."""

    @wraps(function)
    def remembered(run: Run) -> Answer:
        if function not in run.answers:
            run.answers[function] = function(run)
        return cast("Answer", run.answers[function])

    return remembered


def _list(values: Any) -> list[Any]:
    found: list[Any] = values.tolist()
    return found


def _known(values: Any, known: Any) -> list[Any]:
    """Values with None where they are not known."""
    return [
        value if is_known else None for value, is_known in zip(values.tolist(), known.tolist(), strict=True)
    ]


def _with_source(text: str | None, source_ns: int) -> str | None:
    """Arguments as JSON text, with the time of their event on its own clock as `source_ns`."""
    if source_ns == NONE:
        return text
    if text is None:
        return f'{{"source_ns":{source_ns}}}'
    if '"source_ns"' in text:
        import orjson

        return orjson.dumps(orjson.loads(text) | {"source_ns": source_ns}).decode()
    return f'{text[:-1]},"source_ns":{source_ns}}}'


def load_run(
    path: str,
    source_format: str = "",
    strict: bool = False,
    assumed: Mapping[str, int | str] | None = None,
    progress: Progress | None = None,
    undated: str = "skip",
) -> Run:
    """Read a recording of any input format into tables, or find the tables in the cache.

    `assumed` and `undated` are as in `open_recording`. Raises InputError (with `strict`, on the first bad
    line), FormatError, ClockError, OutputError and LibraryMissing.
    """
    how = {
        "format": source_format,
        "strict": strict,
        "assumed": assumed and sorted(assumed.items()),
        "undated": undated,
    }

    def write(folder: Path) -> None:
        # Imports that take long, and that are not needed where the tables are found.
        from tracepipe.recording.inputs import InputOptions
        from tracepipe.store.build import build

        build(folder, path, InputOptions(source_format, strict, assumed or {}, undated), progress)

    folder, is_kept = kept_or_built(path, how, write)
    try:
        run = Run(Store(folder))
    except OutputError:
        forget(folder)
        if not is_kept:
            raise
        # Tables that a full disk or a crash left unreadable.
        folder, is_kept = kept_or_built(path, how, write)
        run = Run(Store(folder))
    if not is_kept:
        weakref.finalize(run, shutil.rmtree, folder, ignore_errors=True)
    return run
