"""The interfaces of an engine, and of the stores that take what it collects."""

from __future__ import annotations

import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from tracepipe.errors import OutputError
from tracepipe.hooks.hook import HOST_SAMPLE
from tracepipe.tracer.engines.host_stacks import HostStacks
from tracepipe.tracer.records.line import Lines
from tracepipe.tracer.records.record import Loss, window_record
from tracepipe.tracer.records.render import RecordRenderer
from tracepipe.tracer.records.unrendered import Carried, Carry
from tracepipe.tracer.request import Cause, Control, Notify, Plan
from tracepipe.tracer.summary import Recording

# The time that a thread may hold the interpreter while another waits. With the default of 5 ms the collector
# would wait that long three times a tick while lines are rendered.
_SWITCH_S = 0.0005


class Turn(NamedTuple):
    """The begin or end of a window by a function's call, in the order in which the recording has them."""

    ts_ns: int
    begins: bool


@dataclass(frozen=True, slots=True)
class Chunk:
    """Whole records as they were collected, of probes or of the libraries in the command."""

    content: bytes
    of_device: bool = False


@dataclass(frozen=True, slots=True)
class Listeners:
    """Who learns of a recording while it is made: parameters of `tracepipe.tracer.capture`."""

    notify: Notify
    watchers: Sequence[Store] = ()
    control: Control | None = None
    complete: Callable[[], None] = lambda: None


