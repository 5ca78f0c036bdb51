"""Chooses by name which CUDA calls are recorded: one rule for the probes and the GPU engines.

A rule has lists of words. A function whose name contains a word of `keep` is recorded. Any other is recorded
if its name contains a word of `only`, where there are such words, and none of `without`.
`native/call_choice.h` reads the same lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tracepipe.errors import TracepipeError

CALL_SETS: Final = ("cuda-driver", "cuda-runtime")
"""The shipped sets to whose functions the rules apply."""
_NAMING: Final = ("GetFunction", "GetKernel", "GetFuncBySymbol", "RegisterFunction")
"""They give kernels the names that launches show."""
_EXPORTING: Final = ("IpcGet",)
"""They create something, despite the word in their names."""
_ASKING: Final = ("Get", "Peek", "Query", "Occupancy", "IsCapturing", "CanAccess")
_LAUNCHING: Final = ("Launch", "Memcpy", "Memset", "Synchronize", "EventRecord", "WaitEvent")
"""They give the GPU work, wait for it, or say which work waits for which."""
_BUILDING: Final = ("Node",)
"""They add a launch or a copy to a graph, and do not perform it."""


@dataclass(frozen=True, slots=True)
class CallRule:
    """The lists of words of a rule."""

    keep: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    def allows(self, function: str) -> bool:
        """Whether the function's calls are recorded."""
        if any(word in function for word in self.keep):
            return True
        if self.only and not any(word in function for word in self.only):
            return False
        return not any(word in function for word in self.without)

    def text(self) -> str:
        """The rule as GPU engines read it: `keep=GetFunction,IpcGet without=Get,Peek`, or `all`."""
        lists = {"keep": self.keep, "only": self.only, "without": self.without}
        return " ".join(f"{name}={','.join(words)}" for name, words in lists.items() if words) or "all"


CALL_RULES: Final = {
    "all": CallRule(),
    "default": CallRule(keep=(*_NAMING, *_EXPORTING), without=_ASKING),
    "launches": CallRule(keep=_NAMING, only=_LAUNCHING, without=_BUILDING),
}
"""Value of `--calls` → rule."""


def call_rule(calls: str) -> CallRule:
    """The rule of that name. Raises TracepipeError."""
    if calls not in CALL_RULES:
        raise TracepipeError(f"Unknown choice of calls: {calls!r}.", f"Choose from: {', '.join(CALL_RULES)}.")
    return CALL_RULES[calls]
