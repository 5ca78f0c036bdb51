"""The conditions of `--when`: `[KIND:]NAME > TIME`, as in `cudaStreamSynchronize > 50ms` and `nvtx:step* >
200ms`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from tracepipe.errors import TracepipeError
from tracepipe.hooks.names import did_you_mean
from tracepipe.tracer.records.unrendered import CALL, KERNEL, NVTX, SYSCALL
from tracepipe.units import duration_ns

FORMS: Final = {
    CALL: "FUNCTION > 50ms",
    SYSCALL: "syscall:NAME > 50ms",
    NVTX: "nvtx:RANGE > 200ms",
    KERNEL: "kernel:REGEX > 5ms",
}
"""Kind → its form. A function may also be written as `call:FUNCTION`."""
_KIND: Final = re.compile(r"([A-Za-z]\w*):(?!:)\s*(.*)", re.DOTALL)
_HINT: Final = f"Write {', '.join(FORMS.values())}; names are patterns."


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition: it is true when a span of this kind and with a matching name took longer than the
    limit.
    """

    text: str
    kind: str
    pattern: str
    limit_ns: int

    def fits(self, name: str, kind: str) -> bool:
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

    def limit_ns(self, name: str, kind: str) -> int | None:
        """The least limit that applies to a span of this name and kind; None if no condition applies."""
        return min((one.limit_ns for one in self.all if one.fits(name, kind)), default=None)

    def of(self, name: str, kind: str, length_ns: int) -> Condition | None:
        """The first condition that is true for a span of this length."""
        fitting = (one for one in self.all if length_ns > one.limit_ns and one.fits(name, kind))
        return next(fitting, None)


def _condition(text: str) -> Condition:
    named, sign, time = text.rpartition(">")
    if not sign:
        raise _refused(text, "it has no '>' and time")
    kind, name = CALL, named.strip()
    if found := _KIND.fullmatch(name):
        kind, name = found[1], found[2]
        if kind not in FORMS:
            hint = did_you_mean(kind, FORMS)
            raise _refused(text, f"{kind!r} is not a known condition", hint)
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
