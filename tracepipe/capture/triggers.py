"""What begins and ends windows, as the command line says it: `profiler`, `call:FUNCTION#N`, `signal`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tracepipe.capture.request import Limits, Windows
from tracepipe.errors import TracepipeError
from tracepipe.hooks.near_names import did_you_mean

SIGNAL = "signal"
_FORMS = {
    "profiler": "profiler",
    SIGNAL: SIGNAL,
    "call": "call:FUNCTION#N",
}
TRIGGER_FORMS = tuple(_FORMS.values())
_PAIRED = {"profiler", SIGNAL}
"""Kinds that have an end of their own: what begins a window ends it, where nothing else is named."""
_PROFILER = {"begin": "Start", "end": "Stop"}


@dataclass(frozen=True, slots=True)
class Trigger:
    """What begins or ends a window when it comes for the `number`th time. `name` is what is looked for."""

    kind: str
    name: str = ""
    number: int = 1

    @property
    def text(self) -> str:
        """As the command line says it."""
        named = f"{self.kind}:{self.name}" if self.name else self.kind
        return named if self.number == 1 else f"{named}#{self.number}"

    def hook(self, end: str) -> str:
        """The functions that are waited for, at the `end` (`begin`, `end`) of a window, as a hook's text."""
        if self.kind == "profiler":
            what = _PROFILER[end]
            return f"uprobe:libcuda.so.1:cuProfiler{what},uprobe:libcudart.so:cudaProfiler{what}"
        if ":" in self.name:
            return f"uprobe:{self.name}"
        return ",".join(f"uprobe:{library}:{self.name}" for library in ("", "libcuda.so.1", "libcudart.so"))


def trigger_of(text: str, option: str) -> Trigger | None:
    """The trigger that an option names; None where it is not given. Raises TracepipeError."""
    if not text:
        return None
    kind, colon, name = text.partition(":")
    if kind not in _FORMS:
        hint = did_you_mean(kind, _FORMS) or f"Choose from: {', '.join(_FORMS.values())}."
        raise TracepipeError(f"{option} {text}: nothing is called {kind!r} that a window can wait for.", hint)
    takes_name = _FORMS[kind] != kind
    counted = re.fullmatch(r"(.+)#(\d+)", name, re.DOTALL)
    name, number = (counted[1], int(counted[2])) if counted else (name, 1)
    if takes_name != bool(name) or bool(colon) != takes_name or number < 1:
        raise TracepipeError(f"{option} {text} cannot be understood.", f"Write {_FORMS[kind]}, N from 1.")
    return Trigger(kind, name, number)


def ending(begins: Trigger | None, stop_on: Trigger | None) -> Trigger | None:
    """What ends a window: what is named, or the counterpart of what begins it."""
    if stop_on is None and begins is not None and begins.kind in _PAIRED:
        return begins
    return stop_on


def check_windows(windows: Windows, limits: Limits) -> None:
    """Raise TracepipeError for windows that cannot be understood, or of which a second cannot come."""
    begins = trigger_of(windows.start_on, "--start-on")
    ends = ending(begins, trigger_of(windows.stop_on, "--stop-on"))
    if windows.repeat > 1 and ends is None and limits.duration_ns is None:
        raise TracepipeError(
            f"--repeat {windows.repeat}, and nothing ends the first window.", "Give --duration or --stop-on."
        )
