"""Watches the records of a flight recorder for calls, system calls, ranges and kernels that take long.

The conditions of `--when` are `[KIND:]NAME > TIME`, as in `cudaStreamSynchronize > 50ms` and `nvtx:step* >
200ms`.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tracepipe.errors import TracepipeError
from tracepipe.hooks.names import did_you_mean
from tracepipe.tracer.machine.processes import own_namespace
from tracepipe.tracer.records.syscalls import SYSCALLS
from tracepipe.tracer.records.unrendered import CALL, KERNEL, NVTX, SYSCALL, RecordSpans, Span, SpanKind
from tracepipe.tracer.request import Last, Plan
from tracepipe.units import duration_ns, duration_text

if TYPE_CHECKING:
    from tracepipe.tracer.gpu.engines.streams import GpuEngine

AFTER_NS: Final = 10**9
"""How long after a condition became true a recording is written, but at most a quarter of the kept time. It
then has what followed, and the GPU's work, which is reported up to 25 ms late.
"""

FORMS: Final[dict[SpanKind, str]] = {
    CALL: "FUNCTION > 50ms",
    SYSCALL: "syscall:NAME > 50ms",
    NVTX: "nvtx:RANGE > 200ms",
    KERNEL: "kernel:REGEX > 5ms",
}
"""Kind → its form. A function may also be written as `call:FUNCTION`."""
_KIND: Final = re.compile(r"([A-Za-z]\w*):(?!:)\s*(.*)", re.DOTALL)
_HINT: Final = f"Write {', '.join(FORMS.values())}; names are patterns."


class Watch:
    """Reads everything that is collected, and reports when one of the conditions becomes true."""

    def __init__(self, last: Last, plan: Plan, device: GpuEngine | None) -> None:
        """Raises TracepipeError for a condition that can never be true in this recording."""
        self._conditions = Conditions(last.when)
        self._last_ns = last.duration_ns
        syscalls = SYSCALLS.get(platform.machine(), {}) if "syscall" in plan.own else {}
        # The open calls of a thread that has ended do not continue. In its own pid namespace a capture does
        # not know the kernel's thread ids.
        is_known = own_namespace() is None
        self._records = RecordSpans(
            plan.probes,
            self._conditions,
            syscalls,
            is_there=lambda tid: not is_known or Path(f"/proc/{tid}").exists(),
        )
        self._channel = device.renderer().spans(self._conditions) if device else None
        for condition in self._conditions.all:
            _check(condition, plan, device.layers if device else (), syscalls.values())
        self._found: tuple[Condition, Span] | None = None
        self._write_at_ns = self._again_at_ns = 0

    def add(self, chunk: bytes) -> None:
        """Read records of probes."""
        self._look(self._records.ended(chunk))

    def add_device(self, chunk: bytes) -> None:
        """Read records of the GPUs' engine."""
        if self._channel is not None:
            self._look(self._channel.ended(chunk))

    def due(self, now_ns: int) -> str:
        """Why a recording is to be written now; "" if none is."""
        if now_ns < self._again_at_ns:  # most of what has ended by now is in the last recording
            self._found = None
            return ""
        self._look(self._records.under_way(now_ns))
        if self._channel is not None:
            self._look(self._channel.under_way(now_ns))
        if self._found is None:
            return ""
        self._write_at_ns = self._write_at_ns or now_ns + min(AFTER_NS, self._last_ns // 4)
        if now_ns < self._write_at_ns:
            return ""
        (condition, span), self._found, self._write_at_ns = self._found, None, 0
        self._again_at_ns = now_ns + self._last_ns
        lasted = "took" if span.is_over else "still runs after"
        return f"{condition.text}: {span.name} {lasted} {duration_text(span.length_ns)}"

    def _look(self, spans: Iterable[Span]) -> None:
        for span in spans:
            true = (one for one in self._conditions.all if span.length_ns > one.limit_ns)
            condition = next((one for one in true if one.fits(span.name, span.kind)), None)
            if condition is None:
                continue
            # The first one is the reason; if it was still open then, its end shows how long it took.
            if self._found is None or (not self._found[1].is_over and self._found[1].name == span.name):
                self._found = condition, span


# Kind → the layer of the engine in the command that records it, and message and hint where it is not
# recorded.
_OF_DEVICE: Final = {
    KERNEL: ("gpu_kernel", "no kernels are recorded", "Give --gpu kernels."),
    NVTX: ("annotation", "no ranges of NVTX are recorded", "Record the layer annotation, of a command."),
}


def _check(condition: Condition, plan: Plan, layers: Collection[str], syscalls: Collection[str]) -> None:
    """Raise TracepipeError for a condition on something that is not recorded."""

    def refused(why: str, hint: str) -> TracepipeError:
        return TracepipeError(f"--when {condition.text!r}: {why}.", hint)

    if condition.kind in _OF_DEVICE:
        layer, why, hint = _OF_DEVICE[condition.kind]
        if layer not in layers:
            raise refused(why, hint)
    elif condition.kind == SYSCALL:
        if not syscalls:
            raise refused("no system calls are recorded", "Record the layer syscall.")
        if not any(condition.fits(name, SYSCALL) for name in syscalls):
            near = did_you_mean(condition.pattern, syscalls)
            recorded = f"These are recorded: {', '.join(sorted(syscalls))}."
            raise refused("no recorded system call has such a name", near or recorded)
    elif "userspace" not in layers:
        names = {name for probe in plan.probes for name in (probe.name, probe.symbol)}
        if not any(condition.fits(name, CALL) for name in names):
            near = did_you_mean(condition.pattern, names)
            hint = near or "--hook records functions of any library."
            raise refused("no recorded function has such a name", hint)


@dataclass(frozen=True, slots=True)
class Condition:
    """True of a span of this kind, with a fitting name, that took longer than the limit."""

    text: str
    kind: SpanKind
    pattern: str
    limit_ns: int

    def fits(self, name: str, kind: SpanKind) -> bool:
        """Whether the condition applies to a span of this name and kind."""
        if kind != self.kind:
            return False
        if kind == KERNEL:
            return bool(re.search(self.pattern, name))
        return name == self.pattern or fnmatchcase(name, self.pattern)


class Conditions:
    """All given conditions. Raises TracepipeError for one that cannot be understood."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.all = [_condition(text) for text in texts]
        self.kinds = frozenset(one.kind for one in self.all)

    def limit_ns(self, name: str, kind: SpanKind) -> int | None:
        """The least limit that applies to a span of this name and kind; None if no condition applies."""
        return min((one.limit_ns for one in self.all if one.fits(name, kind)), default=None)


def _condition(text: str) -> Condition:
    named, sign, time = text.rpartition(">")
    if not sign:
        raise _refused(text, "it has no '>' and time")
    kind: SpanKind = CALL
    name = named.strip()
    if found := _KIND.fullmatch(name):
        word, name = found[1], found[2]
        if word not in FORMS:
            hint = did_you_mean(word, FORMS)
            raise _refused(text, f"{word!r} is not a known condition", hint)
        kind = word
    if not name:
        raise _refused(text, "there is no name before '>'")
    try:
        limit_ns = duration_ns(time.strip())
    except TracepipeError as error:
        raise _refused(text, error.message.rstrip("."), error.hint) from None
    if kind == KERNEL:
        try:
            re.compile(name)
        except re.error as error:
            raise _refused(text, f"{name!r} is not a regular expression: {error}") from None
    return Condition(text.strip(), kind, name, limit_ns)


def _refused(text: str, why: str, hint: str = "") -> TracepipeError:
    return TracepipeError(f"--when {text!r} cannot be understood: {why}.", hint or _HINT)