class Store:
    """Takes what a recording collects, in order, and reports what it has taken."""

    is_file = False
    """Whether it writes a file of its own."""
    takes_device = False
    """Whether it takes the records of the library in the command."""
    reports_notes = False
    """Whether it reports the messages about these records itself."""
    recordings: Sequence[Recording] = ()
    """The recordings that were written by request."""
    error: Exception | None = None
    """Why it takes no more: an OutputError or a bug. Events that are put from then on are counted as lost."""
    cpu_losses: dict[str, dict[int, int]]

    @abstractmethod
    def begin(self, plan: Plan, start_ns: int) -> None:
        """Called first: the records of this plan follow, from `start_ns` on CLOCK_MONOTONIC."""

    @abstractmethod
    def put(self, item: Chunk | Loss) -> None:
        """Take records, or a loss after the records that precede it."""

    @abstractmethod
    def finish(self) -> None:
        """Called at the end: no more records follow."""

    @property
    def size_bytes(self) -> int:
        """The size of what has been written, or will be."""
        return 0

    @property
    @abstractmethod
    def counts(self) -> dict[str, int]:
        """Layer → events."""

    @property
    @abstractmethod
    def losses(self) -> dict[str, int]:
        """Layer → events lost."""

    @abstractmethod
    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of its work for at most `timeout_s`; returns whether it has ended."""

    @abstractmethod
    def abandon(self) -> None:
        """Leave out what is not written yet, and count it as lost."""

    @abstractmethod
    def close(self) -> None:
        """End it, whether it is complete or not."""

    def takes_more(self) -> bool:
        """Whether more can be put now."""
        return True

    def write_record(self, record: Mapping[str, Any]) -> None:
        """Write the header or the footer."""

    def follow(self) -> None:
        """Called at each step of the recording, after what has arrived was put."""

    def ask(self, reason: str) -> None:
        """Write the last events."""

    def end(self, reason: str, running: Mapping[str, str]) -> None:
        """Called when the recording has ended, before `finish`, with the processes that still run."""


class ThreadStore(Store):
    """A store that does its work on a thread. `finish` lets that end."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        self._thread = threading.Thread(target=work, name=name, daemon=True)
        self._old_switch_s = sys.getswitchinterval()

    def begin(self, plan: Plan, start_ns: int) -> None:
        """Start to work."""
        sys.setswitchinterval(_SWITCH_S)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether everything that was put is written, added up, or counted as lost."""
        return not self._thread.is_alive()

    def wait(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return self.is_done

    def close(self) -> None:
        self.abandon()
        self.finish()
        if self._thread.ident is not None:
            self._thread.join()
        sys.setswitchinterval(self._old_switch_s)


class Decoder(Protocol):
    """Renders records to lines of an event file."""

    def render(self, chunk: bytes) -> Lines:
        """The lines of one chunk; chunks must come in the order in which they were collected."""

    def counts(self, chunk: bytes) -> Mapping[str, int]:
        """Layer → events of the records in a chunk that is not rendered."""

    def carry(self) -> Carry:
        """A new object that keeps what this kind of decoder needs from evicted records."""

    def resume(self, carried: Carried, start_ns: int) -> Lines:
        """Start after evicted records: returns the lines of what was open, as beginning at `start_ns`."""


class Attachment:
    """Attached probes, which record nothing before `start`. This one has no probes, and records only the
    begins and ends of windows; engines override what they can do.
    """

    is_unordered = False
    """Whether records can follow later ones, or depend on records after them."""
    error: OutputError | None = None
    """Why events that were taken from the kernel were lost, which ends a recording."""
    probed: frozenset[bool] = frozenset()
    """Which triggers the probes see: True for those that begin windows, False for those that end them."""

    def __init__(self, plan: Plan | None = None) -> None:
        self.layers: list[str] = []
        """The layers that are recorded."""
        self.missing: dict[str, str] = {}
        """Layer → why it is not recorded."""
        self.filtered: dict[str, int] = {}
        """Layer → events that a filter left out; complete after `stop`."""
        self._causes = plan.windows.causes if plan and plan.windows else ()
        self._probes, self._values = (plan.probes, plan.values) if plan else ([], {})
        self._is_of_command = plan is None or plan.scope.kind == "command"
        self._syscalls: Mapping[int, str] = {}
        self._start_ns = 0
        self._names: dict[int, str] = {}
        """Names of the threads that ran before `start`."""
        self._turned = b""
        self._host_stacks: HostStacks | None = None

    def cover(self, plan: Plan, refused: Collection[int], notify: Notify) -> None:
        """Set `layers` and `missing`, where the kernel refused some of the plan's probes."""
        for layer in plan.layers:
            probes = {index for index, probe in enumerate(plan.probes) if probe.layer == layer}
            if probes and probes.issubset(refused) and layer not in plan.own:
                self.missing[layer] = "the kernel lets none of its functions be probed"
                notify(f"no {layer} layer: {self.missing[layer]}")
            else:
                self.layers.append(layer)

    def start(self) -> None:
        """Record the plan's scope from now on; a command from its exec on. With windows, only the threads of
        the scope are followed until the first one begins.
        """

    def collect(self) -> bytes:
        """Whole records that were not collected before, or some of them, or b"". Never waits."""
        records, self._turned = self._turned, b""
        return records

    def lost(self) -> list[Loss]:
        """Losses since the last call."""
        return []

    def renderer(self) -> RecordRenderer:
        """The decoder of what `collect` returns, for a started recording; used on another thread."""
        start_ns = 0 if self._is_of_command else self._start_ns
        return RecordRenderer(
            self._probes,
            self._syscalls,
            self._values,
            start_ns,
            self._names,
            self._causes,
            self._host_stacks,
        )

    def stop(self) -> None:
        """Detach every probe; `collect` and `lost` still return what was recorded before."""

    def close(self) -> None:
        """Give the memory back."""

    def prepare(self) -> None:
        """Attach what is recorded in windows, unless it is attached. Raises CaptureUnavailable."""

    def rest(self) -> None:
        """Detach what is recorded in windows, where it can be attached again for the next one."""

    def hits(self) -> int:
        """How often functions that begin a window were called since `arm`, or since the last window ended."""
        return 0

    def asked(self) -> int | None:
        """When a call requested a window, and waits for `let_go`; None if no call waits."""
        return None

    def let_go(self) -> bool:
        """Release the call that requested a window; returns whether its window was over before it began."""
        return False

    def is_end_held(self) -> bool:
        """Whether the call that ended a window waits for `let_end`."""
        return False

    def let_end(self) -> None:
        """Release the call that ended a window, where it waits for libraries in the command to follow."""

    def open_window(self, since_ns: int, at_ns: int | None = None, *, name: str = "") -> int:
        """Begin a window now, or at `at_ns` where it began elsewhere; returns its time on CLOCK_MONOTONIC. It
        is due at `since_ns`, and begins later where probes must be attached first. Raises CaptureUnavailable.
        """
        return self._turn(Cause.START, at_ns, begins=True, name=name)

    def close_window(self, cause: Cause, at_ns: int | None = None) -> int:
        """End the open window now, or at `at_ns` where it ended elsewhere; returns the time."""
        return self._turn(cause, at_ns, begins=False)

    def arm(self, windows: int) -> None:
        """From now on the plan's functions begin and end windows, at most this many."""

    def processes(self) -> set[int]:
        """The processes whose events are recorded now, where that is known. In a pid namespace, of a process
        that has recorded nothing yet only the kernel's id is known: it stands as a negative number.
        """
        return set()

    def turns(self) -> list[Turn]:
        """The begins and ends of windows by functions, in what was collected since the last call."""
        return []

    def _turn(self, cause: Cause, at_ns: int | None, *, begins: bool, name: str = "") -> int:
        now_ns = time.monotonic_ns() if at_ns is None else at_ns
        self._turned += window_record(now_ns, cause, begins=begins, name=name)
        return now_ns


class Engine(Protocol):
    """A way to attach probes. Each engine is one file, and one line in `ENGINES`."""

    name: str
    layers: frozenset[str]

    def check(self) -> str:
        """The engine's version. Raises CaptureUnavailable where it cannot work."""

    def attach(self, plan: Plan, notify: Notify) -> Attachment:
        """Attach every probe of the plan. Raises CaptureUnavailable."""


class NoProbes:
    """The engine where eBPF cannot work and only a library in the command records: it needs no privilege."""

    name = "none"
    layers: frozenset[str] = frozenset({HOST_SAMPLE})

    def check(self) -> str:
        """It always works."""
        return ""

    def attach(self, plan: Plan, notify: Notify) -> Attachment:
        """Nothing is attached; stacks of Python are read from outside where they are asked for."""
        from tracepipe.tracer.engines.python_sampler import PythonSampler, check_readable

        if HOST_SAMPLE not in plan.own or plan.scope.kind != "command":
            return Attachment(plan)
        if why := check_readable():
            notify(f"no {HOST_SAMPLE} layer: {why}")
            return Attachment(plan)
        return PythonSampler(plan, notify)
