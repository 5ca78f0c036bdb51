"""What an engine must do, and whoever takes what it collects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from tracepipe.capture.records.carry import Carried, Carry
from tracepipe.capture.records.line import Lines
from tracepipe.capture.records.loss import Loss
from tracepipe.capture.records.spans import SpanReader, Wanted
from tracepipe.capture.request import Cause, Notify, Plan
from tracepipe.errors import OutputError


class Turn(NamedTuple):
    """A window that began or ended by a function's call, in the order in which the recording tells it."""

    ts_ns: int
    begins: bool


class Collector(Protocol):
    """Takes what a recording collects, in order."""

    def begin(self, plan: Plan, start_ns: int) -> None:
        """What will come: records of this plan, from `start_ns` on CLOCK_MONOTONIC. Before all else."""
        ...

    def put(self, chunk: bytes) -> None:
        """Take whole records."""
        ...

    def put_loss(self, loss: Loss) -> None:
        """Take a loss, after the records that came before it."""
        ...

    def finish(self) -> None:
        """No more comes."""
        ...


@runtime_checkable
class Store(Collector, Protocol):
    """A collector that can tell of all that it took, when it is done."""

    error: Exception | None
    """Why it takes no more: an OutputError or a bug. What is put from then on is counted as lost."""
    cpu_losses: dict[str, dict[int, int]]

    @property
    def size_bytes(self) -> int:
        """What has been written, or will be."""
        ...

    @property
    def counts(self) -> dict[str, int]:
        """Layer → events."""
        ...

    @property
    def losses(self) -> dict[str, int]:
        """Layer → events lost."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Whether all is done, after waiting for it for at most `timeout_s`."""
        ...

    def abandon(self) -> None:
        """Leave out what is not done yet, and count it."""
        ...

    def close(self) -> None:
        """End it, done or not."""
        ...


class Decoder(Protocol):
    """Turns records into lines of an event file."""

    def render(self, chunk: bytes) -> Lines:
        """Lines of one chunk; chunks come in the order in which they were collected."""
        ...

    def counts(self, chunk: bytes) -> Mapping[str, int]:
        """Layer → events of the records in a chunk, which is not rendered."""
        ...

    def carry(self) -> Carry:
        """What keeps of dropped records what such a decoder needs of them."""
        ...

    def resume(self, carried: Carried, start_ns: int) -> Lines:
        """Begin where records were dropped before: lines of what is under way, which begins at `start_ns`."""
        ...


class Renderer(Decoder, Protocol):
    """The decoder of what a recording collected."""

    def learn(self, chunk: bytes) -> None:
        """Take from a chunk what lines before it need; for recordings that are unordered."""
        ...


class DeviceRenderer(Decoder, Protocol):
    """The decoder of what a library in the command collected, whose chunks come whole."""

    @property
    def news(self) -> Sequence[str]:
        """Notes that are known before the recording ends, in order; `notes` begins with them."""
        ...

    @property
    def notes(self) -> list[str]:
        """What the user should know."""
        ...

    @property
    def losses(self) -> dict[str, int]:
        """Layer → losses that it found itself."""
        ...

    @property
    def gpus(self) -> list[dict[str, Any]]:
        """The GPUs that were met, as a header has them."""
        ...

    def rest(self) -> Iterator[Lines]:
        """More lines of the last chunk, some thousand at a time: all at once would take hundreds of MB."""
        ...

    def last(self) -> Lines:
        """Lines of what waited for something that has not come, when no more comes."""
        ...

    def spans(self, wanted: Wanted) -> SpanReader:
        """What finds among such records calls and kernels that took long."""
        ...

    def anew(self) -> DeviceRenderer:
        """A renderer like this one that has taken nothing."""
        ...


