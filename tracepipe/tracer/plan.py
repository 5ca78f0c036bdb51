"""The plan of a capture: from the request to what an engine attaches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from tracepipe.errors import CaptureUnavailable, TracepipeError
from tracepipe.hooks.calls import call_rule
from tracepipe.hooks.hook import (
    HOST_SAMPLE,
    PROBED_LAYERS,
    RECORDED_LAYERS,
    FilePlace,
    KernelPlace,
    Probe,
)
from tracepipe.hooks.sets import MEMORY_EFFECTS, load_set, read_hooks
from tracepipe.tracer.engines.engine import Engine
from tracepipe.tracer.find.library import LibrarySearch, python_of
from tracepipe.tracer.find.resolve import resolve
from tracepipe.tracer.machine.processes import running_threads
from tracepipe.tracer.request import (
    ANNOTATION,
    CALL_LAYERS,
    DEFAULT_LAYERS,
    RING_LEAST_BYTES,
    CaptureRequest,
    Cause,
    Notify,
    Plan,
    Scope,
    TriggerPlace,
    WindowPlan,
    triggers_of,
)

# Layer → the shipped sets that have its functions. Where one place is in two sets, the first has it.
LAYER_SETS: dict[str, tuple[str, ...]] = {
    "userspace": ("cuda-driver", "cuda-runtime"),
    "kernel": ("nvidia-kmod",),
    "scheduler": ("context-switch", "nvidia-kmod"),
}
_DRIVER_API = "cuda-driver"
_RUNTIME = "libcudart.so"
_SLOW_TO_ATTACH = {"bpftrace"}
"""Engines that take 10 ms or more to attach a probe, and 0.1 s to detach it."""
_ALWAYS = {"syscall", "scheduler", HOST_SAMPLE}
"""Layers that every kernel has tracepoints for."""


def layers_here(*, of_command: bool) -> tuple[str, ...]:
    """All layers of a command or of running processes, without `kernel` where the driver cannot be probed."""
    driver = resolve([load_set("nvidia-kmod")], LibrarySearch(), is_partial=True)
    probed = PROBED_LAYERS if any(probe.layer == "kernel" for probe in driver.probes) else DEFAULT_LAYERS
    probed = (*probed, HOST_SAMPLE)
    return (ANNOTATION, *probed) if of_command else probed


def plan_of(
    engine: Engine,
    request: CaptureRequest,
    command_pid: int,
    notify: Notify,
    device_layers: frozenset[str] = frozenset(),
    sees: Mapping[str, Path] = MappingProxyType({}),
) -> tuple[Plan, dict[str, str]]:
    """The plan, and the layers that cannot be recorded: layer → why.

    `command_pid` is the held process of the request's command, `device_layers` has the layers that are
    recorded without probes, and `sees` maps the kinds of triggers that a library in the command sees to that
    library. Raises CaptureUnavailable where nothing can be recorded, TracepipeError for a hook that is wrong
    or finds nothing.
    """
    scope = Scope("system")
    if request.command:
        scope = Scope("command", (command_pid,), children=request.children)
    elif request.pids:
        scope = Scope("pids", request.pids, children=request.children)
    elif request.comm:
        scope = Scope("comm", comm=request.comm, children=request.children)
    pids = request.pids
    if scope.kind == "comm":
        pids = tuple({thread.pid for thread in running_threads(scope)})
    libraries = LibrarySearch(request.command or None, pids, request.libraries)

    # The functions of a hook are recorded whatever layers are requested, and layers of what calls did need
    # the calls.
    users = read_hooks(list(request.hooks))
    hooked = {hook.layer for hooks in users for hook in hooks.hooks}
    asked = {"userspace" if layer in CALL_LAYERS else layer for layer in request.layers}
    layers = tuple(layer for layer in (*RECORDED_LAYERS, HOST_SAMPLE) if layer in asked or layer in hooked)
    with_sets = [layer for layer in layers if layer in asked and layer not in device_layers]
    sets = dict.fromkeys(name for layer in with_sets for name in LAYER_SETS.get(layer, ()))
    hooks = [*users, *map(load_set, sets)]
    selection = resolve(hooks, libraries, only=request.only, exclude=request.exclude, notify=notify)
    names = {hooks.name for hooks in users if not hooks.is_shipped}
    for place, reason in selection.unresolved.items():
        if place in names or place.partition(", ")[0] in names:
            raise TracepipeError(
                f"{place}: {reason}", "Run tracepipe hooks list 'PATTERN' to see which functions there are."
            )
    for message in selection.skipped:
        notify(f"skipped: {message}")
    origins = {hook.origin for hooks in users for hook in hooks.hooks}
    rule, probes = call_rule(request.calls), list[Probe]()
    for probe in selection.probes:
        effect, layer = probe.hook.effect, probe.layer
        # Without the layer `scheduler`, the driver's own scheduling belongs to the layer `kernel`: it shows
        # for which process the driver's threads work.
        if layer == "scheduler" and layer not in request.layers and isinstance(probe.place, KernelPlace):
            layer = "kernel"
            probe = replace(probe, hook=replace(probe.hook, layer=layer))
        # The layers `memory` and `transfer` need the calls with that effect.
        made = "transfer" if effect == "transfer" else "memory" if effect in MEMORY_EFFECTS else ""
        is_asked = layer in request.layers or made in request.layers
        is_allowed = layer != "userspace" or rule.allows(probe.name)
        if (is_asked and is_allowed) or probe.hook.origin in origins:
            probes.append(probe)
    if engine.name in _SLOW_TO_ATTACH:
        probes = _likely(probes, libraries, notify)

    missing = {}
    for layer in layers:
        if layer not in _ALWAYS and not any(probe.layer == layer for probe in probes):
            found = [selection.unresolved.get(name, "") for name in LAYER_SETS.get(layer, ())]
            reasons = "; ".join(dict.fromkeys(filter(None, found)))
            missing[layer] = reasons or "none of its functions is selected"
    unknown = (layer for layer in layers if layer not in engine.layers)
    missing |= dict.fromkeys(unknown, f"the {engine.name} engine does not record it")
    missing = {layer: reason for layer, reason in missing.items() if layer not in device_layers}
    if "userspace" in missing:
        derived = (layer for layer in CALL_LAYERS if layer in request.layers and layer not in device_layers)
        missing |= dict.fromkeys(derived, missing["userspace"])
    for layer, reason in missing.items():
        notify(f"no {layer} layer: {reason}")
    if ANNOTATION in request.layers and ANNOTATION not in device_layers:  # a message has stated the reason
        missing[ANNOTATION] = "its library cannot be loaded into the command"
    if "userspace" not in missing and _DRIVER_API in selection.unresolved:
        notify(f"no CUDA driver calls: {selection.unresolved[_DRIVER_API]}; name the file with --library")
    layers = tuple(layer for layer in layers if layer not in missing)
    if not layers and not device_layers and not missing:
        raise TracepipeError(
            "Nothing is asked for: neither a layer nor a hook.",
            "Name layers with --layers, or functions with --hook.",
        )
    if not layers and not device_layers:
        stated = "; ".join(f"{layer}: {reason}" for layer, reason in missing.items())
        raise CaptureUnavailable(
            f"None of the requested layers can be recorded: {stated}.",
            "Run tracepipe doctor: it shows what each layer needs.",
        )
    plan = Plan(
        layers,
        own=tuple(layer for layer in request.layers if layer in _ALWAYS and layer in layers),
        probes=[probe for probe in probes if probe.layer in layers],
        scope=scope,
        filters=request.filters,
        ring_bytes=1 << (max(request.ring_bytes, RING_LEAST_BYTES) - 1).bit_length(),
        values={kind: names for one in reversed(hooks) for kind, names in one.values.items()},
        windows=window_plan(request, libraries, sees),
    )
    return plan, missing


def window_plan(
    request: CaptureRequest, libraries: LibrarySearch, sees: Mapping[str, Path]
) -> WindowPlan | None:
    """The plan of the windows, None without windows. Raises TracepipeError for functions that are not found,
    unless a library in the command sees their calls too.
    """
    windows = request.windows
    if not windows.are_asked:
        return None
    places: list[TriggerPlace] = []
    begins, ends = both = triggers_of(windows)
    for trigger, is_begin in zip(both, (True, False), strict=True):
        if trigger is None or trigger.is_sent:
            continue
        # They are functions of the program, or of the library in the command that sees the trigger.
        sets = read_hooks([trigger.hook(sees.get(trigger.kind), begins=is_begin)])
        selection = resolve(sets, libraries, is_partial=True)
        found = [probe.place for probe in selection.probes if isinstance(probe.place, FilePlace)]
        if not found and trigger.kind not in sees:
            reason = next(iter(selection.unresolved.values()), "no such function")
            raise TracepipeError(
                f"--{'start' if is_begin else 'stop'}-on {trigger.text}: {reason}",
                "Name the library, call:LIBRARY:FUNCTION. "
                "tracepipe hooks list shows which functions there are.",
            )
        places += [TriggerPlace(place, is_begin) for place in found]
    causes = {
        Cause.START: begins.text if begins else "delay",
        Cause.STOP: ends.text if ends else "",
        Cause.DURATION: "duration",
        Cause.END: "end of the recording",
    }
    words = tuple(causes[cause] for cause in Cause)
    # A library in the command counts by itself.
    begin_at, end_at = (one.number if one is not None and one.is_probed else 1 for one in both)
    followed = [bool(sees and one and one.is_probed and one.kind not in sees) for one in both]
    return WindowPlan(tuple(places), begin_at, end_at, words, *followed)


def _likely(probes: list[Probe], libraries: LibrarySearch, notify: Notify) -> list[Probe]:
    """The probes without those of a CUDA runtime that is merely installed: the program is unlikely to load
    it.

    A runtime from Python's packages is kept where the program is a Python.
    """
    programs = libraries.programs()
    if libraries.is_loaded(_RUNTIME) or any(python_of(program) for program in programs):
        return probes
    unlikely = set(libraries.find(_RUNTIME)) - set(programs)
    likely = [p for p in probes if not (isinstance(p.place, FilePlace) and p.place.path in unlikely)]
    if len(likely) < len(probes):
        names = ", ".join(sorted(unlikely))
        notify(f"not probed: {names}, which the program does not need; name it with --library")
    return likely
