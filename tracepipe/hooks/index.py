"""Finds the hook that applies to a symbol.

A symbol is compared as it is and without the set's variants: cuMemFree_v2 fits the pattern cuMemFree. The
first fitting hook applies, but of plain names the longer part of the symbol takes precedence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase, translate

from tracepipe.hooks.hook import Hook

_WILDCARDS = re.compile(r"[*?[]")


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