class DeviceEngine(Protocol):
    """A library in the target's processes that tells what their GPUs do."""

    name: str
    layers: frozenset[str]
    """What it records; `userspace` among them: its calls are taken, and no probes set for them."""
    clocks: Sequence[str]
    """Clocks that its times can be on other than CLOCK_MONOTONIC."""
    gpus: Sequence[Mapping[str, Any]]
    """The GPUs that there are, as a header has them: index, name, uuid, sm_count."""
    counters: Sequence[Mapping[str, Any]]
    """What is sampled of the GPUs' hardware, as a header has it."""
    sees: Mapping[str, Path]
    """What begins and ends windows, by its kind, that a library in the command sees → the library."""

    def environment(self) -> dict[str, str]:
        """What the target must find in its environment."""
        ...

    def enter(self, pids: Sequence[int]) -> None:
        """Record processes that run already, from now on. Raises CaptureUnavailable, TracepipeError."""
        ...

    def collect(self, *, is_final: bool = False) -> bytes:
        """Records since the last call; never waits. `is_final`: the target has ended."""
        ...

    def lost(self) -> list[Loss]:
        """Losses since the last call."""
        ...

    def renderer(self) -> DeviceRenderer:
        """The decoder of what `collect` gives; used on another thread."""
        ...

    def expect_windows(self, waited_for: Mapping[str, str]) -> None:
        """Before a process begins: events are recorded in windows alone, which begin and end by what the
        environment says.
        """
        ...

    def arm(self, windows: int) -> None:
        """From now on processes begin windows, so many, and end them, by what they wait for."""
        ...

    def set_window(self, *, is_open: bool) -> None:
        """Begin a window, or end the one that is open, unless a process has done that."""
        ...

    def hits(self) -> int:
        """How often what begins a window came since `arm`, or since the last one began; of what it sees."""
        ...

    def turns(self) -> list[Turn]:
        """Windows that processes began and ended since the last call."""
        ...

    def turned(self, turn: Turn) -> None:
        """A window of the recording began or ended; without windows, the recording. In order of time."""
        ...

    def stop(self) -> None:
        """Ask the target's processes to record no more, and to be as they were; never waits.

        What they still send is collected until `is_over`.
        """
        ...

    def is_over(self) -> bool:
        """Whether every process has sent its last records and let go, or is gone."""
        ...

    def close(self) -> None:
        """Give the memory back; what the target still tells is left."""
        ...


@dataclass(slots=True)
class Coverage:
    """Layers that a recording gets, and why it does not get the others."""

    got: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)


class Attachment(Protocol):
    """Attached probes that record nothing until they are started; for windows, a `WindowedAttachment`."""

    coverage: Coverage
    filtered: dict[str, int]
    """Layer → events that a filter left out; complete after `stop`."""
    error: OutputError | None
    """Why events were lost that had been taken from the kernel: a recording ends by that."""

    @property
    def is_unordered(self) -> bool:
        """Whether records can stand after later ones, or need what comes after them."""
        ...

    def start(self) -> None:
        """Record what the plan's scope says, from now on; a command from its exec on. Of a plan with windows
        only who is recorded is followed, until one begins.
        """
        ...

    def collect(self) -> bytes:
        """Whole records that were not collected yet, or some of them; b"" if there are none. Never waits."""
        ...

    def lost(self) -> list[Loss]:
        """Losses since the last call."""
        ...

    def renderer(self) -> Renderer:
        """The decoder of what `collect` gives, for a started recording; used on another thread."""
        ...

    def stop(self) -> None:
        """Detach every probe; `collect` and `lost` still give what was recorded before."""
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...


@runtime_checkable
class WindowedAttachment(Attachment, Protocol):
    """Attached probes that can record windows."""

    probed: frozenset[bool]
    """Whether they see what begins windows (True), and what ends them (False)."""

    def prepare(self) -> None:
        """Attach what is recorded in windows, unless it is. Raises CaptureUnavailable."""
        ...

    def rest(self) -> None:
        """Detach what is recorded in windows, where it can be attached again for the next one."""
        ...

    def hits(self) -> int:
        """How often what begins a window was called since `arm`, or since the last one ended."""
        ...

    def asked(self) -> int | None:
        """When a call asked for a window, in which it waits until `let_go`; None if none does."""
        ...

    def let_go(self) -> bool:
        """Let the call that asked for a window go on; whether the window was over before it was begun."""
        ...

    def let_end(self) -> None:
        """Let the call go on that ended a window, where it waits for libraries in the command to follow."""
        ...

    def open_window(self, since_ns: int, at_ns: int | None = None, *, name: str = "") -> int:
        """Begin a window now, which began elsewhere at `at_ns`: its time on CLOCK_MONOTONIC. It is due
        `since_ns`, and begins later where probes are to be attached. Raises CaptureUnavailable.
        """
        ...

    def close_window(self, cause: Cause, at_ns: int | None = None) -> int:
        """End the window that is open, now, which ended elsewhere at `at_ns`: the time."""
        ...

    def arm(self, windows: int) -> None:
        """From now on the plan's functions begin windows, so many, and end them."""
        ...

    def turns(self) -> list[Turn]:
        """Windows that functions began and ended, in what was collected since the last call."""
        ...


class Engine(Protocol):
    """A way to attach probes: one file, and one line in `ENGINES`."""

    name: str
    layers: frozenset[str]

    def check(self) -> str:
        """The engine's version. Raises CaptureUnavailable where it cannot work."""
        ...

    def attach(self, plan: Plan, notify: Notify) -> Attachment:
        """Attach every probe of the plan. Raises CaptureUnavailable."""
        ...
