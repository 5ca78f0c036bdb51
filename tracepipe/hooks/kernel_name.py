"""Names of kernels as a timeline can show them."""

from __future__ import annotations

import re
from typing import Final

# Brackets in an operator's own name open and close nothing.
_OPERATOR: Final = re.compile(r"\boperator ?(\(\)|\[\]|->\*?|<=>|<<=?|>>=?|<=?|>=?)")
_OPENING: Final = "<([{"
_CLOSING: Final = ">)]}"


def short_kernel_name(name: str) -> str:
    """A demangled name without its return type and parameters: `void f<int>(int*)` is `f<int>`.

    Names that are not C++ functions stay as they are.
    """
    text = name.partition(" [clone ")[0].removesuffix(" const")
    plain = _OPERATOR.sub(lambda found: "_" * len(found[0]), text)
    start = _opening_of_last(plain)
    if start <= 0:
        return name
    # Only templates have their return type in the name; it ends at the last blank outside of brackets,
    # unless that is in "f() const::{lambda()#1}".
    depth = begin = 0
    for at, letter in enumerate(plain[:start]):
        if letter in _OPENING:
            depth += 1
        elif letter in _CLOSING:
            depth -= 1
        elif letter == " " and not depth and not plain.startswith("const::", at + 1):
            begin = at + 1
    return text[begin:start] or name


def _opening_of_last(text: str) -> int:
    """Where the bracket opens that the last letter, a `)`, closes; -1 if nowhere."""
    depth = 0
    for at in range(len(text) - 1, -1, -1):
        if text[at] in _CLOSING:
            depth += 1
        elif text[at] in _OPENING:
            depth -= 1
        if not depth:
            return at if text[at] == "(" else -1
    return -1
