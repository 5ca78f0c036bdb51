"""Which calls an engine for GPUs records, as its library reads it: `native/call_choice.h` draws it."""

from __future__ import annotations

from typing import Final

from tracepipe.hooks.calls import call_rule

CALLS_VARIABLE: Final = "TRACEPIPE_GPU_CALLS"
NO_CALLS: Final = "none"
"""Besides the names of the rules: no call at all."""


def calls_text(calls: str) -> str:
    """The variable's value. Raises TracepipeError."""
    return calls if calls == NO_CALLS else call_rule(calls).text()
