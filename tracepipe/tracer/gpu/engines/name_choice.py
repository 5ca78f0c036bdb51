"""Notes that no name matched a pattern, with the names that exist, as the pattern may be mistyped."""

from __future__ import annotations

import re

from tracepipe.hooks.names import near_names


class NameChoice:
    """The names that a pattern did not select, and whether it selected any."""

    def __init__(self, pattern: str, what: str, others: str, none: str) -> None:
        """`what` states what should fit; `others` precedes names that do not, `none` replaces them."""
        self.pattern, self._what, self._others, self._none = pattern, what, others, none
        self.names: dict[str, None] = {}
        """The names that do not fit."""
        self.is_matched = False

    @property
    def note(self) -> list[str]:
        """The note; empty if a name fitted, or if there is no pattern."""
        if not self.pattern or self.is_matched:
            return []
        names = list(self.names)
        literal = max(re.findall(r"[\w:]+", self.pattern), key=len, default="")
        near = near_names(literal, names) if literal else []
        found = f"near: {', '.join(near)}" if near else f"{self._others} {', '.join(names[:3])}"
        found += f" and {len(names) - 3} more" if not near and len(names) > 3 else ""
        return [f"no {self._what} {self.pattern!r}; {found if names else self._none}"]
