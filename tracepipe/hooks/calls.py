"""Which calls of CUDA's are recorded, by their names: one rule for the probes and the engines for GPUs.

A rule is lists of words. A function that has a word of `keep` in its name is recorded; else one without any
of `only`, if there are such, or with one of `without` is not. `native/call_choice.h` reads the same lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tracepipe.errors import TracepipeError

CALL_SETS: Final = ("cuda-driver", "cuda-runtime")
"""The shipped sets whose functions the rules are for."""
_NAMING: Final = ("GetFunction", "GetKernel", "GetFuncBySymbol", "RegisterFunction")
"""They give kernels the names that launches have."""
_EXPORTING: Final = ("IpcGet",)
"""They make something, whatever their names say."""
_ASKING: Final = ("Get", "Peek", "Query", "Occupancy", "IsCapturing", "CanAccess")
_LAUNCHING: Final = ("Launch", "Memcpy", "Memset", "Synchronize")
_BUILDING: Final = ("Node",)
"""They put a launch or a copy into a graph, and make none."""


@dataclass(frozen=True, slots=True)
class CallRule:
    """Words of names: see above."""

    keep: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    def takes(self, function: str) -> bool:
        """Whether the function's calls are recorded."""
        if any(word in function for word in self.keep):
            return True
        if self.only and not any(word in function for word in self.only):
            return False
        return not any(word in function for word in self.without)

    def text(self) -> str:
        """The rule as the engines for GPUs read it: `keep=GetFunction,IpcGet without=Get,Peek`, or `all`."""
        lists = {"keep": self.keep, "only": self.only, "without": self.without}
        return " ".join(f"{name}={','.join(words)}" for name, words in lists.items() if words) or "all"


CALL_RULES: Final = {
    "all": CallRule(),
    "default": CallRule(keep=(*_NAMING, *_EXPORTING), without=_ASKING),
    "launches": CallRule(keep=_NAMING, only=_LAUNCHING, without=_BUILDING),
}
"""By the names that `--calls` takes."""


def call_rule(calls: str) -> CallRule:
    """The rule of that name. Raises TracepipeError."""
    if calls not in CALL_RULES:
        raise TracepipeError(f"Unknown choice of calls: {calls!r}.", f"Choose from: {', '.join(CALL_RULES)}.")
    return CALL_RULES[calls]
