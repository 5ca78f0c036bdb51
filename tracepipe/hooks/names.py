"""Finds the hook that applies to a symbol, and suggests known names for an unknown one.

A symbol is compared as it is and without the set's variants: cuMemFree_v2 fits the pattern cuMemFree. The
first fitting hook applies, but of plain names the longer part of the symbol takes precedence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from difflib import get_close_matches
from fnmatch import fnmatchcase, translate

from tracepipe.hooks.hook import Hook

_WILDCARDS = re.compile(r"[*?[]")

_COMPARED = 1000  # names: difflib compares each in 15 µs, of more only those with the same start
_PATTERN_PARTS = re.compile(r"\[[^]]*\]|[*?]+")


class HookIndex:
    """Hooks in order. `literals` are their patterns that are plain names."""

    def __init__(self, hooks: Iterable[Hook], variants: tuple[str, ...] = ()) -> None:
        self._variants = variants
        self._literal: dict[str, tuple[int, Hook]] = {}
        self._patterns: list[tuple[int, Callable[[str], object], Hook]] = []
        self._end = 0
        for hook in hooks:
            if _WILDCARDS.search(hook.pattern):
                self._patterns.append((self._end, re.compile(translate(hook.pattern)).match, hook))
            else:
                self._literal.setdefault(hook.pattern, (self._end, hook))
            self._end += 1

    @property
    def literals(self) -> Iterable[str]:
        """Patterns without wildcards."""
        return self._literal.keys()

    def find(self, symbol: str) -> Hook | None:
        """The hook that applies to `symbol`."""
        names = list(base_names(symbol, self._variants))
        order, literal = next(
            (self._literal[name] for name in names if name in self._literal), (self._end, None)
        )
        for pattern_order, match, hook in self._patterns:
            if pattern_order > order:
                break
            if any(match(name) for name in names):
                return hook
        return literal


class NameFilter:
    """The functions that a user wants: shell patterns for a symbol and its base names."""

    def __init__(self, only: tuple[str, ...], exclude: tuple[str, ...], variants: tuple[str, ...]) -> None:
        self._only, self._exclude, self._variants = only, exclude, variants

    def passes(self, symbols: Iterable[str]) -> bool:
        """Whether a place with these names is wanted."""
        if not self._only and not self._exclude:
            return True
        names = {name for symbol in symbols for name in base_names(symbol, self._variants)}
        if any(fnmatchcase(name, pattern) for pattern in self._exclude for name in names):
            return False
        return not self._only or any(fnmatchcase(name, pattern) for pattern in self._only for name in names)


def base_names(symbol: str, variants: tuple[str, ...]) -> Iterator[str]:
    """The symbol, then with its endings removed one by one: cuMemcpy_v2_ptds, cuMemcpy_v2, cuMemcpy."""
    while True:
        yield symbol
        ending = next((end for end in variants if end and symbol.endswith(end) and symbol != end), None)
        if ending is None:
            return
        symbol = symbol[: -len(ending)]


def near_names(name: str, known: Collection[str], count: int = 3) -> list[str]:
    """At most `count` of `known` that are similar to `name`, which may be a shell pattern; the nearest first.

    First come names that differ only in case, then those that contain the name or its longest literal part,
    then those that difflib finds among names with the same start. 120 000 names take 0.2 to 0.4 s.
    """
    wanted = name.lower()
    literal = max(_PATTERN_PARTS.split(wanted), key=len)
    is_pattern = literal != wanted
    folded = [(other.lower(), other) for other in known if other != name]
    found = [other for low, other in folded if (fnmatchcase(low, wanted) if is_pattern else low == wanted)]
    if len(literal) > 2:
        holding = [other for low, other in folded if literal in low]
        found += sorted(holding, key=lambda other: (len(other), other))
    if len(folded) > _COMPARED:
        folded = [pair for pair in folded if pair[0][:3] == literal[:3]]
    original = dict(folded)
    found += [original[low] for low in get_close_matches(literal, original, count)]
    return list(dict.fromkeys(found))[:count]


def did_you_mean(name: str, known: Collection[str]) -> str:
    """`Did you mean u64?`, or all known names if none is near and they are few, or ""."""
    near = near_names(name, known)
    if near:
        return f"Did you mean {' or '.join(near)}?"
    return f"Choose from: {', '.join(sorted(known))}." if 0 < len(known) <= 20 else ""
