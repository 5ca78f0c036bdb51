"""One event, and one warp, on the trace's clock, with a name for each of its fields."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

if TYPE_CHECKING:
    from tracepipe.event.shape import Shape
    from tracepipe.event.stacks import Frame

Three = tuple[int, int, int]
_NO_ARGS: Mapping[str, Any] = MappingProxyType({})


class Args:
    """The arguments of one or more events, parsed when they are first asked for."""

    __slots__ = ("_parsed", "_text")

    def __init__(self, text: bytes, parsed: Mapping[str, Any] | None = None) -> None:
        """`parsed` are the arguments, where they cannot be parsed from their text."""
        self._text = text
        self._parsed = None if parsed is None else MappingProxyType(parsed)

    def get(self) -> Mapping[str, Any]:
        """All arguments, by name. They are read-only, as other events may share them."""
        if self._parsed is None:
            self._parsed = MappingProxyType(orjson.loads(self._text))
        return self._parsed


class Event:
    """One event of a recording. What was not recorded is None.

    `ts_ns` is the time of the event on the trace's clock, or the start of an X. `dur_ns` is known for an X
    and for some E. `launch` is the same number on a launch call, its kernel and its warps. `source_ns` is the
    reading of the event's own clock, where that is not the trace's. `bound_ns` is by how much the time may be
    wrong: 0 on the trace's own clock, None where the clock was placed by an assumed offset, whose error is
    not known. `stack` has the Python frames of a call, innermost first, each with `function`, `file` and
    `line`. Kernels and copies have those of their launch.
    """

    __slots__ = ("_args", "_index", "_shape", "bound_ns", "dur_ns", "launch", "source_ns", "stack", "ts_ns")

    _SHOWN: tuple[str, ...] = (
        "ts_ns", "dur_ns", "layer", "name", "phase", "pid", "tid", "cpu", "comm", "gpu", "stream", "launch",
        "grid", "block", "thread", "clock", "source_ns",
    )  # fmt: skip

    def __init__(
        self,
        ts_ns: int,
        shape: Shape,
        args: Args | None,
        dur_ns: int | None,
        launch: int | None,
        source_ns: int | None,
        bound_ns: int | None,
    ) -> None:
        self.ts_ns = ts_ns
        self._shape = shape
        self._args = args
        self.dur_ns = dur_ns
        self.launch = launch
        self.source_ns = source_ns
        self.bound_ns = bound_ns
        self._index: tuple[Three | None, Three | None] | None = None
        self.stack: tuple[Frame, ...] | None = None

    def put_thread(self, index: tuple[Three | None, Three | None] | None) -> None:
        """Set the block and the thread of a `gpu_thread`."""
        self._index = index

    @property
    def end_ns(self) -> int | None:
        """The end of an X, the time of an E; None for a B and an I."""
        if self._shape.phase == "X":
            return self.ts_ns + (self.dur_ns or 0)
        return self.ts_ns if self._shape.phase == "E" else None

    @property
    def layer(self) -> str:
        """One of `userspace`, `syscall`, `kernel`, `scheduler`, `memory`, `transfer`, `gpu_kernel`,
        `gpu_warp`, `gpu_thread`; for a hook the name of its own layer, or `hook`.
        """
        return self._shape.layer or self._shape.type

    @property
    def name(self) -> str:
        """Function, system call, kernel or operation."""
        return self._shape.name

    @property
    def phase(self) -> str:
        """B begin, E end, I instant, X a whole slice."""
        return self._shape.phase

    @property
    def pid(self) -> int | None:
        """Process id."""
        return self._shape.pid

    @property
    def tid(self) -> int | None:
        """Thread id."""
        return self._shape.tid

    @property
    def cpu(self) -> int | None:
        """Processor on which it happened."""
        return self._shape.cpu

    @property
    def comm(self) -> str | None:
        """The thread's name, on the first event after it got that name."""
        return self._shape.comm

    @property
    def gpu(self) -> int | None:
        """Index of the GPU."""
        return self._shape.gpu

    @property
    def stream(self) -> int | None:
        """Id of the CUDA stream."""
        return self._shape.stream

    @property
    def grid(self) -> Three | None:
        """Blocks of the grid in x, y, z."""
        return self._shape.grid

    @property
    def block(self) -> Three | None:
        """Threads of a block in x, y, z; for a `gpu_thread`, the index of its block."""
        return self._shape.block if self._index is None else self._index[0]

    @property
    def thread(self) -> Three | None:
        """The index of a `gpu_thread` in its block."""
        return None if self._index is None else self._index[1]

    @property
    def clock(self) -> str | None:
        """The clock with which it was recorded; None for the recording's own."""
        return self._shape.clock

    @property
    def args(self) -> Mapping[str, Any]:
        """Arguments, results and whatever else is known, by name; empty where there are none."""
        return _NO_ARGS if self._args is None else self._args.get()

    def __repr__(self) -> str:
        known = [(name, getattr(self, name)) for name in self._SHOWN]
        shown = [f"{name}={value!r}" for name, value in known if value is not None]
        shown += [f"bound_ns={self.bound_ns}"] if self.source_ns is not None else []
        shown += [f"stack={[str(frame) for frame in self.stack]!r}"] if self.stack else []
        shown += [f"args={dict(self.args)!r}"] if self.args else []
        return f"{type(self).__name__}({', '.join(shown)})"


class WarpExit(NamedTuple):
    """Lanes of a warp that left together: a bit of `mask` for each, `cycles` since the warp's entry."""

    ts_ns: int
    mask: int | None
    cycles: int | None


class WarpRange(NamedTuple):
    """A range of a warp, with the name from the kernel's source. `cycles` are those of the SM. `is_open` is
    whether its end is not known; it is then taken to be the warp's last exit.
    """

    name: str
    ts_ns: int
    dur_ns: int
    cycles: int
    is_open: bool


class Warp(Event):
    """One warp of a kernel, from its entry (`ts_ns`) to its last exit (`end_ns`); `name` is the kernel's.

    `warp` is its number in the grid. `block_index` is the number of its block, and `warp_in_block` its number
    there; both are None where the size of a block is not known. `slot` is the hardware slot on its `sm`.
    `entry_mask` has a bit for each lane that entered. A warp that was running when the record ended has no
    exit, no `dur_ns` and the phase B; others have X.
    """

    __slots__ = ("block_index", "entry_mask", "exits", "ranges", "slot", "sm", "warp", "warp_in_block")

    _SHOWN = (
        *Event._SHOWN[:5], "warp", "block_index", "warp_in_block", "sm", "slot", "entry_mask", "exits",
        *Event._SHOWN[5:],
    )  # fmt: skip

    warp: int
    block_index: int | None
    warp_in_block: int | None
    sm: int | None
    slot: int | None
    entry_mask: int | None
    exits: tuple[WarpExit, ...]
    ranges: tuple[WarpRange, ...]

    @property
    def cycles(self) -> int | None:
        """Cycles of the SM's clock from the entry to the last exit."""
        cycles = [one.cycles for one in self.exits if one.cycles is not None]
        return max(cycles, default=None)
