"""tracepipe: one timeline from the CUDA call to the warp.

    tracepipe.convert("run.jsonl")              a trace for ui.perfetto.dev, as the command makes it
    tracepipe.open("run.jsonl")                 its events, one after the other
    tracepipe.load("run.jsonl")                 its layers as tables of DuckDB
    with tracepipe.capture(["./app"]) as run:   records a command, a process, or this one

docs/api.md has them all. What is not in `__all__` may change. Everything is imported when it is first used.
"""

from typing import TYPE_CHECKING

from tracepipe.errors import (
    CaptureTimeout,
    CaptureUnavailable,
    ClockError,
    FormatError,
    InputError,
    LibraryMissing,
    OutputError,
    TracepipeError,
)

if TYPE_CHECKING:
    from tracepipe.api.capture import CaptureOptions, capture
    from tracepipe.api.capture_block import Capture
    from tracepipe.api.convert import convert, convert_ranks, cut
    from tracepipe.api.event import Event, Warp, WarpExit, WarpRange
    from tracepipe.api.open import Events, load, open
    from tracepipe.api.options import ConvertOptions, RankOptions, ReadOptions
    from tracepipe.event.model import Problem
    from tracepipe.recording.account import Account
    from tracepipe.store.run import Run
    from tracepipe.tracer.summary import CaptureSummary

__version__ = "0.1.0"
__all__ = [
    "Account",
    "Capture",
    "CaptureOptions",
    "CaptureSummary",
    "CaptureTimeout",
    "CaptureUnavailable",
    "ClockError",
    "ConvertOptions",
    "Event",
    "Events",
    "FormatError",
    "InputError",
    "LibraryMissing",
    "OutputError",
    "Problem",
    "RankOptions",
    "ReadOptions",
    "Run",
    "TracepipeError",
    "Warp",
    "WarpExit",
    "WarpRange",
    "capture",
    "convert",
    "convert_ranks",
    "cut",
    "load",
    "open",
]

_MODULES = {
    "tracepipe.api.capture": ("CaptureOptions", "capture"),
    "tracepipe.api.capture_block": ("Capture",),
    "tracepipe.api.convert": ("convert", "convert_ranks", "cut"),
    "tracepipe.api.event": ("Event", "Warp", "WarpExit", "WarpRange"),
    "tracepipe.api.open": ("Events", "load", "open"),
    "tracepipe.api.options": ("ConvertOptions", "RankOptions", "ReadOptions"),
    "tracepipe.event.model": ("Problem",),
    "tracepipe.recording.account": ("Account",),
    "tracepipe.store.run": ("Run",),
    "tracepipe.tracer.summary": ("CaptureSummary",),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}

if not TYPE_CHECKING:  # a type checker would take every name for one of these

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name not in _PLACES:
            raise AttributeError(f"module 'tracepipe' has no attribute {name!r}", name=name)
        found = globals()[name] = getattr(import_module(_PLACES[name]), name)
        return found


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
