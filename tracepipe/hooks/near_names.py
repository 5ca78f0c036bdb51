"""Suggests known names that are similar to an unknown one."""

from __future__ import annotations

import re
from collections.abc import Collection
from difflib import get_close_matches
from fnmatch import fnmatchcase
from heapq import nsmallest

_COMPARED = 1000  # names that difflib compares: 15 µs each
_WILDCARDS = re.compile(r"\[[^]]*\]|[*?]+")


def near_names(name: str, known: Collection[str], count: int = 3) -> list[str]:
    """At most `count` of `known` that are similar to `name`, which may be a shell pattern; the nearest first.

    First come names that differ only in case, then those that contain the name or its longest literal part,
    then those that difflib finds among names with the same start. 200 000 names take 0.1 s.
    """
    wanted = name.lower()
    literal = max(_WILDCARDS.split(wanted), key=len)
    is_pattern = literal != wanted
    folded = [(other.lower(), other) for other in known if other != name]
    found = [other for low, other in folded if (fnmatchcase(low, wanted) if is_pattern else low == wanted)]
    if len(literal) > 2:
        holding = [other for low, other in folded if literal in low]
        found += sorted(holding, key=lambda other: (len(other), other))
    if len(folded) > _COMPARED:
        alike = [pair for pair in folded if pair[0][:3] == literal[:3]]
        folded = nsmallest(_COMPARED, alike, key=lambda pair: _distance(pair[0], literal))
    original = dict(folded)
    found += [original[low] for low in get_close_matches(literal, original, count)]
    return list(dict.fromkeys(found))[:count]


def _distance(name: str, wanted: str) -> tuple[int, int]:
    """A sort key, nearest first: the longest common start, then the length."""
    differing = (at for at, (one, other) in enumerate(zip(name, wanted, strict=False)) if one != other)
    common = next(differing, min(len(name), len(wanted)))
    return -common, abs(len(name) - len(wanted))


def did_you_mean(name: str, known: Collection[str]) -> str:
    """`Did you mean u64?`, or all known names if none is near and they are few, or ""."""
    near = near_names(name, known)
    if near:
        return f"Did you mean {' or '.join(near)}?"
    return f"Choose from: {', '.join(sorted(known))}." if 0 < len(known) <= 20 else ""
