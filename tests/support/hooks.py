"""Hooks as they are written on the command line."""

from __future__ import annotations

from tracepipe.hooks.hook import Hook
from tracepipe.hooks.sets import read_hooks


def hook_of(text: str) -> Hook:
    """The hook that `--hook TEXT` gives."""
    ((hook,),) = (hooks.hooks for hooks in read_hooks([text]))
    return hook
