"""Capture: record what a command or running processes and the kernel do, as an event file.

    capture(CaptureRequest(["./vec_add"]), sink, notify=print) → CaptureSummary

Nothing native is imported until an engine starts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, BinaryIO, cast

from tracepipe.errors import CaptureUnavailable, TracepipeError
from tracepipe.hooks.hook import HOST_SAMPLE
from tracepipe.tracer.request import ANNOTATION, CaptureRequest, Control, Notify
from tracepipe.tracer.summary import CaptureSummary

if TYPE_CHECKING:  # the values of options are known without the engines
    from tracepipe.tracer.engines.engine import Engine, Listeners, Store
    from tracepipe.tracer.flight import Outputs

__all__ = ["ENGINES", "CaptureRequest", "CaptureSummary", "Engine", "capture", "choose"]


def _engine(place: str) -> Callable[[], Engine]:
    """A function that makes the engine `module:Class`, and imports the module only when it is called."""

    def make() -> Engine:
        module, _, name = place.partition(":")
        return cast("Engine", getattr(import_module(module), name)())

    return make


# Method → the function that makes its engine. The best is first: `auto` uses the first that works.
ENGINES: dict[str, Callable[[], Engine]] = {
    "bcc": _engine("tracepipe.tracer.engines.probes:BccEngine"),
    "prebuilt": _engine("tracepipe.tracer.engines.probes:PrebuiltEngine"),
    "bpftrace": _engine("tracepipe.tracer.engines.bpftrace:BpftraceEngine"),
}


def capture(
    request: CaptureRequest,
    sink: BinaryIO | Store | Outputs,
    *,
    notify: Notify,
    watchers: Sequence[Store] = (),
    control: Control | None = None,
    complete: Callable[[], None] = lambda: None,
) -> CaptureSummary:
    """Record what the request asks for, and write it as a complete `tracepipe/1` file to `sink`. A store gets
    the records instead; with `last`, outputs get the files.

    A command keeps this process's environment, folder and standard streams; under sudo it runs as the user
    who called sudo. Ctrl-C ends the command, and the file is still complete. `notify` gets one-line messages
    for the user. `watchers` get the records as they arrive. `control` is notified of the start, and may end
    the recording, which interrupts a command. `complete` is called when everything is written and the command
    is still running, before the command is waited for. Raises TracepipeError (the command cannot be run),
    CaptureUnavailable, OutputError. Call it on the main thread: signals are waited for there.
    """
    asked = [bool(request.command), bool(request.pids), bool(request.comm), request.system]
    if sum(asked) != 1:
        raise TracepipeError(
            "There is nothing to capture." if not any(asked) else "It is ambiguous what to record.",
            "Give one of: a command after --, --pid, --comm, --system.",
        )
    from tracepipe.tracer.engines.engine import Listeners  # here, as --help and convert do not need them
    from tracepipe.tracer.machine.refusals import shortage_of
    from tracepipe.tracer.target import outlived

    listeners = Listeners(notify, watchers, control, complete)
    try:
        with outlived() if request.last else nullcontext():
            return _capture(request, sink, listeners)
    except (OSError, MemoryError, RuntimeError) as error:
        shortage = shortage_of(error)
        if shortage is None:
            raise
        raise shortage from error


def _capture(
    request: CaptureRequest, sink: BinaryIO | Store | Outputs, listeners: Listeners
) -> CaptureSummary:
    from tracepipe.tracer.engines.engine import NoProbes
    from tracepipe.tracer.find.library import find_program
    from tracepipe.tracer.gpu import annotated, start
    from tracepipe.tracer.machine.processes import Processes
    from tracepipe.tracer.request import check_triggers, triggers_of
    from tracepipe.tracer.session import run_session

    notify = listeners.notify
    if request.command:
        find_program(request.command)  # before any message about how it is recorded
    Processes(request.pids).close()  # raises for a process that has ended
    request, device = start(request, notify)
    try:
        try:
            triggers = triggers_of(request.windows)
            is_trigger_probed = any(trigger and trigger.is_probed for trigger in triggers)
            needs_probes = {*request.layers} - {ANNOTATION} or request.hooks or is_trigger_probed
            engine, version, why = choose(request.method) if needs_probes else (NoProbes(), "", "")
        except CaptureUnavailable as refusal:
            samples = request.command and request.layers == (HOST_SAMPLE,)
            if device is None and not samples:
                if request.command:
                    notify(f"{request.command[0]} was not started")
                raise
            engine, version = NoProbes(), ""
            by = [device.name] if device else []
            by += ["reading the stacks of Python"] if HOST_SAMPLE in request.layers else []
            why = f"{refusal.message} Only what {' and '.join(by)} reports is recorded. {refusal.hint}"
        if why:
            notify(f"method {engine.name}: {why}")
        device = annotated(request, device, notify)
        check_triggers(request.windows, device.sees if device else (), has_probes=engine.name in ENGINES)
        return run_session(engine, version, request, sink, listeners, device)
    finally:
        if device is not None:
            device.close()


def choose(method: str) -> tuple[Engine, str, str]:
    """The engine of a method, its version, and for `auto` why it was chosen. Raises CaptureUnavailable where
    it cannot work, TracepipeError for an unknown method.
    """
    if method != "auto":
        if method not in ENGINES:
            raise TracepipeError(
                f"There is no capture method {method}.", f"Choose from: auto, {', '.join(ENGINES)}."
            )
        engine = ENGINES[method]()
        return engine, engine.check(), ""
    refusals: dict[str, CaptureUnavailable] = {}
    for name, make in ENGINES.items():
        engine = make()
        try:
            version = engine.check()
        except CaptureUnavailable as refusal:
            refusals[name] = refusal
            continue
        if not refusals:
            return engine, version, "compiles its probes here, at full rate"
        return engine, version, "; ".join(f"no {other}: {r.message}" for other, r in refusals.items())
    raise next(iter(refusals.values()))
