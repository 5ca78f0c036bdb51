"""Capture: run a command and record what it and the kernel do as an event file.

    capture(CaptureRequest(["./vec_add"]), sink, notify=print) → CaptureSummary

Nothing native is imported until an engine starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import BinaryIO

from tracepipe.capture.engine import CaptureRequest, CaptureSummary, Engine, Notify
from tracepipe.errors import CaptureUnavailable, TracepipeError

__all__ = ["ENGINES", "CaptureRequest", "CaptureSummary", "Engine", "capture"]


def _bcc() -> Engine:
    from tracepipe.capture.bcc_engine import BccEngine

    return BccEngine()


# Engine name → its maker, best first: `auto` takes the first that works on this machine.
ENGINES: dict[str, Callable[[], Engine]] = {
    "bcc": _bcc,
}


def capture(request: CaptureRequest, sink: BinaryIO, *, notify: Notify) -> CaptureSummary:
    """Write a complete `tracepipe/1` file of one run of `request.command` to `sink`.

    The target keeps this process's environment, folder and standard streams; under sudo it runs as the user
    who called sudo. Ctrl-C ends the target, and the file is still complete. `notify` gets one-line messages
    for the user. Raises TracepipeError (the command cannot be run), CaptureUnavailable, OutputError. Call it
    on the main thread: signals are waited for there.
    """
    if not request.command:
        raise TracepipeError(
            "There is no command to capture.", "Give one after --: tracepipe capture … -- ./app"
        )
    from tracepipe.capture.session import run_session  # here, as --help and convert need none of it

    engine, version = _choose(request.engine)
    return run_session(engine, version, request, sink, notify)


def _choose(name: str) -> tuple[Engine, str]:
    if name != "auto":
        if name not in ENGINES:
            raise TracepipeError(f"There is no capture engine {name}.", f"Choose from: {', '.join(ENGINES)}.")
        engine = ENGINES[name]()
        return engine, engine.check()
    refusals: list[CaptureUnavailable] = []
    for make in ENGINES.values():
        engine = make()
        try:
            return engine, engine.check()
        except CaptureUnavailable as refusal:
            refusals.append(refusal)
    raise refusals[0]
