"""Hooks as they are written on the command line, and those that are shipped."""

from __future__ import annotations

from functools import cache

from tracepipe.hooks.hook import FilePlace, Hook, Probe
from tracepipe.hooks.names import HookIndex
from tracepipe.hooks.sets import load_set, read_hooks


def hook_of(text: str) -> Hook:
    """The hook that `--hook TEXT` gives."""
    ((hook,),) = (hooks.hooks for hooks in read_hooks([text]))
    return hook


@cache
def shipped_probe(symbol: str) -> Probe:
    """The probe that the shipped sets give a function."""
    hooks = load_set("cuda-runtime" if symbol.startswith("cuda") else "cuda-driver")
    hook = HookIndex(hooks.hooks, hooks.variants).find(symbol)
    assert hook is not None
    return Probe(symbol, symbol, FilePlace("/lib/libcuda.so.1", 16), hook)
