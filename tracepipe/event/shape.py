"""Shapes: all of a record but its time, duration, launch and arguments, which many records share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tracepipe.event.columns import NO_INDEX, AnyArray, Index, Three
from tracepipe.event.model import HOST_LAYERS
from tracepipe.event.vocabulary import RUNNING, WAKEUP, direction_named

if TYPE_CHECKING:
    from tracepipe.event.tables import Tables


TEXTS: Final = ("name", "comm", "layer", "domain")
"""The fields of a shape whose texts a recording may state at any length."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A recording has millions of events and some hundred shapes. Fields are those of `model.Event`, None
    where the record does not have them; `clock` is None for the recording's own. `block` is the size of a
    kernel's blocks, never the index of a thread's block, which is no part of a shape. `layer` is a hook's.
    """

    type: str
    name: str
    phase: str
    pid: int | None = None
    tid: int | None = None
    cpu: int | None = None
    comm: str | None = None
    clock: str | None = None
    gpu: int | None = None
    stream: int | None = None
    grid: Three | None = None
    block: Three | None = None
    has_dur: bool = False
    has_launch: bool = False
    layer: str | None = None
    domain: str | None = None
    range: int | None = None

    @property
    def on_stream(self) -> bool:
        """Whether its events are drawn on a stream of a GPU."""
        return self.type == "gpu_kernel" or (self.type == "transfer" and self.gpu is not None)

    @property
    def on_gpu(self) -> bool:
        """Whether its events are drawn under a GPU: its work, and what another tool recorded of it."""
        return self.on_stream or (self.type == "hook" and self.gpu is not None and self.pid is None)

    @property
    def drawn_layer(self) -> str:
        """The layer of its thread on which it nests. Functions that schedule the GPU's work nest with the
        driver's.
        """
        calls = self.type == "scheduler" and self.phase != "I" and self.name != RUNNING
        return "kernel" if calls else self.type

    @property
    def is_switch(self) -> bool:
        """Whether its events are context switches: a thread gets a processor, leaves it, or is woken."""
        named = (self.name, self.phase) in ((RUNNING, "B"), (RUNNING, "E"), (WAKEUP, "I"))
        return self.type == "scheduler" and named and self.tid is not None and self.cpu is not None

    @property
    def row(self) -> tuple[object, ...] | None:
        """The key of all shapes whose events nest with each other; None for those that do not nest."""
        if self.on_stream:
            return ("gpu", self.gpu or 0, self.stream or 0)
        if self.on_gpu:
            return (self.type, self.layer, "gpu", self.gpu, self.stream)
        if self.type == "annotation":
            # Ranges of a thread nest in their domain. Those of a process have a row for each number.
            return (self.type, self.pid, self.tid if self.range is None else None, self.domain, self.range)
        if self.type in HOST_LAYERS:
            return (self.drawn_layer, self.layer, self.pid, self.tid)
        return None


def shape_of(record: Mapping[str, Any]) -> Shape:
    """The shape of a good record of an event."""
    get = record.get
    kind, grid = record["type"], get("grid")
    block = None if kind == "gpu_thread" else get("block")
    name = record["name"]
    return Shape(
        kind,
        direction_named(name) if kind == "transfer" else name,
        record["phase"],
        get("pid"),
        get("tid"),
        get("cpu"),
        get("comm"),
        get("clock"),
        get("gpu"),
        get("stream"),
        (grid[0], grid[1], grid[2]) if grid else None,
        (block[0], block[1], block[2]) if block else None,
        "dur_ns" in record,
        "launch" in record,
        (get("layer") or None) if kind == "hook" else None,
        get("domain") if kind == "annotation" else None,
        get("range") if kind == "annotation" else None,
    )


def index_of(record: Mapping[str, Any]) -> Index | None:
    """The block and the thread of a good record; None where it has neither."""
    if record["type"] != "gpu_thread" or not ("block" in record or "thread" in record):
        return None
    nowhere = NO_INDEX[:3]
    return (*record.get("block", nowhere), *record.get("thread", nowhere))


class ShapeColumn:
    """A number for each shape of a recording, which is computed once. `value` gets a shape and its number."""

    def __init__(self, tables: Tables, value: Callable[[Shape, int], int], kind: type[np.generic]) -> None:
        self._tables, self._value, self._rounds = tables, value, 0
        self._values: AnyArray = np.zeros(2, kind)

    def values(self) -> AnyArray:
        """The numbers by the numbers of shapes. The last two are 0: those of rows without a shape."""
        tables, ends = self._tables, self._values[-2:]
        if self._rounds != tables.shape_rounds:
            self._rounds, self._values = tables.shape_rounds, ends
        known = len(self._values) - 2
        if known < len(tables.shapes):
            new = [
                0 if shape is None else self._value(shape, number)
                for number, shape in enumerate(tables.shapes[known:], known)
            ]
            self._values = np.concatenate([self._values[:known], np.array(new, ends.dtype), ends])
        return self._values
