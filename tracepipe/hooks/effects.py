"""Looks up what CUDA calls do to memory, by name, in the shipped sets."""

from __future__ import annotations

from functools import cache
from typing import Final

from tracepipe.hooks.sets import load_set

MEMORY_EFFECTS: Final = ("alloc", "free", "alloc_host", "free_host", "set")
_SETS: Final = ("cuda-driver", "cuda-runtime")


@cache
def _effects() -> tuple[dict[str, tuple[str, str]], tuple[str, ...]]:
    """Function → effect and direction in the shipped hooks; and the endings that a name may have."""
    known: dict[str, tuple[str, str]] = {}
    variants: set[str] = set()
    for name in _SETS:
        hooks = load_set(name)
        variants.update(hooks.variants)
        known |= {hook.pattern: (hook.effect, hook.direction) for hook in hooks.hooks if hook.effect}
    return known, tuple(sorted(variants, key=len, reverse=True))


def effect_of(name: str) -> tuple[str, str]:
    """What a successful call does (`alloc`, …, `transfer`) and the direction; "" if unknown."""
    known, variants = _effects()
    before = ""
    while name not in known and name != before:
        before = name
        name = next((name.removesuffix(end) for end in variants if name.endswith(end)), name)
    return known.get(name, ("", ""))
