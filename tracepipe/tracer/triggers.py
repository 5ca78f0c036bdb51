"""What begins and ends windows, as the command line writes it: `profiler`, `call:FUNCTION#N`, `signal`."""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass, replace
from pathlib import Path

from tracepipe.errors import CaptureUnavailable, TracepipeError
from tracepipe.hooks.names import did_you_mean
from tracepipe.tracer.request import API, CaptureRequest, Limits, Windows

SIGNAL, PROFILER = "signal", "profiler"
_FORMS = {
    PROFILER: PROFILER,
    SIGNAL: SIGNAL,
    "call": "call:FUNCTION#N",
    "nvtx": "nvtx:RANGE#N",
    "kernel": "kernel:REGEX#N",
    API: API,
}
TRIGGER_FORMS = tuple(form for kind, form in _FORMS.items() if kind != API)
"""The forms that the command line accepts."""
_PAIRED = {PROFILER, "nvtx", SIGNAL, API}
"""Kinds that come in pairs: where no other end is given, the counterpart of the begin ends a window."""


@dataclass(frozen=True, slots=True)
class Trigger:
    """What begins or ends a window when it happens for the `number`th time. `name` is what it waits for."""

    kind: str
    name: str = ""
    number: int = 1

    @property
    def text(self) -> str:
        """The trigger as the command line writes it."""
        named = f"{self.kind}:{self.name}" if self.name else self.kind
        return named if self.number == 1 else f"{named}#{self.number}"

    @property
    def is_probed(self) -> bool:
        """Whether it is seen by probes on functions."""
        return self.kind in (PROFILER, "call")

    @property
    def is_sent(self) -> bool:
        """Whether it is sent to the capture process itself."""
        return self.kind in (SIGNAL, API)

    def hook(self, library: Path | None, *, begins: bool) -> str:
        """The functions that it waits for, as a hook's text. `library` is the library in the command that
        sees this trigger, if there is one.
        """
        if not self.is_probed:
            return f"uprobe:{library}:tracepipe_window_{'begins' if begins else 'ends'}"
        if self.kind == PROFILER:
            what = "Start" if begins else "Stop"
            return f"uprobe:libcuda.so.1:cuProfiler{what},uprobe:libcudart.so:cudaProfiler{what}"
        if ":" in self.name:
            return f"uprobe:{self.name}"
        return ",".join(f"uprobe:{library}:{self.name}" for library in ("", "libcuda.so.1", "libcudart.so"))


def trigger_of(text: str, option: str) -> Trigger | None:
    """The trigger that an option names; None if the option is not given. Raises TracepipeError."""
    if not text:
        return None
    kind, colon, name = text.partition(":")
    if kind not in _FORMS:
        hint = did_you_mean(kind, _FORMS) or f"Choose from: {', '.join(TRIGGER_FORMS)}."
        raise TracepipeError(f"{option} {text}: {kind!r} is not a known trigger.", hint)
    takes_name = _FORMS[kind] != kind
    counted = re.fullmatch(r"(.+)#(\d+)", name, re.DOTALL)
    name, number = (counted[1], int(counted[2])) if counted else (name, 1)
    if takes_name != bool(name) or bool(colon) != takes_name or number < 1:
        raise TracepipeError(f"{option} {text} cannot be understood.", f"Write {_FORMS[kind]}, N from 1.")
    return Trigger(kind, name, number)


def ending(begins: Trigger | None, stop_on: Trigger | None) -> Trigger | None:
    """What ends a window: the named trigger, or the counterpart of the one that begins it."""
    if stop_on is None and begins is not None and begins.kind in _PAIRED:
        return replace(begins, number=1)
    return stop_on


def triggers_of(windows: Windows) -> tuple[Trigger | None, Trigger | None]:
    """The triggers that begin and end windows. Raises TracepipeError."""
    begins = trigger_of(windows.start_on, "--start-on")
    return begins, ending(begins, trigger_of(windows.stop_on, "--stop-on"))


def window_environment(request: CaptureRequest) -> dict[str, str]:
    """The environment that describes the windows to libraries in the command; `native/windows.h` reads it."""
    names = ("TRACEPIPE_WINDOW_BEGIN", "TRACEPIPE_WINDOW_END")
    return {
        name: f"{trigger.number} {trigger.kind} {trigger.name}"
        for name, trigger in zip(names, triggers_of(request.windows), strict=True)
        if trigger is not None
    }


def check_windows(windows: Windows, limits: Limits) -> None:
    """Raise TracepipeError for windows that cannot be understood, and for repeated windows that never end."""
    begins, ends = triggers_of(windows)
    if begins is not None and begins.kind == API and windows.delay_ns:
        raise TracepipeError(
            "begin_window() begins the windows, so a delay has no effect.",
            "Leave out the delay, or start_on.",
        )
    if windows.limit > 1 and ends is None and limits.duration_ns is None:
        raise TracepipeError(
            f"--repeat {windows.repeat} is given, but nothing ends the first window.",
            "Give --duration or --stop-on.",
        )


def check_seen(windows: Windows, seen: Container[str], *, has_probes: bool) -> None:
    """Raise CaptureUnavailable for a trigger that nothing sees. `seen`: the kinds that a library in the
    command sees.
    """
    hints = {
        "call": "Run it as root.",
        PROFILER: "Run it as root, or with --gpu kernels on a machine with a GPU.",
        "nvtx": "Record the layer annotation, of a command.",
        "kernel": "Use --gpu kernels on a machine with a GPU; for --gpu warps, --launches selects launches.",
    }
    for trigger in triggers_of(windows):
        if trigger is None or trigger.kind not in hints or trigger.kind in seen:
            continue
        if not (trigger.is_probed and has_probes):
            raise CaptureUnavailable(
                f"Nothing in this recording can see {trigger.text}.", hints[trigger.kind]
            )
