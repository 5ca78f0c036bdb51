"""What a flight recorder waits for: calls and kernels that take long, `cudaStreamSynchronize > 50ms`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from tracepipe.capture.engines.engine import DeviceEngine, DeviceRenderer
from tracepipe.capture.records.spans import RecordSpans, Span
from tracepipe.capture.request import Last, Plan
from tracepipe.errors import TracepipeError
from tracepipe.hooks.near_names import did_you_mean
from tracepipe.units import duration_ns, duration_text

AFTER_NS: Final = 10**9
"""So long after it came true, or a quarter of what is kept, it is written: with what followed, and what a GPU
did, which is reported up to 25 ms later."""
_FORM: Final = re.compile(r"\s*(kernel:)?(.*\S)\s*>\s*([^>\s]+)\s*", re.DOTALL)
_HINT: Final = "Write 'cudaStreamSynchronize > 50ms', with a pattern of names, or 'kernel:REGEX > 5ms'."


@dataclass(frozen=True, slots=True)
class Condition:
    """It is true when a call of a function, or a kernel, of such a name took longer."""

    text: str
    pattern: str
    limit_ns: int
    is_kernel: bool

    def fits(self, name: str, is_kernel: bool) -> bool:
        """Whether it is about what has this name."""
        if is_kernel != self.is_kernel:
            return False
        return bool(re.search(self.pattern, name)) if is_kernel else fnmatchcase(name, self.pattern)


def conditions_of(texts: Iterable[str]) -> list[Condition]:
    """The conditions that an option's texts say. Raises TracepipeError."""
    return [_condition(text) for text in texts]


def _condition(text: str) -> Condition:
    found = _FORM.fullmatch(text)
    if found is None:
        raise TracepipeError(f"--when {text!r} cannot be understood.", _HINT)
    try:
        limit_ns = duration_ns(found[3])
        re.compile(found[2] if found[1] else "")
    except (TracepipeError, re.error) as error:
        raise TracepipeError(f"--when {text!r} cannot be understood: {error}", _HINT) from None
    return Condition(text.strip(), found[2], limit_ns, bool(found[1]))


class Watch:
    """Looks at all that is collected, and says when one of the conditions came true."""

    def __init__(self, last: Last, plan: Plan, device: DeviceEngine | None) -> None:
        """Raises TracepipeError for a condition that can never be true of what is recorded."""
        self._conditions = conditions_of(last.when)
        self._last_ns = last.duration_ns
        self._records = RecordSpans(plan.probes, self._limit_ns)
        renderer: DeviceRenderer | None = device.renderer() if device else None
        self._channel = renderer.spans(self._limit_ns) if renderer else None
        layers: Collection[str] = device.layers if device else ()
        for condition in self._conditions:
            if condition.is_kernel and "gpu_kernel" not in layers:
                raise TracepipeError(
                    f"--when {condition.text!r}: no kernels are recorded.", "Give --gpu kernels."
                )
            if not condition.is_kernel and "userspace" not in layers:
                self._check_found(condition, plan)
        self._found: tuple[Condition, Span] | None = None
        self._write_at_ns = self._again_at_ns = 0

    def take(self, chunk: bytes) -> None:
        """Look at records of probes."""
        self._look(self._records.take(chunk))

    def take_device(self, chunk: bytes) -> None:
        """Look at records of the GPUs' engine."""
        if self._channel is not None:
            self._look(self._channel.take(chunk))

    def due(self, now_ns: int) -> str:
        """Why it is time to write now, "" if it is not."""
        if now_ns < self._again_at_ns:  # what is over by now has been written, or most of it
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
        lasted = "took" if span.is_over else "goes on after"
        return f"{condition.text}: {span.name} {lasted} {duration_text(span.length_ns)}"

    def _look(self, spans: Iterable[Span]) -> None:
        for span in spans:
            condition = next((one for one in self._conditions if _is_true(one, span)), None)
            if condition is None:
                continue
            # The first one is the reason; where it was going on then, its end says how long it took.
            if self._found is None or (not self._found[1].is_over and self._found[1].name == span.name):
                self._found = condition, span

    def _limit_ns(self, name: str, is_kernel: bool) -> int | None:
        limits_ns = [one.limit_ns for one in self._conditions if one.fits(name, is_kernel)]
        return min(limits_ns, default=None)

    def _check_found(self, condition: Condition, plan: Plan) -> None:
        names = {name for probe in plan.probes for name in (probe.name, probe.symbol)}
        if not any(condition.fits(name, False) for name in names):
            near = did_you_mean(condition.pattern, names)
            raise TracepipeError(
                f"--when {condition.text!r}: no function that is recorded has such a name.",
                near or "--hook records functions of any library.",
            )


def _is_true(condition: Condition, span: Span) -> bool:
    return span.length_ns > condition.limit_ns and condition.fits(span.name, span.is_kernel)
