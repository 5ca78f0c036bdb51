"""That nothing fitted a pattern of names, with those that there were: what a mistyped pattern needs."""

from __future__ import annotations

import re

from tracepipe.hooks.near_names import near_names


class NameChoice:
    """Names that were met, by whether a pattern selects them."""

    def __init__(self, pattern: str, what: str, others: str, none: str) -> None:
        """`what` is said to fit it; `others` stands before names that do not, and `none` for them."""
        self.pattern, self._what, self._others, self._none = pattern, what, others, none
        self.names: dict[str, None] = {}
        """Those that do not fit."""
        self.is_met = False

    @property
    def note(self) -> list[str]:
        """What to say: nothing where something fitted, or all are taken."""
        if not self.pattern or self.is_met:
            return []
        names = list(self.names)
        literal = max(re.findall(r"[\w:]+", self.pattern), key=len, default="")
        near = near_names(literal, names) if literal else []
        found = f"near: {', '.join(near)}" if near else f"{self._others} {', '.join(names[:3])}"
        found += f" and {len(names) - 3} more" if not near and len(names) > 3 else ""
        return [f"no {self._what} {self.pattern!r}; {found if names else self._none}"]
