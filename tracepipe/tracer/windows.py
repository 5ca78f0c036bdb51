"""Which window of a recording is open, and when the next one begins and ends.

    waits for --delay ──▶ waits for what begins it ──▶ open ──▶ waits …, or the recording ends

The engine sees the functions that begin and end windows, in the kernel and at the call. Everything else is
decided here, at each step of the recording loop. A recording without windows has one that is always open.
Between windows probes are detached:

              _LEAD_NS before a time, or the call that is expected then;
              else when a call asks, at a signal                            _LINGER_NS
    detached ─────────────────────────────────────────────────▶ attached ─────────▶ detached
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tracepipe.tracer.engines.engine import Attachment, Turn
from tracepipe.tracer.request import (
    API,
    PROFILER,
    SIGNAL,
    Answer,
    CaptureRequest,
    Cause,
    Trigger,
    WindowOrder,
    triggers_of,
)
from tracepipe.tracer.summary import RecordedWindows

if TYPE_CHECKING:
    from tracepipe.tracer.gpu.engines.streams import GpuEngine

_ALONE_NS = 5_000_000
"""How long a library has to begin or end its window itself, at the call that the probes see too."""
_SETTLE_NS = 3_000_000
"""How long a call that begins a window waits for libraries in any case: with less, launches were lost."""
_FOLLOW_NS = 20_000_000
"""How long a call waits for libraries in the command to follow, which takes 0.1 to 0.3 ms on an idle machine:
they set each CUDA function in CUPTI.
"""
_LEAD_NS = 250_000_000
"""How long before an expected window its probes are attached; attaching takes from 10 to 100 ms."""
_LINGER_NS = 100_000_000
"""How long probes stay attached after a window, in case another follows: as long as detaching takes."""
_OFTEN_NS = 1_000_000_000
"""Where the next window follows within this time, probes stay attached for twice the gap: detaching all of
them takes nearly that long.
"""


class Pace:
    """Predicts when the Nth call of a function happens, from the rate of the last calls."""

    def __init__(self, number: int, calls: int) -> None:
        self._number, self._calls = number, calls
        self._counted_ns: int | None = None
        self._due_ns: int | None = None

    def due_ns(self, now_ns: int, calls: int) -> int | None:
        """When the Nth call is due; None before the second one. Once it is near, it is not postponed."""
        if calls > self._calls:
            is_near = self._due_ns is not None and self._due_ns - _LEAD_NS <= now_ns
            if self._counted_ns is not None and not is_near:
                a_call_ns = (now_ns - self._counted_ns) // (calls - self._calls)
                self._due_ns = now_ns + (self._number - calls) * a_call_ns
            self._counted_ns, self._calls = now_ns, calls
        return self._due_ns


@dataclass
class WindowCourse:
    """The windows of one recording, from its start on."""

    request: CaptureRequest
    count: int = 0
    length_ns: int = 0
    _attachment: Attachment | None = None
    _device: GpuEngine | None = None
    _follower: GpuEngine | None = None
    """The engine that gets every begin and end of a window. `_device` is the same engine where it is asked to
    begin and end its own windows.
    """
    _device_due_ns: int | None = None
    _is_told_open: bool = False
    """Whether the libraries have a window open, by what they and the recording told each other last."""
    _stray_ns: int | None = None
    """From when on such a window is closed, if none is open here."""
    _held_until_ns: int | None = None
    _end_held_until_ns: int | None = None
    _opened_ns: int | None = None
    _closed_ns: int = 0
    _is_armed: bool = False
    _signals: int = 0
    _is_ordered: bool = False
    _linger_ns: int = _LINGER_NS
    _pace: Pace | None = None
    _begins_by: Trigger | None = field(init=False)
    _ends_by: Trigger | None = field(init=False)

    def __post_init__(self) -> None:
        self._begins_by, self._ends_by = triggers_of(self.request.windows)

    @property
    def is_open(self) -> bool:
        """Whether events are recorded now."""
        return self._opened_ns is not None

    @property
    def recorded(self) -> RecordedWindows | None:
        """The windows so far; None where none were requested."""
        return RecordedWindows(self.count, self.length_ns) if self.request.windows.are_asked else None

    def start(self, attachment: Attachment, now_ns: int, device: GpuEngine | None = None) -> None:
        """The recording starts."""
        self._closed_ns = now_ns
        self._follower = device
        if not self.request.windows.are_asked:
            self._note_begin(now_ns)
        else:
            self._attachment, self._device = attachment, device

    def step(self, now_ns: int, signals: int, order: WindowOrder | None = None) -> str:
        """Process what happened since the last step, and begin or end the window that is due. Returns why the
        recording ends, or "". `signals` is the number of signals that the capture got for its windows so far,
        and `order` is an order that can be obeyed.
        """
        came, self._signals = signals - self._signals, signals
        attachment, device, windows = self._attachment, self._device, self.request.windows
        was_open, count, closed_ns = self.is_open, self.count, self._closed_ns
        told = self._take_turns()
        # A step that comes late may end a window that a library has begun just now.
        before = was_open if told is None else self.is_open
        ended_by = ""
        if self._opened_ns is not None:
            duration_ns = self.request.limits.duration_ns
            if self._ends_by is not None and self._is_received(self._ends_by, came, order):
                self._close(now_ns, Cause.STOP)
                ended_by = self._ends_by.text
            elif duration_ns is not None and now_ns - self._opened_ns >= duration_ns:
                self._close(now_ns, Cause.DURATION)
                ended_by = "duration"
            if self.count < windows.limit:
                ended_by = ""
        elif self.count >= windows.limit:
            ended_by = self._ends_by.text if self._ends_by else "duration"
        elif attachment is not None and now_ns - self._closed_ns >= windows.delay_ns:
            asked_ns = attachment.asked()
            if self._begins_by is None:
                asked_ns = self._closed_ns + windows.delay_ns
            elif self._is_received(self._begins_by, came, order):
                asked_ns = now_ns
            if asked_ns is not None:
                name = order.name if order else ""
                self._note_begin(attachment.open_window(asked_ns, name=name))
            elif self._begins_by is not None and not self._begins_by.is_sent and not self._is_armed:
                # Without a delay, the next window may begin immediately after the end of this one.
                left = 1 if windows.delay_ns else windows.limit - self.count
                attachment.arm(left)
                if device is not None:
                    device.channel.arm(left)
            self._is_armed = True
        is_held = self.count > count and attachment is not None and attachment.asked() is not None
        trigger = self._begins_by if self.is_open else self._ends_by
        is_seen = device is not None and trigger is not None and trigger.kind in device.sees
        if self.is_open != before and self.is_open is not told:
            # A call that is held by the probes has not reached the point that the library sees.
            self._device_due_ns = now_ns + (_ALONE_NS if is_seen and not is_held else 0)
        # The libraries in the command follow, unless they have begun or ended their windows themselves.
        if device is not None and self._device_due_ns is not None and now_ns >= self._device_due_ns:
            self._tell(device)
        if device is not None:
            self._close_stray(device, now_ns)
        if attachment is None:
            return ended_by

        # The call that ended a window goes on, and the one that asked for it, once everything records in it.
        if is_held:
            self._held_until_ns = now_ns + _FOLLOW_NS
        if attachment.is_end_held() and self._closed_ns != closed_ns:
            self._end_held_until_ns = now_ns + _FOLLOW_NS
        # A call that the library sees turns it by itself, before it goes on in the program.
        is_turned = self._device_due_ns is None
        has_followed = device is None or is_seen or (is_turned and device.channel.has_followed())
        if self._end_held_until_ns is not None and (has_followed or now_ns >= self._end_held_until_ns):
            self._end_held_until_ns = None
            attachment.let_end()
        settle_ns = _SETTLE_NS if device is not None else 0
        wait_ns = settle_ns - _FOLLOW_NS if has_followed else 0
        if self._held_until_ns is not None and now_ns >= self._held_until_ns + wait_ns:
            self._held_until_ns = None
            if attachment.let_go() and self.is_open:
                self._close(now_ns, Cause.STOP)
        # Probes are attached before an expected window, and detached after one.
        if self.is_open:
            self._pace = None
            attachment.prepare()
        elif now_ns - self._closed_ns >= self._linger_ns:
            due_ns = self._due_ns(attachment, now_ns)
            if due_ns is not None and now_ns >= due_ns - _LEAD_NS:
                attachment.prepare()
            else:
                attachment.rest()
        # The recording does not end while a call waits for the libraries to end its last window.
        return ended_by if self._end_held_until_ns is None else ""

    def _tell(self, device: GpuEngine) -> None:
        """Let the libraries follow."""
        device.channel.set_window(is_open=self.is_open)
        self._device_due_ns, self._stray_ns, self._is_told_open = None, None, self.is_open
        if not self.is_open and self._is_armed and not self.request.windows.delay_ns:
            # They count those windows too that were over before they were seen here.
            device.channel.let_begin(self.request.windows.limit - self.count)

    def _close_stray(self, device: GpuEngine, now_ns: int) -> None:
        """Close a window that a library began and that is over here, unless what began it is seen here soon.
        The library would record everything, and begin no other one.
        """
        if not self._is_told_open or self.is_open:
            self._stray_ns = None
        elif self._stray_ns is None:
            self._stray_ns = now_ns + _ALONE_NS
        elif now_ns >= self._stray_ns:
            self._tell(device)

    def answer(self, order: WindowOrder) -> Answer:
        """The answer to an order, given before the step that obeys it."""
        if order.begins and self.is_open:
            return Answer("A window is already open.", "Call end_window() first.")
        if not order.begins and not (self.is_open or self._is_ordered):
            return Answer("No window is open.", "Call begin_window() first.")
        self._is_ordered = order.begins
        return Answer()

    def _due_ns(self, attachment: Attachment, now_ns: int) -> int | None:
        """When the next window is expected; None where that is not known."""
        if self._begins_by is None:
            return self._closed_ns + self.request.windows.delay_ns
        if self._begins_by.is_sent or not self._is_armed:
            return None
        counts = attachment if self._begins_by.is_probed or not self._device else self._device.channel
        hits = counts.hits()
        if self._pace is None:
            self._pace = Pace(self._begins_by.number, hits)
        return self._pace.due_ns(now_ns, hits)

    def finish(self, now_ns: int) -> None:
        """Called when the recording ends, which ends an open window."""
        self._take_turns()
        if self.is_open:
            self._close(now_ns, Cause.END)
        if self._device is not None:
            self._device.channel.set_window(is_open=False)

    def why_none(self) -> tuple[str, str]:
        """Why no window began, and a hint: two lines for the user."""
        delay = "--delay had passed" if self.request.windows.delay_ns else ""
        if self._begins_by is None or not self._is_armed:
            return f"The recording ended before {delay}: nothing was recorded.", "Give a shorter --delay."
        after = " after --delay" if delay else ""
        hint = {
            SIGNAL: "Begin a window with kill -USR2 and the number that the capture shows.",
            PROFILER: "Let the program call torch.cuda.profiler.start(), or cudaProfilerStart.",
            API: "Let the program call begin_window().",
        }.get(self._begins_by.kind, "Check that the program gets there: `tracepipe hooks test` shows calls.")
        return f"{self._begins_by.text} did not happen{after}: nothing was recorded.", hint

    def _is_received(self, trigger: Trigger | None, signals: int, order: WindowOrder | None) -> bool:
        """Whether the capture process itself received what `trigger`, the next one due, waits for."""
        kind = trigger.kind if trigger is not None else ""
        is_ordered = order is not None and order.begins != self.is_open
        return (kind == SIGNAL and signals > 0) or (kind == API and is_ordered)

    def _take_turns(self) -> bool | None:
        """Take over the windows that functions and libraries turned. Returns whether libraries have one open,
        None if they turned none.
        """
        for ts_ns, begins in self._attachment.turns() if self._attachment else ():
            if begins and not self.is_open:
                self._note_begin(ts_ns)
            elif not begins and self.is_open:
                self._note_end(ts_ns)
        turns = self._device.channel.turns() if self._device else []
        for ts_ns, begins in turns:
            self._device_due_ns = None
            # Follow a process that began or ended a window, unless the probes saw that too.
            if self._attachment is None or begins in self._attachment.probed or begins == self.is_open:
                continue
            if begins:
                self._note_begin(self._attachment.open_window(ts_ns, ts_ns))
            else:
                self._note_end(self._attachment.close_window(Cause.STOP, ts_ns))
        if not turns:
            return None
        self._is_told_open = turns[-1].begins
        return self._is_told_open

    def _close(self, now_ns: int, cause: Cause) -> None:
        if self._attachment is not None:
            now_ns = self._attachment.close_window(cause)
        self._note_end(now_ns)

    def _note_begin(self, now_ns: int) -> None:
        after_ns = now_ns - self._closed_ns
        is_often = self.count > 0 and self._begins_by is not None and after_ns < _OFTEN_NS
        self._linger_ns = max(_LINGER_NS, 2 * after_ns) if is_often else _LINGER_NS
        self._opened_ns = now_ns
        self.count += 1
        if self._follower is not None:
            self._follower.turned(Turn(now_ns, begins=True))

    def _note_end(self, now_ns: int) -> None:
        assert self._opened_ns is not None
        self.length_ns += now_ns - self._opened_ns
        if self._follower is not None:
            self._follower.turned(Turn(now_ns, begins=False))
        self._opened_ns, self._closed_ns = None, now_ns
        self._is_armed = self._is_armed and not self.request.windows.delay_ns
