"""Tells a GPU engine's library which calls to record, in the form of `native/call_choice.h`."""

from __future__ import annotations

from typing import Final

from tracepipe.hooks.calls import call_rule

CALLS_VARIABLE: Final = "TRACEPIPE_GPU_CALLS"
NO_CALLS: Final = "none"
"""No calls at all; the other values are the names of rules."""


def calls_text(calls: str) -> str:
    """The variable's value. Raises TracepipeError."""
    return calls if calls == NO_CALLS else call_rule(calls).text()
