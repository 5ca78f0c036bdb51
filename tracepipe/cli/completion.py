"""Completes values of options for shells, which ask by `_TRACEPIPE_COMPLETE`, where Typer does not know
them.
"""

from __future__ import annotations

import os
from typing import Final

_VARIABLE: Final = "_TRACEPIPE_COMPLETE"


def is_asked() -> bool:
    """Whether a shell started this process to complete a command line."""
    return _VARIABLE in os.environ


def complete_layers(incomplete: str) -> list[str]:
    """The lists of layers that complete an incomplete one, without repetition."""
    from tracepipe.tracer.request import LAYER_NAMES

    given, comma, last = incomplete.rpartition(",")
    others = set(given.split(","))
    words = LAYER_NAMES if comma else ("all", "none", *LAYER_NAMES)
    return [f"{given}{comma}{word}" for word in words if word.startswith(last) and word not in others]


def complete_sets(incomplete: str) -> list[str]:
    """The shipped sets of hooks whose names begin with a text."""
    from tracepipe.hooks.sets import shipped_sets

    return [name for name in shipped_sets() if name.startswith(incomplete)]
